#include "engine/engine.h"

#include <algorithm>
#include <atomic>
#include <optional>

#include "core/log.h"

namespace kdtree {

namespace {

// Marks of a step's stages, in stream order: each stage lies between its mark and the next.
constexpr std::size_t kStepBegin = 0;

std::size_t mark_behind(Stage stage) {
  return 1 + static_cast<std::size_t>(stage);
}

// Recorded steps of different engines on one backend must not meet.
std::int64_t next_serial() {
  static std::atomic<std::int64_t> serial{0};
  return serial++;
}

// Most sequences of a batch; keeps the keys of recorded steps apart.
constexpr std::int64_t kMaxSequences = 1 << 16;

StepShape step_shape(const EngineOptions& options, const StepSizes& sizes) {
  return {.max_sequences = options.batch_size,
          .max_nodes = sizes.max_nodes,
          .block_size = sizes.block_size,
          .max_path = sizes.max_path};
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
      decoder_(context_,
               {.config = config_,
                .weights = model.target_weights(),
                .placement = model.placement(),
                .partition = target_partition(config_, model.load_options())},
               sizes_.decoder),
      cache_(backend, sizes_.cache),
      prompt_storage_(backend, sizes_.prefill_rows, 1, 1),
      step_(backend, step_shape(options, sizes_)),
      normed_(backend, backend.activation_dtype(),
              Shape{sizes_.vocabulary.max_rows, config_.hidden_size}),
      slots_(static_cast<std::size_t>(options.batch_size)),
      serial_(next_serial()) {
  check(options.batch_size < kMaxSequences, "a batch of {} sequences", options.batch_size);
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

Engine::~Engine() {
  for (std::int64_t num_sequences = 1; num_sequences <= options_.batch_size; ++num_sequences) {
    context_.backend.forget_recorded(serial_ * kMaxSequences + num_sequences);
  }
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
  std::fill(slots_.begin(), slots_.end(), Slot{});
  relist_ = true;
  StepDecision decision;
  if (scheduler != nullptr) {
    scheduler->plan_next(decision);
  }
  share_decision(decision, {});
  while (decision.next != NextAction::kStop) {
    if (decision.next == NextAction::kPrefill) {
      prefill(decision.prefill_slot, shared.at(static_cast<std::size_t>(decision.prefill_request)),
              scheduler, decision);
    } else {
      decode(scheduler, decision);
    }
  }
}

void Engine::share_decision(StepDecision& decision, std::span<std::int32_t> finished) {
  group_.broadcast(&decision, sizeof decision, 0);
  group_.broadcast(finished.data(), static_cast<std::int64_t>(finished.size_bytes()), 0);
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
  const std::span<const std::int32_t> prompt = request.prompt_ids;
  const auto piece_rows = static_cast<std::size_t>(sizes_.prefill_rows);
  for (std::size_t first = 0; first < prompt.size(); first += piece_rows) {
    const auto piece = prompt.subspan(first, std::min(piece_rows, prompt.size() - first));
    const SequenceRows rows{.slot = slot,
                            .prefix_length = static_cast<std::int32_t>(cache_.committed(slot)),
                            .token_ids = piece,
                            .parents = {}};
    const TreeBatch batch = prompt_storage_.fill({&rows, 1});
    const ConstTensorView hidden = decoder_.forward(batch, cache_, vocabulary_);
    if (drafter_) {
      drafter_->append_context(decoder_.taps(), batch);
    }
    cache_.commit_rows(slot, batch.num_rows);
    if (first + piece.size() == prompt.size()) {
      decoder_.final_norm(hidden.rows(batch.num_rows - 1, 1), normed_.rows(1));
    }
    context_.backend.synchronize();  // the next piece is uploaded into the same memory
  }
  const std::int64_t num_top = std::max<std::int64_t>(1, options_.max_top_logits);
  const Vocabulary::TopK top = vocabulary_.top_logits(normed_.rows(1), num_top);
  decision = {};
  std::int32_t finished = 0;
  if (scheduler != nullptr) {
    std::vector<TokenLogit> top_logits = download_row(top, 0, num_top);
    const std::int32_t first_token = top_logits.front().first;
    if (options_.max_top_logits == 0) {
      top_logits.clear();
    }
    finished = scheduler->start_sequence(slot, first_token, std::move(top_logits)) ? 1 : 0;
    scheduler->plan_next(decision);
    decision.first_token = first_token;
  }
  share_decision(decision, {&finished, 1});
  slots_[static_cast<std::size_t>(slot)] = {.running = finished == 0,
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
  step_.set_sequences(context_.backend, sequences);
  relist_ = false;
}

void Engine::draft_and_build() {
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
  backend.mark(mark_behind(Stage::kDraft));
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
  backend.mark(mark_behind(Stage::kTreeBuild));
}

void Engine::verify_and_accept() {
  Backend& backend = context_.backend;
  const std::int64_t num_sequences = step_.num_sequences();
  const TreeBatch batch = step_.expand_trees(backend);
  const ConstTensorView hidden = decoder_.forward(batch, cache_, vocabulary_);
  const TensorView normed = normed_.rows(batch.num_rows);
  decoder_.final_norm(hidden, normed);
  const Vocabulary::TopK best = vocabulary_.top_logits(normed, 1);
  backend.mark(mark_behind(Stage::kVerify));
  AcceptBlock& accepted = step_.accepted();
  if (group_.rank() == 0) {
    backend.accept({.trees = step_.trees().arrays(num_sequences),
                    .choices = best.ids.reshape(Shape{batch.num_rows}),
                    .row_offsets = batch.row_offsets,
                    .path_lengths = accepted.path_lengths(num_sequences),
                    .paths = accepted.paths(num_sequences),
                    .bonus_tokens = accepted.bonus_tokens(num_sequences)});
  }
  context_.communicator.broadcast(accepted.tensor(), 0, backend.stream(), {.what = "accept block"});
  backend.mark(mark_behind(Stage::kAccept));
}

void Engine::commit() {
  Backend& backend = context_.backend;
  cache_.compact(step_.compact_params());
  if (drafter_) {
    const StepState::AcceptedRows accepted = step_.accepted_rows(backend);
    const TensorView taps = accepted_taps_.rows(accepted.batch.num_rows);
    backend.gather_rows(decoder_.taps(), accepted.rows, taps);
    drafter_->append_context(taps, accepted.batch);
  }
  step_.advance(backend);
  backend.mark(mark_behind(Stage::kCommit));
}

void Engine::step() {
  context_.backend.mark(kStepBegin);
  draft_and_build();
  verify_and_accept();
  commit();
}

StageTimes Engine::stage_times() {
  StageTimes times{};
  for (std::size_t stage = 0; stage < kNumStages; ++stage) {
    times[stage] = context_.backend.milliseconds_between(stage, stage + 1);
  }
  return times;
}

void Engine::record_candidates(Scheduler& scheduler) {
  const std::int64_t horizon = sizes_.max_path - 1;
  const Vocabulary::TopK recorded{.values = recorded_probs_.view(), .ids = recorded_ids_.view()};
  for (std::size_t i = 0; i < listed_.size(); ++i) {
    std::vector<std::vector<TokenLogit>> rows;
    for (std::int64_t row = 0; row < horizon; ++row) {
      rows.push_back(download_row(recorded, static_cast<std::int64_t>(i) * horizon + row,
                                  sizes_.num_recorded));
    }
    scheduler.record_draft(listed_[i], std::move(rows));
  }
}

void Engine::decode(Scheduler* scheduler, StepDecision& decision) {
  Backend& backend = context_.backend;
  list_sequences();
  const std::int64_t num_sequences = step_.num_sequences();
  const bool replayable = decoder_.replayable() && context_.communicator.capturable();
  backend.run_recorded(serial_ * kMaxSequences + num_sequences, replayable, [this] { step(); });
  context_.communicator.replayed(backend.stream(), {.what = "step"});

  const std::vector<AcceptedPath> accepted = step_.accepted().download(backend, num_sequences);
  std::vector<std::int32_t> finished(accepted.size(), 0);
  decision = {};
  if (scheduler != nullptr) {
    scheduler->add_stage_times(listed_, stage_times());
    if (options_.record_steps && drafter_) {
      record_candidates(*scheduler);
    }
    const std::vector<DraftTree> trees = step_.trees().download(backend, num_sequences);
    for (std::size_t i = 0; i < accepted.size(); ++i) {
      finished[i] = scheduler->advance_sequence(listed_[i], trees[i], accepted[i]) ? 1 : 0;
    }
    scheduler->plan_next(decision);
  }
  share_decision(decision, finished);
  for (std::size_t i = 0; i < accepted.size(); ++i) {
    const std::int32_t slot = listed_[i];
    cache_.commit_rows(slot, static_cast<std::int64_t>(accepted[i].nodes.size()));
    slots_[static_cast<std::size_t>(slot)] = {.running = finished[i] == 0,
                                              .root_token = accepted[i].bonus_token};
    relist_ = relist_ || finished[i] != 0;
  }
}

}  // namespace kdtree
