// The program's command line and TOML files.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "bench_options.h"
#include "config/run_config.h"
#include "convert_options.h"
#include "plan_options.h"

namespace kdtree {

struct InspectOptions {
  std::string model;
  bool verify = false;
  std::string output_format = "text";
};

// What the command line asks for; exactly one of the subcommands, or a text to print.
struct Command {
  enum class Kind : std::uint8_t {
    kPrint,
    kGenerate,
    kConvert,
    kInspect,
    kBenchKernels,
    kBenchAcceptance,
    kBenchPerplexity,
    kPlan
  };
  Kind kind = Kind::kPrint;
  std::string text;  // kPrint: help or version
  RunConfig generate;
  ConvertCommand convert;
  InspectOptions inspect;
  BenchKernelsOptions bench_kernels;
  BenchAcceptanceOptions bench_acceptance;
  BenchPerplexityOptions bench_perplexity;
  PlanOptions plan;

  // The run of a subcommand that works on several ranks; nullptr for the others.
  const RunConfig* run() const;
};

// InputError names the flag or the TOML file and key, the value, and what was expected.
Command parse_command_line(int argc, const char* const* argv);

// Sets the options of `app` that the command line did not give from a TOML file whose keys are the
// flags' names ('-' and '_' alike). A flag without a value takes true or false, an option of type
// kNumberType a whole number, one of kRealType any number, any other a string; one that may be
// repeated a list of strings, a list of number lists, or a number list alone, which is a single
// value. InputError for an unknown key, a key twice or a value that the option does not take.
void apply_toml(CLI::App& app, const std::string& path);

}  // namespace kdtree
