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
#include "speculative/step_state.h"

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
  ~Engine();

  // Decodes the requests of rank 0 (the other ranks' are ignored), batch_size at a time.
  // Collective. On rank 0 `on_result` gets each result, in the order of the requests. AgreedError
  // on every rank if a request is not valid (check_requests).
  void generate(const std::vector<Request>& requests, const Scheduler::OnResult& on_result);

 private:
  // What all ranks know of a slot.
  struct Slot {
    bool running = false;
    std::int32_t root_token = 0;  // chosen by the target, not yet in the cache
  };

  std::vector<Request> share_requests(const std::vector<Request>& requests);
  void prefill(std::int32_t slot, const Request& request, Scheduler* scheduler,
               StepDecision& decision);
  void decode(Scheduler* scheduler, StepDecision& decision);
  // Sends rank 0's decision, and which sequences of the step's batch have finished, to all.
  void share_decision(StepDecision& decision, std::span<std::int32_t> finished);

  // One step of the sequences in step_, on the device alone: draft, tree build, verify, accept,
  // commit.
  void step();
  void draft_and_build();
  void verify_and_accept();
  void commit();
  // Lists the running sequences in step_, where they are not those of the last step.
  void list_sequences();

  // What the step left for the host.
  StageTimes stage_times();
  void record_candidates(Scheduler& scheduler);
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
  TreeBatchStorage prompt_storage_;   // rows of a prompt piece
  StepState step_;
  DeviceTensor normed_;           // [vocabulary rows, hidden]
  DeviceTensor candidate_probs_;  // [sequences * horizon, num_candidates]
  DeviceTensor candidate_ids_;    // [sequences * horizon, num_candidates]
  DeviceTensor
      recorded_probs_;  // [sequences * horizon, num_recorded]; written with record_steps only
  DeviceTensor recorded_ids_;   // [sequences * horizon, num_recorded]
  DeviceTensor accepted_taps_;  // [sequences * max_path, taps * hidden]
  std::vector<Slot> slots_;
  std::vector<std::int32_t> listed_;  // slots of the sequences in step_, in order
  bool relist_ = true;                // the set of running sequences has changed
  std::int64_t serial_ = 0;           // of this engine, for the keys of recorded steps
};

}  // namespace kdtree
