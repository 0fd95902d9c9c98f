// Results as text or JSON lines on stdout.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "comm/parallel_grid.h"
#include "config/run_config.h"
#include "engine/exchange_counters.h"
#include "engine/request.h"
#include "kernels/backend.h"
#include "weights/load_statistics.h"

namespace kdtree {

// Where and with what a run was made; the same for all its results.
struct RunFacts {
  std::string backend;
  std::string communicator;
  std::string exchange;
  std::string mode;
  std::string weights;
  std::string dtype;  // of activations: "fp32", "bf16"
  std::string host;
  LoadStatistics load;  // bytes of all ranks, seconds of the slowest
  DeviceFacts device;   // of rank 0
  int world_size = 1;
  ParallelGrid grid = {};
  int threads = 1;
  std::int64_t batch_size = 1;
  std::int64_t tree_nodes = 1;  // of a step and sequence at most, root included
  std::int64_t draft_horizon = 0;
  bool with_top_logits = false;
  bool with_steps = false;
};

// One line of --output-format json.
// `text` is what the output says, without its end token; none where there is no tokenizer.
nlohmann::ordered_json result_json(const Result& result, const RunFacts& facts,
                                   const std::optional<std::string>& text);
// A few lines for people.
std::string result_text(const Result& result, const RunFacts& facts);
// One line of how a run went.
std::string statistics_text(const Result& result);

nlohmann::ordered_json device_json(const DeviceFacts& device);
// "bytes_read", "checksum_bytes", "own_bytes", "seconds", "gb_per_s".
nlohmann::ordered_json load_json(const LoadStatistics& load);
// What --record-exchange writes: "steps" and for each layer with experts its figures and those of
// each rank, named as in engine/exchange_counters.h, sums over the steps.
nlohmann::ordered_json exchange_json(const ExchangeReport& report, const RunFacts& facts);
// The last part of a model's path: a file's or a directory's name.
std::string model_name(const std::string& path);
// What is the same whatever is decoded: weights, dtype, where it ran, device, build.
nlohmann::ordered_json facts_json(const RunFacts& facts);
// "loaded X GB (own share Y GB) in Z s, W GB/s"
std::string load_text(const LoadStatistics& load);

// Writes to stdout and flushes. InputError if stdout does not take it.
void write_stdout(const std::string& text);

}  // namespace kdtree
