#include "command_line.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <limits>
#include <span>

#include "core/build_info.h"
#include "core/check.h"
#include "option_kinds.h"
#include "placement_options.h"
#include "run_options.h"

namespace kdtree {

namespace {

constexpr const char* kFooter =
    R"(kdtree generate --help lists the flags of generate.
Results go to stdout, logs and errors to stderr.
Several ranks: mpirun -n 4 kdtree generate ..., or srun --mpi=pmix -n 4 kdtree generate ...
Exit codes: 0 done, 1 failed, 2 wrong command line, 124 a collective took too long.
KDTREE_COLLECTIVE_TIMEOUT_S sets that limit in seconds (default 300, 0: none).)";

std::string version_text() {
  const BuildInfo& build = build_info();
  return fmt::format("kdtree {}\ncommit {}\ncompiler {} ({})\nCUDA {}\nNCCL {}\nMPI {}",
                     build.version, build.commit, build.compiler, build.build_type, build.cuda,
                     build.nccl, build.mpi);
}

void add_generate_options(CLI::App& app, RunConfig& config) {
  add_target_option(app, config);
  add_drafter_options(app, config);
  app.add_option("--prompt-ids", config.prompt_ids,
                 "Token ids of a prompt, as 1,2,3; may be repeated")
      ->type_name("IDS")
      ->expected(1, std::numeric_limits<int>::max())
      ->allow_extra_args(false);
  app.add_option("--prompt", config.prompt, "Text of a prompt; may be repeated")
      ->type_name("TEXT")
      ->expected(1, std::numeric_limits<int>::max())
      ->allow_extra_args(false);
  add_path(
      app, "--chat", config.chat,
      R"(File of a conversation to answer: {"messages": [{"role": "user", "content": "Hi"}]})");
  add_choice(
      app, "--chat-template", config.chat_template,
      {"auto", "kimi-k2.6", "kimi-k2", "deepseek-v3", "deepseek-r1"},
      "How --chat becomes a prompt; auto: kimi-k2.6 for Kimi K2.5 and K2.6, else to be named");
  add_choice(app, "--thinking", config.thinking, {"on", "off"},
             "Whether a kimi-k2.6 answer begins with reasoning");
  add_path(app, "--tokenizer", config.tokenizer,
           "Directory or file of the tokenizer (default: the model's directory); with it, outputs "
           "are text");
  app.add_flag("--parse-special", config.parse_special,
               "Control tokens in the text of a prompt count as such");
  add_path(
      app, "--prompts", config.prompts,
      R"(File of prompts, a JSON object a line: {"prompt_ids": [1, 2, 3]}, {"prompt": "Hi"} or )"
      R"({"messages": [...]})");
  add_count(app, "--batch-size", config.batch_size, CLI::Range(std::int64_t{1}, std::int64_t{4096}),
            "Sequences decoded together");
  add_count(app, "--max-new-tokens", config.max_new_tokens, CLI::Range(std::int64_t{1}, kUnbounded),
            "Output tokens of a prompt, at most");
  add_count(app, "--max-context", config.max_context, CLI::Range(std::int64_t{0}, kUnbounded),
            "Tokens of prompt and output together, at most; 0: what the prompts need");
  add_share(app, "--memory-fraction", config.memory_fraction,
            "As large a context as this share of the free memory holds, above 0 to 1; instead of "
            "--max-context");
  add_choice(
      app, "--mode", config.mode, {"auto", "plain", "chain", "tree"},
      "plain: a token a step; chain, tree: speculative; auto: tree where there is a drafter");
  add_count(app, "--tree-budget", config.tree_budget, CLI::Range(std::int64_t{1}, kMaxTreeBudget),
            fmt::format("Nodes of a draft tree without its root, 1 to {}", kMaxTreeBudget));
  add_backend_options(app, config);
  add_count(app, "--rebalance-every", config.rebalance_every,
            CLI::Range(std::int64_t{0}, kUnbounded),
            "Place experts anew by their loads after that many prompts; 0: never");
  add_path(app, "--record-expert-load", config.record_expert_load,
           "File that gets how often each expert was chosen, for --expert-load");
  add_path(app, "--record-exchange", config.record_exchange,
           "File that gets what each rank and layer computed, sent and waited for (JSON)");
  add_path(app, "--write-placement", config.write_placement,
           "File that gets the placement, for --placement FILE");
  app.add_flag("--ignore-eos", config.ignore_eos, "Go on after an end token");
  add_count(app, "--top-logits", config.top_logits, CLI::Range(std::int64_t{0}, kUnbounded),
            "Print that many of the best logits behind each prompt");
  app.add_flag("--dump-steps", config.dump_steps, "Print each step's tree and acceptance (json)");
  add_choice(app, "--output-format", config.output_format, {"text", "json"},
             "What stdout carries; json: a line a prompt, in the order of the prompts");
  app.add_flag("--verify-golden", config.verify_golden,
               "Decode the bundle's golden prompts; exit code 1 unless all tokens are equal");
  add_process_options(app, config);
}

// Whether `word` is a flag of `app` or of a subcommand that takes a value.
bool wants_value(const CLI::App& app, const std::string& word) {
  const CLI::Option* option = word.starts_with("--") ? app.get_option_no_throw(word) : nullptr;
  if (option != nullptr && option->get_items_expected_max() > 0) {
    return true;
  }
  const auto subcommands = app.get_subcommands(nullptr);
  return std::any_of(subcommands.begin(), subcommands.end(),
                     [&](const CLI::App* subcommand) { return wants_value(*subcommand, word); });
}

// "--flag" "-1,2" becomes "--flag=-1,2": otherwise a negative value reads as a flag of its own.
std::vector<std::string> join_negative_values(int argc, const char* const* argv,
                                              const CLI::App& app) {
  std::vector<std::string> words;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const bool negative =
        word.size() > 1 && word[0] == '-' && std::isdigit(static_cast<unsigned char>(word[1])) != 0;
    if (negative && !words.empty() && wants_value(app, words.back())) {
      words.back() += "=" + word;
    } else {
      words.push_back(word);
    }
  }
  return words;
}

// CLI11 itself does not name a word that is no subcommand. `words` are those behind `program`, the
// words that lead to `app`.
void check_subcommand(const CLI::App& app, std::span<const std::string> words,
                      const std::string& program) {
  std::vector<std::string> names;
  const CLI::App* chosen = nullptr;
  for (const CLI::App* subcommand : app.get_subcommands(nullptr)) {
    names.push_back(subcommand->get_name());
    chosen = !words.empty() && words.front() == names.back() ? subcommand : chosen;
  }
  if (names.empty()) {
    return;
  }
  const std::string expected = fmt::format("{} (see {} --help)", fmt::join(names, " or "), program);
  require_input(!words.empty(), "no subcommand, expected {}", expected);
  if (chosen != nullptr) {
    check_subcommand(*chosen, words.subspan(1), program + " " + chosen->get_name());
    return;
  }
  require_input(words.front().starts_with("-"), "unknown subcommand '{}', expected {}",
                words.front(), expected);
}

// The subcommand that was parsed, the innermost one.
const CLI::App* parsed_subcommand(const CLI::App& app) {
  const CLI::App* last = &app;
  while (!last->get_subcommands().empty()) {
    last = last->get_subcommands().back();
  }
  return last;
}

// The words that lead from `app` to the subcommand that was parsed: "bench kernels ".
std::string parsed_path(const CLI::App& app) {
  std::string path;
  const CLI::App* last = &app;
  while (!last->get_subcommands().empty()) {
    last = last->get_subcommands().back();
    path += last->get_name() + " ";
  }
  return path;
}

void require_option(const std::string& value, const std::string& flag) {
  require_input(!value.empty(), "{} is required", flag);
}

// What a subcommand needs beyond what its options check by themselves.
void check_options(Command& command) {
  switch (command.kind) {
    case Command::Kind::kPrint:
      return;
    case Command::Kind::kGenerate: {
      const RunConfig& run = command.generate;
      require_option(run.model, "--model");
      require_input(run.verify_golden || !run.prompt_ids.empty() || !run.prompt.empty() ||
                        !run.chat.empty() || !run.prompts.empty(),
                    "no prompt: give --prompt, --chat, --prompt-ids, --prompts or --verify-golden");
      return;
    }
    case Command::Kind::kConvert:
      command.convert.check();
      return;
    case Command::Kind::kInspect:
      require_option(command.inspect.model, "--model");
      return;
    case Command::Kind::kPlan:
      command.plan.check();
      return;
    case Command::Kind::kBenchKernels:
      require_option(command.bench_kernels.model_config, "--model-config");
      command.bench_kernels.read_lists();
      return;
    case Command::Kind::kBenchAcceptance:
      require_option(command.bench_acceptance.run.model, "--model");
      require_option(command.bench_acceptance.run.prompts, "--prompts");
      command.bench_acceptance.read_lists();
      return;
    case Command::Kind::kBenchPerplexity:
      require_option(command.bench_perplexity.run.model, "--model");
      command.bench_perplexity.run.mode = "plain";
      command.bench_perplexity.check();
      return;
  }
}

}  // namespace

const RunConfig* Command::run() const {
  switch (kind) {
    case Kind::kGenerate:
      return &generate;
    case Kind::kBenchAcceptance:
      return &bench_acceptance.run;
    case Kind::kBenchPerplexity:
      return &bench_perplexity.run;
    case Kind::kPrint:
    case Kind::kConvert:
    case Kind::kInspect:
    case Kind::kBenchKernels:
    case Kind::kPlan:
      break;
  }
  return nullptr;
}

Command parse_command_line(int argc, const char* const* argv) {
  Command command;
  CLI::App app{"kdtree: speculative decoding of DeepSeek-V3 / Kimi-K2 models over several ranks",
               "kdtree"};
  app.require_subcommand(1);
  app.set_version_flag("--version", version_text(), "Print the version and what it is built with");
  app.footer(kFooter);
  std::string toml;
  CLI::App* generate = app.add_subcommand("generate", "Decode prompts");
  add_path(*generate, "--config", toml,
           "TOML file with these flags as keys; the command line wins");
  add_generate_options(*generate, command.generate);
  CLI::App* convert = app.add_subcommand(
      "convert", "Turn a directory into a bundle or back, round to INT4, or shard for ranks");
  add_convert_options(*convert, command.convert);
  CLI::App* inspect = app.add_subcommand("inspect", "Show what a checkpoint holds");
  add_path(*inspect, "--model", command.inspect.model,
           "KDTR bundle, or directory of a target or a drafter (required)");
  inspect->add_flag("--verify", command.inspect.verify,
                    "Read all tensors of a bundle and check them against their checksums");
  add_choice(*inspect, "--output-format", command.inspect.output_format, {"text", "json"},
             "What stdout carries");
  CLI::App* plan = app.add_subcommand(
      "plan", "Show what every rank would hold in memory, without weights or GPUs");
  add_plan_options(*plan, command.plan);
  CLI::App* bench = app.add_subcommand("bench", "Measure parts of the engine");
  bench->require_subcommand(1);
  CLI::App* bench_kernels = bench->add_subcommand(
      "kernels", "Check and time every op at the shapes of a model, in one process");
  add_bench_kernels_options(*bench_kernels, command.bench_kernels);
  CLI::App* bench_acceptance = bench->add_subcommand(
      "acceptance",
      "Decode prompts in every mode: what is accepted, how quick, how many experts a tree touches");
  add_bench_acceptance_options(*bench_acceptance, command.bench_acceptance);
  CLI::App* bench_perplexity =
      bench->add_subcommand("perplexity", "Score a text: exp of the mean loss of a token");
  add_bench_perplexity_options(*bench_perplexity, command.bench_perplexity);

  std::vector<std::string> words = join_negative_values(argc, argv, app);
  check_subcommand(app, words, "kdtree");
  std::reverse(words.begin(), words.end());  // CLI11 takes them from the back
  const auto hint = [&] { return fmt::format("(see kdtree {}--help)", parsed_path(app)); };
  try {
    app.parse(words);
  } catch (const CLI::CallForHelp&) {
    command.text = app.help();
    return command;
  } catch (const CLI::CallForVersion&) {
    command.text = version_text() + "\n";
    return command;
  } catch (const CLI::ExtrasError&) {
    fail_input("unknown argument '{}' {}", app.remaining(/*recurse=*/true).front(), hint());
  } catch (const CLI::ParseError& error) {
    fail_input("{} {}", error.what(), hint());
  }
  const CLI::App* chosen = parsed_subcommand(app);
  if (chosen == generate) {
    if (!toml.empty()) {
      apply_toml(*generate, toml);
    }
    command.kind = Command::Kind::kGenerate;
  } else if (chosen == convert) {
    command.kind = Command::Kind::kConvert;
  } else if (chosen == inspect) {
    command.kind = Command::Kind::kInspect;
  } else if (chosen == plan) {
    command.kind = Command::Kind::kPlan;
  } else if (chosen == bench_kernels) {
    command.kind = Command::Kind::kBenchKernels;
  } else if (chosen == bench_acceptance) {
    command.kind = Command::Kind::kBenchAcceptance;
  } else {
    command.kind = Command::Kind::kBenchPerplexity;
  }
  check_options(command);
  return command;
}

}  // namespace kdtree
