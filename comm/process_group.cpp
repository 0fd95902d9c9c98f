#include "comm/process_group.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstddef>
#include <exception>
#include <map>
#include <vector>

namespace kdtree {

namespace {

struct Report {
  bool failed = false;
  std::string message;
};

Report run_and_report(const std::function<void()>& body) {
  try {
    body();
    return {};
  } catch (const std::exception& error) {
    return {true, error.what()};
  }
}

// Every rank's report, in rank order.
std::vector<Report> gather_reports(ProcessGroup& group, const Report& own) {
  const auto world_size = static_cast<std::size_t>(group.world_size());
  const std::int64_t own_size[2] = {own.failed ? 1 : 0,
                                    static_cast<std::int64_t>(own.message.size())};
  std::vector<std::int64_t> sizes(2 * world_size);
  group.all_gather(own_size, sizeof own_size, sizes.data());
  std::size_t longest = 0;
  for (std::size_t rank = 0; rank < world_size; ++rank) {
    longest = std::max(longest, static_cast<std::size_t>(sizes[2 * rank + 1]));
  }
  std::string padded = own.message;
  padded.resize(longest);
  std::string texts(longest * world_size, '\0');
  if (longest > 0) {
    group.all_gather(padded.data(), static_cast<std::int64_t>(longest), texts.data());
  }
  std::vector<Report> reports(world_size);
  for (std::size_t rank = 0; rank < world_size; ++rank) {
    reports[rank].failed = sizes[2 * rank] != 0;
    reports[rank].message =
        texts.substr(rank * longest, static_cast<std::size_t>(sizes[2 * rank + 1]));
  }
  return reports;
}

}  // namespace

void run_together(ProcessGroup& group, const std::function<void()>& body) {
  const std::vector<Report> reports = gather_reports(group, run_and_report(body));
  std::map<std::string, std::vector<std::size_t>> ranks_of_message;
  std::vector<std::string> order;
  for (std::size_t rank = 0; rank < reports.size(); ++rank) {
    const Report& report = reports[rank];
    if (!report.failed) {
      continue;
    }
    std::vector<std::size_t>& ranks = ranks_of_message[report.message];
    if (ranks.empty()) {
      order.push_back(report.message);
    }
    ranks.push_back(rank);
  }
  if (order.empty()) {
    return;
  }
  std::string text;
  for (const std::string& message : order) {
    const std::vector<std::size_t>& ranks = ranks_of_message[message];
    text += text.empty() ? "" : "\n";
    const bool common = ranks.size() == reports.size() ||
                        (order.size() == 1 && ranks == std::vector<std::size_t>{0});
    text += common ? message : fmt::format("rank {}: {}", fmt::join(ranks, ", "), message);
  }
  throw AgreedError(text);
}

}  // namespace kdtree
