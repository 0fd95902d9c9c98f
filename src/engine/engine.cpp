#include "engine/engine.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <limits>
#include <optional>

#include "core/log.h"
#include "engine/near_tie.h"
#include "placement/layer_file.h"

namespace kdtree {

namespace {

// Marks of a step's stages, in stream order: each stage lies between its mark and the next. Each
// entry of the ring has its own, so that a step can be read while the next one is stamped.
constexpr std::size_t kStepBegin = 0;
constexpr std::size_t kMarksAStep = kNumStages + 1;
static_assert(OutputRing::kEntries * kMarksAStep <= kFirstExchangeMark);
static_assert(OutputRing::kEntries <= Backend::kNumFences);

std::size_t mark_behind(Stage stage) {
  return 1 + static_cast<std::size_t>(stage);
}

// Recorded steps of different engines on one backend must not meet.
std::int64_t next_serial() {
  static std::atomic<std::int64_t> serial{0};
  return serial++;
}

// Most sequences of a batch.
constexpr std::int64_t kMaxSequences = 1 << 16;
// Most layouts of steps; keeps the keys of recorded steps apart.
constexpr std::int64_t kMaxLayouts = 1 << 16;

// A recorded step writes to one entry of the ring.
std::int64_t step_key(std::int64_t serial, std::int64_t layout, std::size_t entry) {
  return (serial * kMaxLayouts + layout) * static_cast<std::int64_t>(OutputRing::kEntries) +
         static_cast<std::int64_t>(entry);
}

StepShape step_shape(const EngineOptions& options, const StepSizes& sizes) {
  return {.max_sequences = options.batch_size,
          .max_nodes = sizes.max_nodes,
          .block_size = sizes.block_size,
          .max_path = sizes.max_path};
}

}  // namespace

Engine::Engine(const LoadedModel& model, const EngineOptions& options, Backend& backend,
               const RankGroups& ranks, ProcessGroup& group)
    : options_(options),
      sizes_(step_sizes(model.source(), options)),
      context_{.backend = backend, .communicator = ranks.world(), .groups = ranks},
      group_(group),
      config_(model.source().target.config),
      vocabulary_(context_, config_, model.target_weights(),
                  target_partition(config_, model.load_options()).vocabulary, sizes_.vocabulary),
      decoder_(context_,
               {.config = config_,
                .weights = model.target_weights(),
                .placement = model.placement(),
                .partition = target_partition(config_, model.load_options())},
               sizes_.decoder),
      cache_(backend, rank_cache_sizes(sizes_, model.load_options())),
      prompt_storage_(backend, sizes_.prefill_rows, 1, 1),
      step_(backend, step_shape(options, sizes_)),
      ring_(backend,
            {.max_sequences = options.batch_size,
             .max_nodes = sizes_.max_nodes,
             .max_path = sizes_.max_path,
             .num_choices = sizes_.num_choices,
             .num_candidates =
                 options.record_steps && options.mode != Mode::kPlain ? sizes_.num_recorded : 0,
             .num_expert_ids = options.record_experts
                                   ? config_.num_moe_layers() * config_.num_experts_per_tok
                                   : 0}),
      normed_(backend, backend.activation_dtype(),
              Shape{sizes_.vocabulary.max_rows, config_.hidden_size}),
      choices_(backend, DType::kInt32, Shape{options.batch_size * sizes_.max_nodes}),
      slots_(static_cast<std::size_t>(options.batch_size)),
      serial_(next_serial()) {
  if (options.count_exchanges) {
    check(options.record_experts && config_.num_moe_layers() <= kMostCountedLayers,
          "exchanges of {} layers are counted, {} at most, and experts are {}recorded",
          config_.num_moe_layers(), kMostCountedLayers, options.record_experts ? "" : "not ");
    if (group.rank() == 0) {
      counters_.emplace(
          ExchangeFacts{.kind = options.exchange,
                        .fixed_counts = options.fixed_counts || context_.communicator.capturable(),
                        .grid = options.grid,
                        .hidden_size = config_.hidden_size,
                        .num_experts_per_tok = config_.num_experts_per_tok,
                        .activation_dtype = backend.activation_dtype()},
          model.placement(), moe_layers(config_));
    }
  }
  check(options.batch_size < kMaxSequences, "a batch of {} sequences", options.batch_size);
  check(options.steps_ahead >= -1 && options.steps_ahead <= 1, "{} steps ahead",
        options.steps_ahead);
  set_groups();
  replayable_ = decoder_.replayable() && ranks.world().capturable();
  const bool ahead =
      options.steps_ahead < 0 ? backend.asynchronous() && replayable_ : options.steps_ahead == 1;
  steps_ahead_ = ahead ? 1 : 0;
  const std::int64_t predictions = options.batch_size * (sizes_.max_path - 1);
  candidate_probs_ =
      DeviceTensor(backend, DType::kFloat32, Shape{predictions, sizes_.num_candidates});
  candidate_ids_ = DeviceTensor(backend, DType::kInt32, Shape{predictions, sizes_.num_candidates});
  if (options.mode == Mode::kPlain) {
    return;
  }
  const DrafterConfig& drafter = model.source().drafter->config;
  drafter_ = std::make_unique<Drafter>(
      context_,
      DrafterModel{.config = drafter,
                   .weights = model.drafter_weights(),
                   .partition = drafter_partition(drafter, model.load_options())},
      vocabulary_, sizes_.drafter);
  const auto tap_width =
      static_cast<std::int64_t>(drafter.target_layer_ids.size()) * config_.hidden_size;
  accepted_taps_ = DeviceTensor(backend, backend.activation_dtype(),
                                Shape{options.batch_size * sizes_.max_path, tap_width});
  recorded_probs_ = DeviceTensor(backend, DType::kFloat32, Shape{predictions, sizes_.num_recorded});
  recorded_ids_ = DeviceTensor(backend, DType::kInt32, Shape{predictions, sizes_.num_recorded});
}

std::int64_t Engine::own_bytes(const ModelSource& source, const EngineOptions& options,
                               DType activation_dtype) {
  const StepSizes sizes = step_sizes(source, options);
  const std::int64_t hidden = source.target.config.hidden_size;
  const std::int64_t activation = dtype_bytes(activation_dtype);
  // A candidate is a float32 and an int32.
  constexpr std::int64_t kCandidateBytes = 8;
  const std::int64_t predictions = options.batch_size * (sizes.max_path - 1);
  std::int64_t sum =
      TreeBatchStorage::bytes(sizes.prefill_rows, 1, 1) +
      sizes.vocabulary.max_rows * hidden * activation +
      options.batch_size * sizes.max_nodes * dtype_bytes(DType::kInt32) +
      predictions * sizes.num_candidates * kCandidateBytes +
      (options.grid.attention_dp > 1 ? options.batch_size : 0) * dtype_bytes(DType::kInt32);
  if (options.mode != Mode::kPlain) {
    const auto num_taps = static_cast<std::int64_t>(source.drafter->config.target_layer_ids.size());
    sum += options.batch_size * sizes.max_path * num_taps * hidden * activation +
           predictions * sizes.num_recorded * kCandidateBytes;
  }
  return sum;
}

Engine::~Engine() {
  for (std::int64_t layout = 0; layout < std::ssize(layouts_); ++layout) {
    for (std::size_t entry = 0; entry < OutputRing::kEntries; ++entry) {
      context_.backend.forget_recorded(step_key(serial_, layout, entry));
    }
  }
}

void Engine::generate(const std::vector<Request>& requests, const Scheduler::OnResult& on_result,
                      const Scheduler::OnTokens& on_tokens, const OnStep& on_step) {
  const std::vector<Request> shared = share_requests(requests);
  run_together(group_, [&] { check_requests(shared, config_, options_); });
  std::optional<Scheduler> rank0;
  if (group_.rank() == 0) {
    rank0.emplace(SchedulerOptions{.num_slots = options_.batch_size,
                                   .grid = options_.grid,
                                   .max_context = options_.max_context,
                                   .eos_token_ids = config_.eos_token_ids,
                                   .record_steps = options_.record_steps,
                                   .near_tie_share = near_tie_share(
                                       context_.backend.activation_dtype(), config_)},
                  shared, on_result, on_tokens);
  }
  Scheduler* scheduler = rank0 ? &*rank0 : nullptr;
  std::fill(slots_.begin(), slots_.end(), Slot{});
  relist_ = true;
  on_step_ = on_step;
  read_ = started_;  // steps of a generate that an error ended
  StepDecision decision;
  if (scheduler != nullptr) {
    scheduler->plan_next(decision);
  }
  share_decision(decision);
  while (decision.next != NextAction::kStop) {
    if (decision.next == NextAction::kPrefill) {
      count_admission();
      prefill(decision.prefill_slot, shared.at(static_cast<std::size_t>(decision.prefill_request)),
              scheduler, decision);
    } else {
      decode(scheduler, decision);
    }
  }
}

void Engine::share_decision(StepDecision& decision) {
  group_.broadcast(&decision, sizeof decision, 0);
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

ConstTensorView Engine::append_piece(std::int32_t slot, std::span<const std::int32_t> piece) {
  const SequenceRows rows{.slot = slot,
                          .prefix_length = static_cast<std::int32_t>(cache_.committed(slot)),
                          .token_ids = piece,
                          .parents = {}};
  const TreeBatch batch = prompt_storage_.fill({&rows, 1});
  const ConstTensorView hidden = decoder_.forward(group_piece(slot, batch), cache_, vocabulary_);
  if (drafter_) {
    drafter_->append_context(decoder_.taps(), batch);
  }
  cache_.commit_rows(slot, batch.num_rows);
  return hidden;
}

void Engine::prefill(std::int32_t slot, const Request& request, Scheduler* scheduler,
                     StepDecision& decision) {
  cache_.clear(slot);
  const std::span<const std::int32_t> prompt = request.prompt_ids;
  const auto piece_rows = static_cast<std::size_t>(sizes_.prefill_rows);
  for (std::size_t first = 0; first < prompt.size(); first += piece_rows) {
    const auto piece = prompt.subspan(first, std::min(piece_rows, prompt.size() - first));
    const ConstTensorView hidden = append_piece(slot, piece);
    if (first + piece.size() == prompt.size()) {
      decoder_.final_norm(hidden.rows(hidden.size(0) - 1, 1), normed_.rows(1));
    }
    context_.backend.synchronize();  // the next piece is uploaded into the same memory
  }
  const std::int64_t num_top = std::max(sizes_.num_choices, options_.max_top_logits);
  const Vocabulary::TopK top = vocabulary_.top_logits(normed_.rows(1), num_top);
  decision = {};
  if (scheduler != nullptr) {
    std::vector<TokenLogit> top_logits = download_row(top, 0, num_top);
    const std::int32_t first_token = top_logits.front().first;
    const ChoiceLogits choice{
        .best = top_logits.front().second,
        .second = num_top > 1 ? top_logits[1].second : -std::numeric_limits<float>::infinity()};
    top_logits.resize(static_cast<std::size_t>(options_.max_top_logits));
    const bool finished =
        scheduler->start_sequence(slot, first_token, choice, std::move(top_logits));
    scheduler->plan_next(decision);
    decision.first_token = first_token;
    decision.finished = finished ? 1 : 0;
  }
  share_decision(decision);
  slots_[static_cast<std::size_t>(slot)] = {.running = decision.finished == 0,
                                            .root_token = decision.first_token};
  relist_ = true;
}

void Engine::list_sequences() {
  if (!relist_) {
    return;
  }
  listed_.clear();
  std::vector<RunningSequence> sequences;
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    if (slots_[slot].running) {
      const auto index = static_cast<std::int32_t>(slot);
      listed_.push_back(index);
      sequences.push_back({.slot = index,
                           .prefix_length = static_cast<std::int32_t>(cache_.committed(index)),
                           .root_token = slots_[slot].root_token});
    }
  }
  step_.set_sequences(context_.backend, sequences, divide_listed());
  relist_ = false;
}

void Engine::draft_and_build(std::size_t entry) {
  Backend& backend = context_.backend;
  const bool builds = group_.rank() == 0;
  const std::int64_t num_sequences = step_.num_sequences();
  const std::int64_t horizon = sizes_.max_path - 1;
  const TensorView probs = candidate_probs_.rows(num_sequences * horizon);
  const TensorView ids = candidate_ids_.rows(num_sequences * horizon);
  if (drafter_) {
    const auto mask_token = static_cast<std::int32_t>(drafter_->config().mask_token_id);
    const TreeBatch batch = step_.expand_blocks(backend, mask_token);
    const Vocabulary::TopK ranked = drafter_->draft(batch, sizes_.num_ranked);
    backend.copy(ranked.values.columns(0, sizes_.num_candidates), probs);
    backend.copy(ranked.ids.columns(0, sizes_.num_candidates), ids);
    if (options_.record_steps) {
      const std::int64_t rows = ranked.ids.size(0);
      backend.copy(ranked.values.columns(0, sizes_.num_recorded), recorded_probs_.rows(rows));
      backend.copy(ranked.ids.columns(0, sizes_.num_recorded), recorded_ids_.rows(rows));
    }
  }
  mark(entry, mark_behind(Stage::kDraft));
  if (builds) {
    backend.build_trees({.log_probs = probs,
                         .candidates = ids,
                         .draft_horizon = horizon,
                         .roots = step_.roots(),
                         .tree_budget = sizes_.max_nodes - 1,
                         .trees = step_.trees().arrays(num_sequences)});
  }
  context_.communicator.broadcast(step_.trees().tensor(), 0, backend.stream(),
                                  {.what = "tree block"});
  mark(entry, mark_behind(Stage::kTreeBuild));
}

void Engine::verify_and_accept(std::size_t entry) {
  Backend& backend = context_.backend;
  const std::int64_t num_sequences = step_.num_sequences();
  const TreeBatch batch = step_.expand_trees(backend);
  if (options_.count_exchanges) {
    decoder_.mark_exchanges(first_exchange_mark(entry));
  }
  const ConstTensorView hidden = decoder_.forward(group_trees(batch), cache_, vocabulary_);
  decoder_.mark_exchanges(std::nullopt);
  const TensorView normed = normed_.rows(batch.num_rows);
  decoder_.final_norm(hidden, normed);
  const Vocabulary::TopK best = vocabulary_.top_logits(normed, sizes_.num_choices);
  const TensorView choices = choices_.rows(batch.num_rows);
  backend.copy(best.ids.columns(0, 1), choices.reshape(Shape{batch.num_rows, 1}));
  mark(entry, mark_behind(Stage::kVerify));
  AcceptBlock& accepted = step_.accepted();
  if (group_.rank() == 0) {
    backend.accept({.trees = step_.trees().arrays(num_sequences),
                    .choices = choices,
                    .row_offsets = batch.row_offsets,
                    .path_lengths = accepted.path_lengths(num_sequences),
                    .paths = accepted.paths(num_sequences),
                    .bonus_tokens = accepted.bonus_tokens(num_sequences)});
  }
  context_.communicator.broadcast(accepted.tensor(), 0, backend.stream(), {.what = "accept block"});
  const bool recorded = drafter_ && options_.record_steps;
  const ConstTensorView expert_ids =
      options_.record_experts ? decoder_.expert_ids() : ConstTensorView();
  const std::int64_t drafted = num_sequences * (sizes_.max_path - 1);
  ring_.write(backend, entry,
              {.trees = step_.trees(),
               .accepted = accepted,
               .choice_logits = best.values,
               .candidate_probs = recorded ? recorded_probs_.rows(drafted) : TensorView(),
               .candidate_ids = recorded ? recorded_ids_.rows(drafted) : TensorView(),
               .expert_ids = expert_ids});
  mark(entry, mark_behind(Stage::kAccept));
}

void Engine::commit() {
  Backend& backend = context_.backend;
  if (step_.num_own_sequences() > 0) {
    cache_.compact(step_.compact_params());
  }
  if (drafter_) {
    const StepState::AcceptedRows accepted = step_.accepted_rows(backend);
    const TensorView taps = accepted_taps_.rows(accepted.batch.num_rows);
    backend.gather_rows(decoder_.taps(), accepted.rows, taps);
    drafter_->append_context(taps, accepted.batch);
  }
  step_.advance(backend);
}

void Engine::mark(std::size_t entry, std::size_t index) {
  context_.backend.mark(entry * kMarksAStep + index);
}

void Engine::step(std::size_t entry) {
  mark(entry, kStepBegin);
  draft_and_build(entry);
  verify_and_accept(entry);
  commit();
  mark(entry, mark_behind(Stage::kCommit));
}

StageTimes Engine::stage_times(std::size_t entry) {
  StageTimes times{};
  for (std::size_t stage = 0; stage < kNumStages; ++stage) {
    const std::size_t begin = entry * kMarksAStep + stage;
    times[stage] = context_.backend.milliseconds_between(begin, begin + 1);
  }
  return times;
}

void Engine::start_step() {
  const std::size_t entry = started_ % OutputRing::kEntries;
  const std::int64_t layout = layout_index();
  check(layout < kMaxLayouts, "{} different layouts of steps", layout + 1);
  context_.backend.run_recorded(step_key(serial_, layout, entry), replayable_,
                                [this, entry] { step(entry); });
  context_.communicator.replayed(context_.backend.stream(), {.what = "step"});
  ring_.close(context_.backend, entry);
  ++started_;
}

void Engine::observe_step(const StepOutput& output, std::size_t index, Scheduler& scheduler) const {
  if (!on_step_) {
    return;
  }
  const DraftTree& tree = output.trees[index];
  ExpertChoices experts;
  if (!output.expert_ids.empty()) {
    experts = ExpertChoices(output.expert_ids,
                            {.num_layers = config_.num_moe_layers(),
                             .step_rows = step_.num_sequences() * sizes_.max_nodes,
                             .first_row = static_cast<std::int64_t>(index) * sizes_.max_nodes,
                             .num_nodes = tree.num_nodes(),
                             .num_experts_per_tok = config_.num_experts_per_tok});
  }
  on_step_({.request_index = scheduler.request_index(listed_[index]),
            .tree = tree,
            .accepted = output.accepted[index],
            .experts = experts});
}

bool Engine::read_step(Scheduler* scheduler) {
  const std::size_t entry = read_++ % OutputRing::kEntries;
  const StepOutput output = ring_.read(context_.backend, entry, step_.num_sequences());
  count_exchanges(entry, output);
  std::vector<std::int32_t> finished(listed_.size(), 0);
  if (scheduler != nullptr) {
    std::vector<std::int32_t> running;
    std::copy_if(
        listed_.begin(), listed_.end(), std::back_inserter(running),
        [this](std::int32_t slot) { return slots_[static_cast<std::size_t>(slot)].running; });
    scheduler->add_stage_times(running, stage_times(entry));
    for (std::size_t i = 0; i < listed_.size(); ++i) {
      if (slots_[static_cast<std::size_t>(listed_[i])].running) {
        if (!output.candidates.empty()) {
          scheduler->record_draft(listed_[i], output.candidates[i]);
        }
        observe_step(output, i, *scheduler);
        finished[i] =
            scheduler->advance_sequence(listed_[i], output.trees[i], output.accepted[i]) ? 1 : 0;
      }
    }
  }
  group_.broadcast(finished.data(),
                   static_cast<std::int64_t>(finished.size() * sizeof(std::int32_t)), 0);
  for (std::size_t i = 0; i < listed_.size(); ++i) {
    Slot& slot = slots_[static_cast<std::size_t>(listed_[i])];
    if (slot.running) {  // a step that ran ahead of the end of its sequence counts for nothing
      cache_.commit_rows(listed_[i], std::ssize(output.accepted[i].nodes));
      slot = {.running = finished[i] == 0, .root_token = output.accepted[i].bonus_token};
    }
  }
  return std::any_of(finished.begin(), finished.end(), [](std::int32_t flag) { return flag != 0; });
}

void Engine::decode(Scheduler* scheduler, StepDecision& decision) {
  list_sequences();
  start_step();
  while (started_ - read_ > (relist_ ? 0 : steps_ahead_)) {
    relist_ = read_step(scheduler) || relist_;
  }
  decision = {.next = NextAction::kDecode};
  if (relist_) {  // otherwise all slots run on or stay empty
    if (scheduler != nullptr) {
      scheduler->plan_next(decision);
    }
    share_decision(decision);
  }
}

}  // namespace kdtree
