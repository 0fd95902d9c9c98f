#include "core/json_text.h"

#include <filesystem>
#include <fstream>
#include <system_error>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/check.h"

namespace kdtree {

namespace {

constexpr int kMaxDepth = 64;
constexpr std::size_t kMaxDescription = 120;

// Follows the parser: the keys seen so far of every object that is open.
class KeyWatcher {
 public:
  explicit KeyWatcher(const std::string& origin) : origin_(origin) {}

  template <class Json>
  bool operator()(int depth, typename Json::parse_event_t event, const Json& parsed) {
    using Event = typename Json::parse_event_t;
    switch (event) {
      case Event::object_start:
      case Event::array_start:
        require_input(depth < kMaxDepth, "{}: JSON nested deeper than {} levels", origin_,
                      kMaxDepth);
        open_.emplace_back();
        break;
      case Event::object_end:
      case Event::array_end:
        open_.pop_back();
        break;
      case Event::key:
        if (!open_.back().insert(parsed.template get_ref<const std::string&>()).second) {
          fail_input("{}: JSON object holds the key {} twice", origin_, describe_json(parsed));
        }
        break;
      case Event::value:
        break;
    }
    return true;
  }

 private:
  const std::string& origin_;
  std::vector<std::unordered_set<std::string>> open_;
};

std::string read_json_text(const std::string& path, std::int64_t max_bytes) {
  std::error_code status;
  const auto bytes = std::filesystem::file_size(path, status);
  require_input(!status, "{}: {}", path, status.message());
  require_input(bytes <= static_cast<std::uintmax_t>(max_bytes),
                "{}: {} bytes, expected a JSON file of at most {}", path, bytes, max_bytes);
  std::ifstream file(path, std::ios::binary);
  std::string text(static_cast<std::size_t>(bytes), '\0');
  require_input(file.good() && file.read(text.data(), static_cast<std::streamsize>(bytes)).good(),
                "{}: cannot be read", path);
  return text;
}

template <class Json>
Json parse_checked(std::string_view text, const std::string& origin) {
  KeyWatcher watcher(origin);
  try {
    // By reference: the parser copies the function object, and the watcher has state.
    return Json::parse(text,
                       [&watcher](int depth, typename Json::parse_event_t event, Json& parsed) {
                         return watcher(depth, event, std::as_const(parsed));
                       });
  } catch (const nlohmann::json::exception& error) {
    // The library's own text begins with its error number in brackets.
    std::string_view cause = error.what();
    if (const auto bracket = cause.find("] "); bracket != std::string_view::npos) {
      cause.remove_prefix(bracket + 2);
    }
    fail_input("{}: not valid JSON: {}", origin, cause);
  }
}

}  // namespace

nlohmann::json parse_json(std::string_view text, const std::string& origin) {
  return parse_checked<nlohmann::json>(text, origin);
}

nlohmann::ordered_json parse_ordered_json(std::string_view text, const std::string& origin) {
  return parse_checked<nlohmann::ordered_json>(text, origin);
}

nlohmann::json read_json_file(const std::string& path, std::int64_t max_bytes) {
  return parse_json(read_json_text(path, max_bytes), path);
}

nlohmann::ordered_json read_ordered_json_file(const std::string& path, std::int64_t max_bytes) {
  return parse_ordered_json(read_json_text(path, max_bytes), path);
}

std::string describe_json(const nlohmann::json& value) {
  std::string text = value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  if (text.size() > kMaxDescription) {
    std::size_t end = kMaxDescription;
    while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0U) == 0x80U) {
      --end;  // never in the middle of a character
    }
    text.resize(end);
    text += "...";
  }
  return text;
}

}  // namespace kdtree
