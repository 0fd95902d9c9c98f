// kdtree bench perplexity: how well a model predicts a text.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <numeric>
#include <sstream>

#include "commands.h"
#include "core/check.h"
#include "job.h"
#include "line_output.h"
#include "study/text_windows.h"

namespace kdtree {

namespace {

using Json = nlohmann::ordered_json;
using Windows = std::vector<ScoreWindow>;

Windows read_windows(const std::string& file) {
  Windows windows;
  for (PromptInput& line : read_prompt_file("--text", file)) {
    require_input(line.kind == PromptInput::Kind::kIds,
                  "{}: expected a window of tokens under the key prompt_ids", line.origin);
    windows.push_back({.token_ids = std::move(line.ids), .first_scored = 1});
  }
  return windows;
}

std::string read_text(const std::string& file) {
  std::ifstream stream(file, std::ios::binary);
  require_input(stream.good(), "--text: cannot open {}", file);
  std::ostringstream text;
  text << stream.rdbuf();
  require_input(!stream.bad() && !text.fail(), "--text: cannot read {}", file);
  return text.str();
}

// The windows of --text, and what they need; they are checked.
InputNeed read_input(const BenchPerplexityOptions& options, Job& job, Windows& windows) {
  const ModelConfig& model = job.source.target.config;
  if (options.text_is_windows()) {
    windows = read_windows(options.text);
    if (options.windows > 0 && options.windows < std::ssize(windows)) {
      windows.resize(static_cast<std::size_t>(options.windows));
    }
  } else {
    load_text_model(options.run, job);
    const std::int64_t window = options.window > 0 ? options.window : kDefaultWindow;
    windows = cut_windows(
        job.text->encode_prompt(read_text(options.text), options.text, /*parse_special=*/false),
        {.window = window,
         .stride = options.stride > 0 ? options.stride : window,
         .max_windows = options.windows});
  }
  require_input(!windows.empty(), "--text: {} has one token, expected at least two", options.text);
  InputNeed need;
  need.num_sequences = std::ssize(windows);
  for (const ScoreWindow& window : windows) {
    need.longest_sequence = std::max(need.longest_sequence, std::ssize(window.token_ids));
  }
  need.longest_prompt = need.longest_sequence - 1;
  try {
    require_input(need.longest_sequence <= context_limit(model),
                  "a window has {} tokens, beyond the model's max_position_embeddings {}",
                  need.longest_sequence, context_limit(model));
    EngineOptions sizes;
    sizes.max_context = need.longest_sequence;
    sizes.max_prompt = need.longest_prompt;
    check_windows(windows, model, sizes);
  } catch (const InputError& error) {
    fail_input("{}: {}", options.text, error.what());
  }
  return need;
}

struct Score {
  double log_prob = 0;  // natural, of all scored tokens together
  std::int64_t num_tokens = 0;
  double seconds = 0;

  double loss() const { return -log_prob / static_cast<double>(num_tokens); }
};

// Collective; the score is there on rank 0.
Score score_windows(Engine& engine, const Windows& windows, ProcessGroup& group) {
  using Clock = std::chrono::steady_clock;
  Score score;
  std::size_t not_finite = windows.size();  // the first such window
  const Clock::time_point start = Clock::now();
  engine.score(windows, [&](std::size_t index, std::span<const double> log_probs) {
    const double sum = std::accumulate(log_probs.begin(), log_probs.end(), 0.0);
    not_finite = std::isfinite(sum) ? not_finite : std::min(not_finite, index);
    score.log_prob += sum;
    score.num_tokens += std::ssize(log_probs);
  });
  score.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  run_together(group, [&] {
    require_input(not_finite == windows.size(),
                  "window {}: the model gives a token no finite log-probability", not_finite);
  });
  return score;
}

Json score_json(const BenchPerplexityOptions& options, const Score& score, std::int64_t num_windows,
                const RunFacts& facts) {
  Json line = {{"perplexity", std::exp(score.loss())},
               {"loss", score.loss()},
               {"num_tokens", score.num_tokens},
               {"num_windows", num_windows},
               {"seconds", score.seconds},
               {"tokens_per_second", static_cast<double>(score.num_tokens) / score.seconds},
               {"text", std::filesystem::path(options.text).filename().string()},
               {"model", model_name(options.run.model)}};
  line.update(facts_json(facts));
  return line;
}

}  // namespace

int run_bench_perplexity(const BenchPerplexityOptions& options, ProcessGroup& group) {
  Windows windows;  // on rank 0
  Job job = agree_on_job(
      options.run, "", [&](Job& planned) { return read_input(options, planned, windows); }, group);
  job.engine.score_windows = true;
  std::optional<LineOutput> output = open_on_rank0(options.output, group);
  LoadedJob loaded = load_job(options.run, job, group);
  std::optional<Engine> engine;
  run_together(group, [&] {
    engine.emplace(*loaded.model, job.engine, *loaded.backend, *loaded.groups, group);
  });
  const RunFacts facts = job_facts(job, loaded, group);
  log_facts(facts);
  const Score score = score_windows(*engine, windows, group);
  run_together(group, [&] {
    if (output) {
      output->write(score_json(options, score, std::ssize(windows), facts));
      std::cerr << fmt::format(
          "perplexity {:.4f} (loss {:.6f}) of {} tokens in {} windows, {:.1f} s, {:.0f} tokens/s\n",
          std::exp(score.loss()), score.loss(), score.num_tokens, windows.size(), score.seconds,
          static_cast<double>(score.num_tokens) / score.seconds);
    }
  });
  return 0;
}

}  // namespace kdtree
