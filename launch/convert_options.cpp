#include "convert_options.h"

#include "core/check.h"
#include "option_kinds.h"

namespace kdtree {

void ConvertCommand::check() const {
  require_input(!model.empty(), "--model is required");
  require_input(!output.empty(), "--output is required");
  require_input(!keep_originals || !quantize.empty(), "--keep-originals needs --quantize");
  require_input(!keep_originals || shard_for == 0,
                "--keep-originals with --shard-for: a rank reads one copy of a matrix");
  require_input(shard_for == 0 || !output.ends_with(".kdtr"),
                "--shard-for {} with --output {}: expected a directory, for a bundle of each rank",
                shard_for, output);
}

void add_convert_options(CLI::App& app, ConvertCommand& command) {
  add_path(app, "--model", command.model, "KDTR bundle or Hugging Face directory (required)");
  add_path(app, "--draft", command.draft,
           "Drafter to take along: DFlash directory or KDTR bundle (default: the model's own)");
  add_path(app, "--output", command.output,
           "What to write: a bundle if it ends in .kdtr, else a directory (required)");
  add_choice(app, "--quantize", command.quantize, {"w4a16"},
             "Round routed experts in floats or fp8 to INT4 groups with bf16 scales, to nearest");
  add_count(app, "--group-size", command.group_size,
            CLI::Range(std::int64_t{8}, std::int64_t{4096}),
            "Weights that share a scale, a multiple of 8");
  app.add_flag("--keep-originals", command.keep_originals,
               "Keep what --quantize rounds, beside it");
  add_count(
      app, "--shard-for", command.shard_for, CLI::Range(std::int64_t{0}, std::int64_t{4096}),
      "Write a directory of bundles, for each of so many ranks what it alone reads; 0: do not");
  app.add_flag("--overwrite", command.overwrite, "Replace what is at --output");
  add_count(app, "--threads", command.threads, CLI::Range(std::int64_t{0}, std::int64_t{4096}),
            "Threads that read, convert and write; 0: one a core");
  add_choice(app, "--output-format", command.output_format, {"text", "json"},
             "What stdout carries; json: a line a quantised matrix, then a summary");
}

}  // namespace kdtree
