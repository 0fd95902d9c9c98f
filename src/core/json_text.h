// JSON from text or a file, with errors that name the file.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace kdtree {

// Parses `text`. InputError, beginning with `origin`, if it is not valid UTF-8 JSON, if an object
// holds a key twice, or if it nests deeper than 64 levels.
nlohmann::json parse_json(std::string_view text, const std::string& origin);
// The same, with the keys of every object in their order.
nlohmann::ordered_json parse_ordered_json(std::string_view text, const std::string& origin);

// Reads and parses a file of at most `max_bytes`. InputError as above, or if it cannot be read.
nlohmann::json read_json_file(const std::string& path, std::int64_t max_bytes = 256 << 20);
nlohmann::ordered_json read_ordered_json_file(const std::string& path,
                                              std::int64_t max_bytes = 256 << 20);

// `value` as text for an error message: one line, cut after some 120 characters.
std::string describe_json(const nlohmann::json& value);

}  // namespace kdtree
