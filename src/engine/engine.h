// The decoding loop: see src/engine/README.md for its contracts.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "comm/process_group.h"
#include "engine/exchange_counters.h"
#include "engine/loaded_model.h"
#include "engine/request.h"
#include "engine/scheduler.h"
#include "engine/step_view.h"
#include "model/tree_batch_storage.h"
#include "placement/expert_loads.h"
#include "speculative/draft_tree.h"
#include "speculative/output_ring.h"
#include "speculative/step_state.h"

namespace kdtree {

// InputError unless the engine can decode all `requests`: an empty prompt, a token outside the
// vocabulary, a prompt that leaves no room in max_context, no tokens asked for. Engine::generate
// checks too; callers ask before they load a model of many minutes.
void check_requests(const std::vector<Request>& requests, const ModelConfig& config,
                    const EngineOptions& options);
// InputError unless the engine can score all `windows`: fewer than two tokens, a token outside the
// vocabulary, a first_scored that names no token behind another one, more tokens than fit.
void check_windows(const std::vector<ScoreWindow>& windows, const ModelConfig& config,
                   const EngineOptions& options);

class Engine {
 public:
  using OnStep = std::function<void(const StepView&)>;
  using OnScores = std::function<void(std::size_t index, std::span<const double> log_probs)>;

  // Every rank makes one, with equal options, whose grid is that of `ranks`. Allocates caches and
  // workspaces; nothing is allocated on the device after that. All references, and the
  // communicators of `ranks`, outlive the engine.
  Engine(const LoadedModel& model, const EngineOptions& options, Backend& backend,
         const RankGroups& ranks, ProcessGroup& group);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  ~Engine();

  const EngineOptions& options() const { return options_; }

  // Decodes the requests of rank 0 (the other ranks' are ignored), batch_size at a time.
  // Collective. On rank 0 `on_result` gets each result, in the order of the requests. AgreedError
  // on every rank if a request is not valid (check_requests). `on_tokens`, unless empty, gets on
  // rank 0 what each step added to each sequence: in the order of the steps, never taken back,
  // together the sequence's output_ids. `on_step`, unless empty, gets on rank 0 each step that
  // counts, of each sequence. All are called between two steps, and hold the next up.
  void generate(const std::vector<Request>& requests, const Scheduler::OnResult& on_result,
                const Scheduler::OnTokens& on_tokens = {}, const OnStep& on_step = {});

  // Scores the windows of rank 0 (the other ranks' are ignored), one after the other, as prefills.
  // Collective; needs EngineOptions::score_windows. On rank 0 `on_scores` gets for each window, in
  // order, the natural logarithms of the probabilities that the model gives to the tokens from
  // first_scored on, each behind all that stand before it in the window. AgreedError on every rank
  // if a window is not valid (check_windows).
  void score(const std::vector<ScoreWindow>& windows, const OnScores& on_scores);

  // How often each expert was chosen in this engine's life: every row that a forward pass computed
  // counts, those of rejected nodes and of a step that ran ahead of the end of its sequence
  // included, padding not. Equal on every rank up to near-ties of the router; zeros without
  // EngineOptions::count_experts. Waits for the device; not within generate.
  ExpertLoads expert_loads();

  // What the exchange of tokens and experts did in the steps of this engine's life, those that ran
  // ahead of the end of their sequences included. Collective; on other ranks than 0 without
  // numbers. Needs EngineOptions::count_exchanges.
  ExchangeReport exchange_report();

  // Moves the experts of `model`, which the engine was made of, to another placement with as many
  // slots on every rank. Sequences go on where they were. Collective; between two calls of
  // generate. AgreedError if the placement has other slots, or the experts cannot be read.
  void rebalance(const ExpertPlacement& placement, LoadedModel& model);
  // From now on generate() does so by itself, before it admits a prompt and after every
  // `num_prompts` admissions: by the loads since the last time, with as many slots in each layer
  // as there are. Needs EngineOptions::count_experts. `model` outlives the engine. Error unless
  // each rank has as many slots as place_balanced and place_replicated give it.
  void rebalance_every(std::int64_t num_prompts, LoadedModel& model);

  // Device memory of the engine's own tensors: what it allocates besides decoder, drafter,
  // vocabulary, caches and step state. Equal on every rank.
  static std::int64_t own_bytes(const ModelSource& source, const EngineOptions& options,
                                DType activation_dtype);

 private:
  // What all ranks know of a slot.
  struct Slot {
    bool running = false;
    std::int32_t root_token = 0;  // chosen by the target, not yet in the cache
  };

  std::vector<Request> share_requests(const std::vector<Request>& requests);
  std::vector<ScoreWindow> share_windows(const std::vector<ScoreWindow>& windows);
  // Rank 0's words on every rank.
  std::vector<std::int64_t> share_words(std::vector<std::int64_t> words);
  // Which slots the attention groups have.
  void set_groups();
  int group_of(std::int32_t slot) const { return groups_of_slots_[static_cast<std::size_t>(slot)]; }
  // A piece of the prompt in `slot` with the rows of this rank's attention group: all, or none.
  GroupedBatch group_piece(std::int32_t slot, const TreeBatch& piece);
  // The trees of a step with those of this rank's attention group.
  GroupedBatch group_trees(const TreeBatch& trees);
  // Of the listed sequences those of this rank's attention group; counts those of each.
  OwnSequences divide_listed();
  // Of the running step; steps that share out their sequences among groups alike have the same.
  std::int64_t layout_index();
  // Processes the next tokens of a slot's sequence and commits them; the residual stream of their
  // rows, [rows, hidden]. At most prefill_rows; the caller synchronises before the next piece.
  ConstTensorView append_piece(std::int32_t slot, std::span<const std::int32_t> piece);
  std::vector<double> score_window(const ScoreWindow& window);
  void prefill(std::int32_t slot, const Request& request, Scheduler* scheduler,
               StepDecision& decision);
  // Starts a step of the running sequences, and reads the steps that may not stay unread. Where one
  // of them ended a sequence, all steps are read and `decision` is what follows; otherwise it is
  // to decode again.
  void decode(Scheduler* scheduler, StepDecision& decision);
  void start_step();
  // Reads the oldest step in flight. Collective; returns whether a sequence has finished.
  bool read_step(Scheduler* scheduler);
  // Shows the `index`-th listed sequence's part of a step to on_step_. On rank 0.
  void observe_step(const StepOutput& output, std::size_t index, Scheduler& scheduler) const;
  void share_decision(StepDecision& decision);
  // Takes the times of a step that was read and, on rank 0, counts what its routers chose.
  void count_exchanges(std::size_t entry, const StepOutput& output);
  // The first mark of the exchanges of the step in entry `entry` of the ring.
  std::size_t first_exchange_mark(std::size_t entry) const;
  // Counts an admission; rebalances if it is time to. Collective.
  void count_admission();

  // One step of the sequences in step_, on the device alone: draft, tree build, verify, accept,
  // commit; the outcome goes to entry `entry` of the ring.
  void step(std::size_t entry);
  void mark(std::size_t entry, std::size_t index);
  void draft_and_build(std::size_t entry);
  void verify_and_accept(std::size_t entry);
  void commit();
  // Lists the running sequences in step_, where they are not those of the last step.
  void list_sequences();

  StageTimes stage_times(std::size_t entry);
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
  OutputRing ring_;
  DeviceTensor normed_;           // [vocabulary rows, hidden]
  DeviceTensor choices_;          // [rows of a step] the target's token at every node
  DeviceTensor candidate_probs_;  // [sequences * horizon, num_candidates]
  DeviceTensor candidate_ids_;    // [sequences * horizon, num_candidates]
  // [sequences * horizon, num_recorded]; written with record_steps only
  DeviceTensor recorded_probs_;
  DeviceTensor recorded_ids_;   // [sequences * horizon, num_recorded]
  DeviceTensor accepted_taps_;  // [sequences * max_path, taps * hidden]
  OnStep on_step_;              // of the running generate
  std::vector<Slot> slots_;
  std::vector<std::int32_t> listed_;  // slots of the sequences in step_, in order
  // Attention groups: of each slot, and how many listed sequences and rows of the running call each
  // has; the slots as places in their groups' caches.
  std::vector<int> groups_of_slots_;
  std::vector<std::int64_t> listed_of_groups_;
  std::vector<std::int64_t> rows_of_groups_;
  DeviceTensor cache_slots_;                                   // [batch_size]; empty with one group
  std::map<std::vector<std::int64_t>, std::int64_t> layouts_;  // by listed_of_groups_
  bool relist_ = true;                // the set of running sequences has changed
  bool replayable_ = false;           // steps can be recorded
  std::uint64_t steps_ahead_ = 0;     // that may run while an earlier one is unread
  std::uint64_t started_ = 0;         // steps, of this engine's life
  std::uint64_t read_ = 0;            // steps, of these
  std::int64_t rebalance_every_ = 0;  // admissions; 0: never
  std::int64_t admissions_ = 0;       // since the last time
  LoadedModel* moved_model_ = nullptr;
  ExpertLoads loads_before_;                   // at the last time
  std::optional<ExchangeCounters> counters_;   // on rank 0, with count_exchanges
  std::vector<ExchangeTimes> exchange_times_;  // [steps, layers with experts] of this rank
  std::int64_t serial_ = 0;                    // of this engine, for the keys of recorded steps
};

}  // namespace kdtree
