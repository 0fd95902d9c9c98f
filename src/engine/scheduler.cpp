#include "engine/scheduler.h"

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "engine/group_slots.h"
#include "engine/near_tie.h"

namespace kdtree {

namespace {

double milliseconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

}  // namespace

Scheduler::Scheduler(const SchedulerOptions& options, std::span<const Request> requests,
                     OnResult on_result, OnTokens on_tokens)
    : options_(options),
      requests_(requests),
      on_result_(std::move(on_result)),
      on_tokens_(std::move(on_tokens)),
      slots_(static_cast<std::size_t>(options.num_slots)) {}

Scheduler::Active& Scheduler::active(std::int32_t slot) {
  std::optional<Active>& entry = slots_.at(static_cast<std::size_t>(slot));
  check(entry.has_value(), "slot {} holds no sequence", slot);
  return *entry;
}

std::size_t Scheduler::free_slot() const {
  const auto count_free = [this](const Range& slots) {
    return std::count(slots_.begin() + slots.begin, slots_.begin() + slots.end, std::nullopt);
  };
  Range roomiest = group_slots(options_.grid, options_.num_slots, 0);
  for (int group = 1; group < options_.grid.attention_dp; ++group) {
    const Range slots = group_slots(options_.grid, options_.num_slots, group);
    if (count_free(slots) > count_free(roomiest)) {
      roomiest = slots;
    }
  }
  const auto found =
      std::find(slots_.begin() + roomiest.begin, slots_.begin() + roomiest.end, std::nullopt);
  return found == slots_.begin() + roomiest.end ? slots_.size()
                                                : static_cast<std::size_t>(found - slots_.begin());
}

void Scheduler::plan_next(StepDecision& decision) {
  // Finished sequences leave their slots here.
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    if (slots_[slot] && slots_[slot]->finished) {
      release(static_cast<std::int32_t>(slot));
    }
  }
  const std::size_t slot = free_slot();
  if (slot != slots_.size() && next_request_ < requests_.size()) {
    const Request& request = requests_[next_request_];
    Active entry;
    entry.result.index = static_cast<std::int64_t>(next_request_);
    entry.result.prompt_ids = request.prompt_ids;
    const auto room = options_.max_context - static_cast<std::int64_t>(request.prompt_ids.size());
    entry.stops_at_context = room < request.max_new_tokens;
    entry.max_output = std::min(room, request.max_new_tokens);
    entry.admitted = Clock::now();
    slots_[slot] = std::move(entry);
    decision.next = NextAction::kPrefill;
    decision.prefill_slot = static_cast<std::int32_t>(slot);
    decision.prefill_request = static_cast<std::int32_t>(next_request_++);
    return;
  }
  const bool any = std::any_of(slots_.begin(), slots_.end(),
                               [](const auto& entry) { return entry.has_value(); });
  decision.next = any ? NextAction::kDecode : NextAction::kStop;
}

bool Scheduler::append_token(Active& active, std::int32_t token, const ChoiceLogits& choice) {
  if (const double margin = near_tie_margin(choice, options_.near_tie_share); margin < 1) {
    active.result.near_ties.push_back(static_cast<std::int64_t>(active.result.output_ids.size()));
    active.result.near_tie_margins.push_back(margin);
  }
  active.result.output_ids.push_back(token);
  const Request& request = requests_[static_cast<std::size_t>(active.result.index)];
  const auto& ends = options_.eos_token_ids;
  if (!request.ignore_eos && std::find(ends.begin(), ends.end(), token) != ends.end()) {
    active.result.stop_reason = StopReason::kEos;
    active.finished = true;
  } else if (static_cast<std::int64_t>(active.result.output_ids.size()) >= active.max_output) {
    active.result.stop_reason =
        active.stops_at_context ? StopReason::kContext : StopReason::kLength;
    active.finished = true;
  }
  if (active.finished) {
    active.result.metrics.total_ms = milliseconds_since(active.admitted);
  }
  return !active.finished;
}

bool Scheduler::start_sequence(std::int32_t slot, std::int32_t first_token,
                               const ChoiceLogits& choice, std::vector<TokenLogit> top_logits) {
  Active& entry = active(slot);
  entry.result.top_logits = std::move(top_logits);
  entry.result.metrics.time_to_first_token_ms = milliseconds_since(entry.admitted);
  entry.result.metrics.prefill_ms = entry.result.metrics.time_to_first_token_ms;
  const bool open = append_token(entry, first_token, choice);
  report_tokens(entry, 0);
  return !open;
}

void Scheduler::report_tokens(const Active& active, std::size_t known) {
  if (on_tokens_) {
    on_tokens_({.index = active.result.index,
                .tokens = std::span(active.result.output_ids).subspan(known),
                .finished = active.finished});
  }
}

void Scheduler::record_draft(std::int32_t slot,
                             std::vector<std::vector<TokenLogit>> draft_top_log_probs) {
  active(slot).draft_top_log_probs = std::move(draft_top_log_probs);
}

bool Scheduler::advance_sequence(std::int32_t slot, const DraftTree& tree,
                                 const AcceptedPath& accepted) {
  Active& entry = active(slot);
  Result& result = entry.result;
  check(!accepted.nodes.empty() && accepted.nodes.front() == 0,
        "an accepted path does not start at the root");
  // The root is known already; each further node and the bonus token are new.
  result.acceptance_lengths.push_back(static_cast<std::int32_t>(accepted.nodes.size()));
  if (options_.record_steps) {
    StepRecord record;
    record.root = tree.token_ids.front();
    record.draft_top_log_probs = std::move(entry.draft_top_log_probs);
    record.token_ids.assign(tree.token_ids.begin() + 1, tree.token_ids.end());
    record.depths.assign(tree.depths.begin() + 1, tree.depths.end());
    record.parents = tree.parents;
    record.accepted_nodes.assign(accepted.nodes.begin() + 1, accepted.nodes.end());
    record.bonus_token = accepted.bonus_token;
    result.steps.push_back(std::move(record));
  }
  const std::size_t known = result.output_ids.size();
  // The target chose each token at the node before it.
  bool open = true;
  for (std::size_t i = 1; i < accepted.nodes.size() && open; ++i) {
    open = append_token(entry, tree.token_ids.at(static_cast<std::size_t>(accepted.nodes[i])),
                        accepted.choices.at(i - 1));
  }
  if (open) {
    open =
        append_token(entry, accepted.bonus_token, accepted.choices.at(accepted.nodes.size() - 1));
  }
  report_tokens(entry, known);
  return !open;
}

void Scheduler::add_stage_times(std::span<const std::int32_t> slots, const StageTimes& times) {
  for (const std::int32_t slot : slots) {
    active(slot).result.metrics.steps.push_back(times);
  }
}

void Scheduler::release(std::int32_t slot) {
  Active& entry = active(slot);
  waiting_.emplace(entry.result.index, std::move(entry.result));
  slots_[static_cast<std::size_t>(slot)].reset();
  deliver_in_order();
}

void Scheduler::deliver_in_order() {
  while (!waiting_.empty() && waiting_.begin()->first == next_delivery_) {
    on_result_(std::move(waiting_.begin()->second));
    waiting_.erase(waiting_.begin());
    ++next_delivery_;
  }
}

}  // namespace kdtree
