// kdtree convert: checkpoints between their forms.
#include "weights/convert.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>

#include "commands.h"
#include "core/check.h"
#include "core/log.h"
#include "result_output.h"

namespace kdtree {

namespace {

using Json = nlohmann::ordered_json;

constexpr double kGigabyte = 1e9;

struct ErrorSummary {
  double mean_relative = 0;
  QuantizedTensor worst;
  double max_abs = 0;
};

ErrorSummary summarize(const std::vector<QuantizedTensor>& tensors) {
  ErrorSummary summary;
  for (const QuantizedTensor& tensor : tensors) {
    summary.mean_relative += tensor.relative_error / static_cast<double>(tensors.size());
    summary.max_abs = std::max(summary.max_abs, tensor.max_abs_error);
    if (tensor.relative_error >= summary.worst.relative_error) {
      summary.worst = tensor;
    }
  }
  return summary;
}

// Paths and names may hold bytes that are no UTF-8.
std::string line_of(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string report_json(const ConvertCommand& command, const ConvertReport& report) {
  std::string text;
  for (const QuantizedTensor& tensor : report.quantized) {
    text += line_of({{"tensor", tensor.name},
                     {"relative_error", tensor.relative_error},
                     {"max_abs_error", tensor.max_abs_error}});
  }
  Json summary = {{"output", command.output},
                  {"files", report.files},
                  {"tensors", report.num_tensors},
                  {"bytes", report.bytes},
                  {"resumed_tensors", report.num_resumed},
                  {"seconds", report.seconds},
                  {"left_out", report.left_out}};
  if (!report.quantized.empty()) {
    const ErrorSummary errors = summarize(report.quantized);
    summary["quantized"] = {{"tensors", report.quantized.size()},
                            {"group_size", command.group_size},
                            {"mean_relative_error", errors.mean_relative},
                            {"worst_relative_error", errors.worst.relative_error},
                            {"worst_tensor", errors.worst.name},
                            {"max_abs_error", errors.max_abs}};
  }
  return text + line_of(summary);
}

std::string report_text(const ConvertCommand& command, const ConvertReport& report) {
  std::string text =
      fmt::format("{}: {} tensors, {:.4f} GB in {} {}, {:.1f} s\n", command.output,
                  report.num_tensors, static_cast<double>(report.bytes) / kGigabyte,
                  report.files.size(), report.files.size() == 1 ? "file" : "files", report.seconds);
  if (report.num_resumed > 0) {
    text += fmt::format("{} of these tensors were there from a run that was interrupted\n",
                        report.num_resumed);
  }
  if (!report.quantized.empty()) {
    const ErrorSummary errors = summarize(report.quantized);
    text += fmt::format(
        "{} matrices rounded to INT4, groups of {}: relative error {:.4f} on average, at most "
        "{:.4f} ({}); absolute error at most {:.4g}\n",
        report.quantized.size(), command.group_size, errors.mean_relative,
        errors.worst.relative_error, errors.worst.name, errors.max_abs);
  }
  if (!report.left_out.empty()) {
    text += "not taken along:";
    for (const std::string& name : report.left_out) {
      text += " " + name;
    }
    text += "\n";
  }
  return text;
}

}  // namespace

int run_convert(const ConvertCommand& command, ProcessGroup& group) {
  run_together(group, [&] {
    init_logging("info", group.rank(), group.world_size());
    if (group.rank() != 0) {
      return;
    }
    const auto cores = static_cast<int>(std::max(std::thread::hardware_concurrency(), 1U));
    ConvertOptions options;
    options.model = command.model;
    options.draft = command.draft;
    options.output = command.output;
    options.group_size = command.quantize.empty() ? 0 : command.group_size;
    options.keep_originals = command.keep_originals;
    options.shard_for = static_cast<int>(command.shard_for);
    options.overwrite = command.overwrite;
    options.num_threads = command.threads > 0 ? static_cast<int>(command.threads) : cores;
    const ConvertReport report = convert(options);
    write_stdout(command.output_format == "json" ? report_json(command, report)
                                                 : report_text(command, report));
  });
  return 0;
}

}  // namespace kdtree
