#include "core/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>

#include <algorithm>
#include <memory>

#include "core/check.h"

namespace kdtree {

void init_logging(const std::string& level, int rank, int world_size) {
  const spdlog::level::level_enum parsed = spdlog::level::from_str(level);
  // from_str answers "off" for any word that it does not know.
  require_input(parsed != spdlog::level::off || level == "off",
                "--log-level: unknown level '{}', expected trace, debug, info, warn, error or off",
                level);
  auto logger = std::make_shared<spdlog::logger>(
      "kdtree", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
  logger->set_level(rank == 0 ? parsed : std::max(parsed, spdlog::level::warn));
  logger->set_pattern(world_size > 1 ? fmt::format("[%H:%M:%S.%e] [rank {}] [%^%l%$] %v", rank)
                                     : "[%H:%M:%S.%e] [%^%l%$] %v");
  logger->flush_on(spdlog::level::warn);
  spdlog::set_default_logger(std::move(logger));
}

}  // namespace kdtree
