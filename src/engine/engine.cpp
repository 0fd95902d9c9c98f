#include "engine/engine.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <optional>

#include "core/log.h"

namespace kdtree {

namespace {

// Adds the milliseconds of its lifetime to `total`.
class StageTimer {
 public:
  explicit StageTimer(double& total) : total_(total) {}
  StageTimer(const StageTimer&) = delete;
  StageTimer& operator=(const StageTimer&) = delete;
  ~StageTimer() {
    total_ += std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start_)
                  .count();
  }

 private:
  double& total_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

double& stage_time(StageTimes& times, Stage stage) {
  return times[static_cast<std::size_t>(stage)];
}

}  // namespace

void check_requests(const std::vector<Request>& requests, const ModelConfig& config,
                    const EngineOptions& options) {
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const Request& request = requests[i];
    const auto length = static_cast<std::int64_t>(request.prompt_ids.size());
    require_input(length > 0, "prompt {} is empty: it needs at least one token", i);
    for (const std::int32_t token : request.prompt_ids) {
      require_input(token >= 0 && token < config.vocab_size,
                    "prompt {}: token id {} is outside the vocabulary, expected 0 to {}", i, token,
                    config.vocab_size - 1);
    }
    require_input(length < options.max_context,
                  "prompt {} has {} tokens, but the context holds {} with at least one new token: "
                  "shorten it or raise "
                  "--max-context",
                  i, length, options.max_context);
    require_input(length <= options.max_prompt,
                  "prompt {} has {} tokens, the engine was made for {}", i, length,
                  options.max_prompt);
    require_input(request.max_new_tokens > 0,
                  "prompt {}: max_new_tokens is {}, expected at least 1", i,
                  request.max_new_tokens);
  }
}

Engine::Engine(const LoadedModel& model, const EngineOptions& options, Backend& backend,
               Communicator& communicator, ProcessGroup& group)
    : options_(options),
      sizes_(step_sizes(model.source(), options)),
      context_{backend, communicator},
      group_(group),
      config_(model.source().target.config),
      vocabulary_(context_, config_, model.target_weights(),
                  target_partition(config_, model.load_options()).vocabulary, sizes_.vocabulary),
      decoder_(context_, config_, model.target_weights(),
               target_partition(config_, model.load_options()), model.placement(), sizes_.decoder),
      cache_(backend, sizes_.cache),
      batch_storage_(backend, sizes_.max_rows, options.batch_size, sizes_.max_nodes),
      tree_block_(backend, options.batch_size, sizes_.max_nodes),
      accept_block_(backend, options.batch_size, sizes_.max_path),
      sequences_(static_cast<std::size_t>(options.batch_size)) {
  const std::int64_t horizon = sizes_.max_path - 1;
  const DType dtype = backend.activation_dtype();
  normed_ = DeviceTensor(backend, dtype, Shape{sizes_.vocabulary.max_rows, config_.hidden_size});
  if (options.mode == Mode::kPlain) {
    return;
  }
  const DrafterConfig& drafter = model.source().drafter->config;
  drafter_ = std::make_unique<Drafter>(context_, drafter, model.drafter_weights(),
                                       drafter_partition(drafter, model.load_options()),
                                       vocabulary_, sizes_.drafter);
  const std::int64_t predictions = options.batch_size * horizon;
  const auto tap_width =
      static_cast<std::int64_t>(drafter.target_layer_ids.size()) * config_.hidden_size;
  candidate_probs_ =
      DeviceTensor(backend, DType::kFloat32, Shape{predictions, sizes_.num_candidates});
  candidate_ids_ = DeviceTensor(backend, DType::kInt32, Shape{predictions, sizes_.num_candidates});
  roots_ = DeviceTensor(backend, DType::kInt32, Shape{options.batch_size});
  tap_rows_ = DeviceTensor(backend, DType::kInt32, Shape{options.batch_size * sizes_.max_path});
  accepted_taps_ =
      DeviceTensor(backend, dtype, Shape{options.batch_size * sizes_.max_path, tap_width});
}

// Only rank 0 may have read the prompts (its file, its flags): all decode what it has.
std::vector<Request> Engine::share_requests(const std::vector<Request>& requests) {
  std::vector<std::int64_t> words;
  if (group_.rank() == 0) {
    for (const Request& request : requests) {
      words.insert(words.end(), {request.max_new_tokens, request.ignore_eos ? 1 : 0,
                                 static_cast<std::int64_t>(request.prompt_ids.size())});
      words.insert(words.end(), request.prompt_ids.begin(), request.prompt_ids.end());
    }
  }
  auto size = static_cast<std::int64_t>(words.size());
  group_.broadcast(&size, sizeof size, 0);
  words.resize(static_cast<std::size_t>(size));
  group_.broadcast(words.data(), size * static_cast<std::int64_t>(sizeof(std::int64_t)), 0);
  std::vector<Request> shared;
  for (std::size_t at = 0; at < words.size();) {
    Request request{
        .prompt_ids = {}, .max_new_tokens = words[at], .ignore_eos = words[at + 1] != 0};
    const auto length = static_cast<std::size_t>(words[at + 2]);
    at += 3;
    for (std::size_t i = 0; i < length; ++i) {
      request.prompt_ids.push_back(static_cast<std::int32_t>(words[at + i]));
    }
    at += length;
    shared.push_back(std::move(request));
  }
  return shared;
}

void Engine::generate(const std::vector<Request>& requests, const Scheduler::OnResult& on_result) {
  const std::vector<Request> shared = share_requests(requests);
  run_together(group_, [&] { check_requests(shared, config_, options_); });
  std::optional<Scheduler> rank0;
  if (group_.rank() == 0) {
    rank0.emplace(SchedulerOptions{.num_slots = options_.batch_size,
                                   .max_context = options_.max_context,
                                   .eos_token_ids = config_.eos_token_ids,
                                   .record_steps = options_.record_steps},
                  shared, on_result);
  }
  Scheduler* scheduler = rank0 ? &*rank0 : nullptr;
  std::fill(sequences_.begin(), sequences_.end(), Sequence{});
  last_commit_ms_ = 0;
  StepDecision decision;
  if (scheduler != nullptr) {
    scheduler->plan_next(decision);
  }
  share_decision(decision);
  while (decision.next != NextAction::kStop) {
    if (decision.next == NextAction::kPrefill) {
      const std::int32_t slot = decision.prefill_slot;
      prefill(slot, shared.at(static_cast<std::size_t>(decision.prefill_request)), scheduler,
              decision);
    } else {
      decode(scheduler, decision);
    }
  }
}

void Engine::share_decision(StepDecision& decision) {
  Backend& backend = context_.backend;
  if (group_.rank() == 0) {
    accept_block_.upload(backend, decision);
  }
  context_.communicator.broadcast(accept_block_.tensor(), 0, backend.stream(),
                                  {.what = "accept block"});
  decision = accept_block_.download_decision(backend);
}

std::vector<TokenLogit> Engine::download_row(const Vocabulary::TopK& top, std::int64_t row,
                                             std::int64_t count) {
  const auto size = static_cast<std::size_t>(count);
  std::vector<float> values(size);
  std::vector<std::int32_t> ids(size);
  const ConstTensorView value_row = top.values.rows(row, 1);
  const ConstTensorView id_row = top.ids.rows(row, 1);
  context_.backend.download(values.data(), value_row.raw(), count * dtype_bytes(DType::kFloat32));
  context_.backend.download(ids.data(), id_row.raw(), count * dtype_bytes(DType::kInt32));
  context_.backend.synchronize();
  std::vector<TokenLogit> pairs;
  for (std::size_t i = 0; i < size; ++i) {
    pairs.emplace_back(ids[i], values[i]);
  }
  return pairs;
}

void Engine::prefill(std::int32_t slot, const Request& request, Scheduler* scheduler,
                     StepDecision& decision) {
  cache_.clear(slot);
  if (drafter_) {
    drafter_->clear(slot);
  }
  const std::span<const std::int32_t> prompt = request.prompt_ids;
  const auto piece_rows = static_cast<std::size_t>(sizes_.prefill_rows);
  for (std::size_t first = 0; first < prompt.size(); first += piece_rows) {
    const auto piece = prompt.subspan(first, std::min(piece_rows, prompt.size() - first));
    const SequenceRows rows{.slot = slot,
                            .prefix_length = static_cast<std::int32_t>(cache_.committed(slot)),
                            .token_ids = piece,
                            .parents = {}};
    batch_ = batch_storage_.fill({&rows, 1});
    const ConstTensorView hidden = decoder_.forward(batch_, cache_, vocabulary_);
    cache_.commit_rows(slot, batch_.num_rows);
    if (drafter_) {
      const Drafter::ContextRows context_rows{.slot = slot, .num_rows = batch_.num_rows};
      drafter_->append_context(decoder_.taps(), {&context_rows, 1});
    }
    if (first + piece.size() == prompt.size()) {
      decoder_.final_norm(hidden.rows(batch_.num_rows - 1, 1), normed_.rows(1));
    }
  }
  const std::int64_t num_top = std::max<std::int64_t>(1, options_.max_top_logits);
  const Vocabulary::TopK top = vocabulary_.top_logits(normed_.rows(1), num_top);
  decision = {};
  if (scheduler != nullptr) {
    std::vector<TokenLogit> top_logits = download_row(top, 0, num_top);
    AcceptedSequence started{
        .path = {}, .bonus_token = top_logits.front().first, .finished = false};
    if (options_.max_top_logits == 0) {
      top_logits.clear();
    }
    started.finished = scheduler->start_sequence(slot, started.bonus_token, std::move(top_logits));
    decision.sequences.push_back(started);
    scheduler->plan_next(decision);
  }
  share_decision(decision);
  const AcceptedSequence& started = decision.sequences.at(0);
  sequences_[static_cast<std::size_t>(slot)] = {.running = !started.finished,
                                                .root_token = started.bonus_token};
}

void Engine::record_candidates(const Vocabulary::TopK& ranked, std::span<const std::int32_t> slots,
                               Scheduler& scheduler) {
  constexpr std::int64_t kRecorded = 8;
  const std::int64_t horizon = sizes_.max_path - 1;
  const std::int64_t count = std::min(kRecorded, sizes_.num_ranked);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    std::vector<std::vector<TokenLogit>> rows;
    for (std::int64_t row = 0; row < horizon; ++row) {
      rows.push_back(download_row(ranked, static_cast<std::int64_t>(i) * horizon + row, count));
    }
    scheduler.record_draft(slots[i], std::move(rows));
  }
}

void Engine::draft_trees(std::span<const std::int32_t> slots, Scheduler* scheduler,
                         StageTimes& times) {
  Backend& backend = context_.backend;
  std::vector<std::int32_t> roots;
  std::vector<Drafter::Root> drafted;
  for (const std::int32_t slot : slots) {
    roots.push_back(sequences_[static_cast<std::size_t>(slot)].root_token);
    drafted.push_back({.slot = slot, .token = roots.back()});
  }
  if (!drafter_) {
    const StageTimer timer(stage_time(times, Stage::kTreeBuild));
    if (scheduler != nullptr) {
      tree_block_.set_roots(backend, roots);
    }
    return;
  }
  Vocabulary::TopK ranked;
  {
    const StageTimer timer(stage_time(times, Stage::kDraft));
    ranked = drafter_->draft(drafted, sizes_.num_ranked);
  }
  if (scheduler == nullptr) {
    return;
  }
  if (options_.record_steps) {
    record_candidates(ranked, slots, *scheduler);
  }
  const StageTimer timer(stage_time(times, Stage::kTreeBuild));
  const std::int64_t predictions = ranked.ids.size(0);
  const TensorView probs = candidate_probs_.rows(predictions);
  const TensorView ids = candidate_ids_.rows(predictions);
  backend.copy(ranked.values.columns(0, sizes_.num_candidates), probs);
  backend.copy(ranked.ids.columns(0, sizes_.num_candidates), ids);
  roots_.upload(backend, std::span<const std::int32_t>(roots));
  const auto num_sequences = static_cast<std::int64_t>(slots.size());
  backend.build_trees({.log_probs = probs,
                       .candidates = ids,
                       .draft_horizon = sizes_.max_path - 1,
                       .roots = roots_.rows(num_sequences),
                       .tree_budget = sizes_.max_nodes - 1,
                       .trees = tree_block_.arrays(num_sequences)});
}

std::vector<DraftTree> Engine::share_trees(std::int64_t num_sequences) {
  context_.communicator.broadcast(tree_block_.tensor(), 0, context_.backend.stream(),
                                  {.what = "tree block"});
  return tree_block_.download(context_.backend, num_sequences);
}

ConstTensorView Engine::verify(std::span<const std::int32_t> slots,
                               const std::vector<DraftTree>& trees) {
  std::vector<SequenceRows> rows;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    rows.push_back({.slot = slots[i],
                    .prefix_length = static_cast<std::int32_t>(cache_.committed(slots[i])),
                    .token_ids = trees[i].token_ids,
                    .parents = trees[i].parents});
  }
  batch_ = batch_storage_.fill(rows);
  const ConstTensorView hidden = decoder_.forward(batch_, cache_, vocabulary_);
  const TensorView normed = normed_.rows(batch_.num_rows);
  decoder_.final_norm(hidden, normed);
  return vocabulary_.top_logits(normed, 1).ids.reshape(Shape{batch_.num_rows});
}

void Engine::commit(std::span<const std::int32_t> slots, const std::vector<DraftTree>& trees,
                    const StepDecision& decision) {
  Backend& backend = context_.backend;
  const auto num_sequences = static_cast<std::int64_t>(slots.size());
  std::vector<std::int32_t> path_lengths;
  std::vector<std::int32_t> tap_rows;
  std::vector<Drafter::ContextRows> context_rows;
  std::int32_t first_row = 0;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const AcceptedSequence& accepted = decision.sequences.at(i);
    path_lengths.push_back(static_cast<std::int32_t>(accepted.path.size()));
    if (!accepted.finished) {
      context_rows.push_back(
          {.slot = slots[i], .num_rows = static_cast<std::int64_t>(accepted.path.size())});
      for (const std::int32_t node : accepted.path) {
        tap_rows.push_back(first_row + node);
      }
    }
    first_row += static_cast<std::int32_t>(trees[i].num_nodes());
    sequences_[static_cast<std::size_t>(slots[i])] = {.running = !accepted.finished,
                                                      .root_token = accepted.bonus_token};
  }
  cache_.commit_paths({.cache = {},
                       .slots = batch_.slots,
                       .prefix_lengths = batch_.prefix_lengths,
                       .path_lengths = accept_block_.path_lengths(num_sequences),
                       .paths = accept_block_.paths(num_sequences)},
                      slots, path_lengths);
  if (drafter_ && !context_rows.empty()) {
    const auto num_rows = static_cast<std::int64_t>(tap_rows.size());
    tap_rows_.upload(backend, std::span<const std::int32_t>(tap_rows));
    backend.gather_rows(decoder_.taps(), tap_rows_.rows(num_rows), accepted_taps_.rows(num_rows));
    drafter_->append_context(accepted_taps_.rows(num_rows), context_rows);
  }
}

void Engine::decode(Scheduler* scheduler, StepDecision& decision) {
  Backend& backend = context_.backend;
  StageTimes times{};
  stage_time(times, Stage::kCommit) = last_commit_ms_;
  std::vector<std::int32_t> slots;
  for (std::size_t slot = 0; slot < sequences_.size(); ++slot) {
    if (sequences_[slot].running) {
      slots.push_back(static_cast<std::int32_t>(slot));
    }
  }
  const auto num_sequences = static_cast<std::int64_t>(slots.size());
  draft_trees(slots, scheduler, times);
  std::vector<DraftTree> trees;
  ConstTensorView choices;
  {
    const StageTimer timer(stage_time(times, Stage::kVerify));
    trees = share_trees(num_sequences);
    choices = verify(slots, trees);
  }
  decision = {};
  if (scheduler != nullptr) {
    {
      const StageTimer timer(stage_time(times, Stage::kAccept));
      backend.accept({.trees = tree_block_.arrays(num_sequences),
                      .choices = choices,
                      .row_offsets = batch_.row_offsets,
                      .path_lengths = accept_block_.path_lengths(num_sequences),
                      .paths = accept_block_.paths(num_sequences),
                      .bonus_tokens = accept_block_.bonus_tokens(num_sequences)});
      decision.sequences = accept_block_.download(backend, num_sequences);
    }
    scheduler->add_stage_times(slots, times);
    for (std::size_t i = 0; i < slots.size(); ++i) {
      decision.sequences[i].finished =
          scheduler->advance_sequence(slots[i], trees[i], decision.sequences[i]);
    }
    scheduler->plan_next(decision);
  }
  share_decision(decision);
  last_commit_ms_ = 0;
  const StageTimer timer(last_commit_ms_);
  commit(slots, trees, decision);
}

}  // namespace kdtree
