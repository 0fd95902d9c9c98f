// Rank 0's bookkeeping: which prompt runs in which slot, what each has produced, when it stops,
// what comes next. The other ranks learn its decisions from the accept block.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "comm/parallel_grid.h"
#include "engine/request.h"
#include "speculative/draft_tree.h"

namespace kdtree {

enum class NextAction : std::int32_t { kStop = 0, kDecode = 1, kPrefill = 2 };

// What rank 0 tells the others between two steps; a plain block of fixed size.
struct StepDecision {
  NextAction next = NextAction::kStop;
  std::int32_t prefill_slot = 0;     // kPrefill only
  std::int32_t prefill_request = 0;  // kPrefill only
  std::int32_t first_token = 0;      // of the sequence that has just been prefilled
  std::int32_t finished = 0;         // whether that token ended it
};

struct SchedulerOptions {
  std::int64_t num_slots = 1;
  ParallelGrid grid = {};        // which slots its attention groups have
  std::int64_t max_context = 0;  // prompt and output together
  std::vector<std::int64_t> eos_token_ids;
  bool record_steps = false;
  double near_tie_share = 0;  // near_tie_share() of src/engine/near_tie.h
};

class Scheduler {
 public:
  using OnResult = std::function<void(Result)>;
  using OnTokens = std::function<void(const TokenUpdate&)>;

  // `on_result` gets the results in the order of the requests; `on_tokens`, unless empty, what each
  // step added to each sequence, before the result that holds it. `requests` outlives the
  // scheduler.
  Scheduler(const SchedulerOptions& options, std::span<const Request> requests, OnResult on_result,
            OnTokens on_tokens = {});

  // What to do first, and after each step: prefill where a slot is free and a prompt waits (in the
  // attention group that has the most free slots, the first of those), else decode, else stop. Also
  // takes finished sequences out of their slots.
  void plan_next(StepDecision& decision);

  // A prompt has been processed: its first token, how close that choice was, and the logits to
  // report (may be empty). Returns whether the sequence is finished.
  bool start_sequence(std::int32_t slot, std::int32_t first_token, const ChoiceLogits& choice,
                      std::vector<TokenLogit> top_logits);
  // Of the sequence in `slot`.
  std::int64_t request_index(std::int32_t slot) { return active(slot).result.index; }
  // A step of the sequence in `slot`: the accepted tree nodes and the bonus token. Returns whether
  // it is finished.
  bool advance_sequence(std::int32_t slot, const DraftTree& tree, const AcceptedPath& accepted);
  // Adds a step's stage times and the drafter's candidates (may be empty) to the sequence's
  // records, before advance_sequence.
  void record_draft(std::int32_t slot, std::vector<std::vector<TokenLogit>> draft_top_log_probs);
  void add_stage_times(std::span<const std::int32_t> slots, const StageTimes& times);

 private:
  using Clock = std::chrono::steady_clock;
  struct Active {
    Result result;
    std::int64_t max_output = 0;  // tokens after which it stops
    bool stops_at_context = false;
    Clock::time_point admitted;
    bool finished = false;
    std::vector<std::vector<TokenLogit>> draft_top_log_probs;  // of the running step
  };

  // Appends a token that the target chose by `choice`; returns false if nothing may follow it.
  bool append_token(Active& active, std::int32_t token, const ChoiceLogits& choice);
  // Tells on_tokens_ what stands behind the first `known` tokens.
  void report_tokens(const Active& active, std::size_t known);
  Active& active(std::int32_t slot);
  // slots_.size() if none is free.
  std::size_t free_slot() const;
  void release(std::int32_t slot);
  void deliver_in_order();

  SchedulerOptions options_;
  std::span<const Request> requests_;
  OnResult on_result_;
  OnTokens on_tokens_;
  std::size_t next_request_ = 0;
  std::vector<std::optional<Active>> slots_;
  std::map<std::int64_t, Result> waiting_;  // finished, but an earlier one is not
  std::int64_t next_delivery_ = 0;
};

}  // namespace kdtree
