#include "command_line.h"

#include <algorithm>
#include <cctype>
#include <limits>

#include "core/build_info.h"
#include "core/check.h"

namespace kdtree {

namespace {

constexpr std::int64_t kUnbounded = std::numeric_limits<std::int32_t>::max();

std::string version_text() {
  const BuildInfo& build = build_info();
  return fmt::format("kdtree {}\ncommit {}\ncompiler {} ({})\nCUDA {}\nNCCL {}\nMPI {}",
                     build.version, build.commit, build.compiler, build.build_type, build.cuda,
                     build.nccl, build.mpi);
}

void add_choice(CLI::App& app, const std::string& flag, std::string& value,
                const std::vector<std::string>& choices, const std::string& help) {
  app.add_option(flag, value, help)->check(CLI::IsMember(choices))->capture_default_str();
}

void add_count(CLI::App& app, const std::string& flag, std::int64_t& value, CLI::Range range,
               const std::string& help) {
  app.add_option(flag, value, help)->check(range)->capture_default_str();
}

void add_generate_options(CLI::App& app, RunConfig& config) {
  // Required ones are checked after the TOML file has been read.
  app.add_option("--model", config.model, "KDTR bundle or Hugging Face directory of the target");
  app.add_option("--draft", config.draft,
                 "DFlash directory or bundle with the drafter (default: the bundle's own)");
  app.add_option("--prompt-ids", config.prompt_ids,
                 "Token ids of a prompt, as 1,2,3; may be repeated")
      ->expected(1, std::numeric_limits<int>::max())
      ->allow_extra_args(false);
  app.add_option("--prompts", config.prompts, "File of JSON lines, each with prompt_ids");
  add_count(app, "--batch-size", config.batch_size, CLI::Range(std::int64_t{1}, std::int64_t{4096}),
            "Sequences a step");
  add_count(app, "--max-new-tokens", config.max_new_tokens, CLI::Range(std::int64_t{1}, kUnbounded),
            "Output tokens of a prompt, at most");
  add_count(app, "--max-context", config.max_context, CLI::Range(std::int64_t{0}, kUnbounded),
            "Tokens of prompt and output together; 0: what the prompts need");
  add_choice(
      app, "--mode", config.mode, {"auto", "plain", "chain", "tree"},
      "plain: a token a step; chain, tree: speculative; auto: tree where there is a drafter");
  add_count(app, "--tree-budget", config.tree_budget, CLI::Range(std::int64_t{1}, kMaxTreeBudget),
            "Nodes of a draft tree without its root");
  add_choice(app, "--weights", config.weights, {"auto", "original", "quantized"},
             "Which copy of a bundle that holds both; auto: quantized where there is one");
  add_choice(app, "--backend", config.backend, {"auto", "cpu", "cuda"}, "Where kernels run");
  add_choice(app, "--communicator", config.communicator, {"auto", "self", "mpi", "nccl"},
             "How ranks exchange tensors");
  add_choice(app, "--exchange", config.exchange, {"auto", "allreduce", "alltoall"},
             "How tokens reach their experts; auto: allreduce");
  add_choice(app, "--dtype", config.dtype, {"auto", "fp32", "bf16"},
             "fp32: weights as stored; bf16: FP32 matrices rounded; auto: fp32 on the CPU");
  app.add_flag("--ignore-eos", config.ignore_eos, "Go on after an end token");
  add_count(app, "--top-logits", config.top_logits, CLI::Range(std::int64_t{0}, kUnbounded),
            "Best logits after the prompt to print");
  app.add_flag("--dump-steps", config.dump_steps, "Print every step's tree and acceptance (json)");
  add_choice(app, "--output-format", config.output_format, {"text", "json"}, "What stdout carries");
  app.add_flag("--verify-golden", config.verify_golden,
               "Decode the bundle's golden prompts and compare the tokens");
  add_count(app, "--threads", config.threads, CLI::Range(std::int64_t{0}, std::int64_t{4096}),
            "CPU threads of a rank; 0: the cores shared among the ranks of the host");
  add_choice(app, "--log-level", config.log_level,
             {"trace", "debug", "info", "warn", "error", "off"}, "What stderr carries");
}

// "--flag" "-1,2" becomes "--flag=-1,2": otherwise a negative value reads as a flag of its own.
std::vector<std::string> join_negative_values(int argc, const char* const* argv) {
  std::vector<std::string> words;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const bool negative =
        word.size() > 1 && word[0] == '-' && std::isdigit(static_cast<unsigned char>(word[1])) != 0;
    if (negative && !words.empty() && words.back().starts_with("--") &&
        words.back().find('=') == std::string::npos) {
      words.back() += "=" + word;
    } else {
      words.push_back(word);
    }
  }
  return words;
}

void require_option(const std::string& value, const std::string& flag) {
  require_input(!value.empty(), "{} is required", flag);
}

}  // namespace

Command parse_command_line(int argc, const char* const* argv) {
  Command command;
  CLI::App app{"kdtree: speculative decoding of DeepSeek-V3 / Kimi-K2 models over several ranks",
               "kdtree"};
  app.require_subcommand(1);
  app.set_version_flag("--version", version_text());
  std::string toml;
  CLI::App* generate = app.add_subcommand("generate", "Decode prompts");
  generate->add_option("--config", toml,
                       "TOML file with these flags as keys; the command line wins");
  add_generate_options(*generate, command.generate);
  CLI::App* inspect = app.add_subcommand("inspect", "Show what a checkpoint holds");
  inspect
      ->add_option("--model", command.inspect.model,
                   "KDTR bundle, or directory of a target or a drafter")
      ->required();
  add_choice(*inspect, "--output-format", command.inspect.output_format, {"text", "json"},
             "What stdout carries");

  std::vector<std::string> words = join_negative_values(argc, argv);
  std::reverse(words.begin(), words.end());  // CLI11 takes them from the back
  try {
    app.parse(words);
  } catch (const CLI::CallForHelp&) {
    command.text = (generate->parsed() ? generate : inspect->parsed() ? inspect : &app)->help();
    return command;
  } catch (const CLI::CallForVersion&) {
    command.text = version_text() + "\n";
    return command;
  } catch (const CLI::ParseError& error) {
    fail_input("{} (kdtree --help lists the subcommands, kdtree generate --help its flags)",
               error.what());
  }
  if (inspect->parsed()) {
    command.kind = Command::Kind::kInspect;
    return command;
  }
  if (!toml.empty()) {
    apply_toml(*generate, toml);
  }
  command.kind = Command::Kind::kGenerate;
  require_option(command.generate.model, "--model");
  require_input(command.generate.verify_golden || !command.generate.prompt_ids.empty() ||
                    !command.generate.prompts.empty(),
                "no prompt: give --prompt-ids, --prompts or --verify-golden");
  return command;
}

}  // namespace kdtree
