// The decoding loop: see src/engine/README.md for its contracts.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "comm/process_group.h"
#include "engine/loaded_model.h"
#include "engine/request.h"
#include "engine/scheduler.h"
#include "model/tree_batch_storage.h"
#include "speculative/draft_tree.h"

namespace kdtree {

// InputError unless the engine can decode all `requests`: an empty prompt, a token outside the
// vocabulary, a prompt that leaves no room in max_context, no tokens asked for. Engine::generate
// checks too; callers ask before they load a model of many minutes.
void check_requests(const std::vector<Request>& requests, const ModelConfig& config,
                    const EngineOptions& options);

class Engine {
 public:
  // Every rank makes one, with equal options. Allocates caches and workspaces; nothing is allocated
  // on the device after that. All references outlive the engine.
  Engine(const LoadedModel& model, const EngineOptions& options, Backend& backend,
         Communicator& communicator, ProcessGroup& group);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Decodes the requests of rank 0 (the other ranks' are ignored), batch_size at a time.
  // Collective. On rank 0 `on_result` gets each result, in the order of the requests. AgreedError
  // on every rank if a request is not valid (check_requests).
  void generate(const std::vector<Request>& requests, const Scheduler::OnResult& on_result);

 private:
  // What all ranks know of a running sequence.
  struct Sequence {
    bool running = false;
    std::int32_t root_token = 0;  // chosen by the target, not yet in the cache
  };

  std::vector<Request> share_requests(const std::vector<Request>& requests);
  void prefill(std::int32_t slot, const Request& request, Scheduler* scheduler,
               StepDecision& decision);
  void decode(Scheduler* scheduler, StepDecision& decision);
  // Sends rank 0's decision to all.
  void share_decision(StepDecision& decision);

  // The stages of a step.
  void draft_trees(std::span<const std::int32_t> slots, Scheduler* scheduler, StageTimes& times);
  std::vector<DraftTree> share_trees(std::int64_t num_sequences);
  ConstTensorView verify(std::span<const std::int32_t> slots, const std::vector<DraftTree>& trees);
  void commit(std::span<const std::int32_t> slots, const std::vector<DraftTree>& trees,
              const StepDecision& decision);

  // Rank 0: what the drafter ranked best, into the scheduler's records.
  void record_candidates(const Vocabulary::TopK& ranked, std::span<const std::int32_t> slots,
                         Scheduler& scheduler);
  std::vector<TokenLogit> download_row(const Vocabulary::TopK& top, std::int64_t row,
                                       std::int64_t count);

  EngineOptions options_;
  StepSizes sizes_;
  ModelContext context_;
  ProcessGroup& group_;
  const ModelConfig& config_;
  Vocabulary vocabulary_;
  Decoder decoder_;
  LatentKvCache cache_;
  std::unique_ptr<Drafter> drafter_;  // none in plain mode
  TreeBatchStorage batch_storage_;
  TreeBlock tree_block_;
  AcceptBlock accept_block_;
  DeviceTensor normed_;              // [vocabulary rows, hidden]
  DeviceTensor candidate_probs_;     // [sequences * horizon, num_candidates]
  DeviceTensor candidate_ids_;       // [sequences * horizon, num_candidates]
  DeviceTensor roots_;               // [sequences]
  DeviceTensor tap_rows_;            // [sequences * max_path]
  DeviceTensor accepted_taps_;       // [sequences * max_path, taps * hidden]
  TreeBatch batch_;                  // of the running step
  std::vector<Sequence> sequences_;  // by slot
  double last_commit_ms_ =
      0;  // of the previous step: it ends after the sequences' records are written
};

}  // namespace kdtree
