// Typed access to the keys of a config.json; every error names file, key, value and expectation.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace kdtree {

// Both ends included.
struct IntegerBounds {
  std::int64_t low = 1;
  std::int64_t high = std::int64_t{1} << 24;
};
struct NumberBounds {
  double low = 0;  // included
  double high = std::numeric_limits<double>::max();
};

// A JSON object under `path` ("text_config.rope_scaling", empty for the whole) of the file
// `origin`. Does not own the object. A key whose value is null counts as absent everywhere.
// Numbers that are integral may be written as floats ("1.0").
class ConfigReader {
 public:
  // InputError if `object` is not a JSON object.
  ConfigReader(const nlohmann::json& object, std::string origin, std::string path = "");

  // The value of `key`, or nullptr if it is absent or null.
  const nlohmann::json* find(std::string_view key) const;
  // The object under `key`, or none if it is absent.
  std::optional<ConfigReader> object(std::string_view key) const;

  // InputError if the key is absent, of another type or out of bounds.
  std::int64_t integer(std::string_view key, IntegerBounds bounds = {}) const;
  double number(std::string_view key, NumberBounds bounds = {}) const;
  // The same, with a value for an absent key.
  std::int64_t integer_or(std::string_view key, std::int64_t absent,
                          IntegerBounds bounds = {}) const;
  double number_or(std::string_view key, double absent, NumberBounds bounds = {}) const;
  bool flag_or(std::string_view key, bool absent) const;
  // One of `choices`.
  std::string text_or(std::string_view key, std::string_view absent,
                      std::initializer_list<std::string_view> choices) const;
  std::string text(std::string_view key, std::initializer_list<std::string_view> choices) const;
  // A list of integers; with `scalar` a single integer counts as a list of one. Empty if absent.
  std::vector<std::int64_t> integers_or_empty(std::string_view key, IntegerBounds bounds,
                                              bool scalar) const;

  // Throws InputError: the key's value (or its absence) against what was expected.
  [[noreturn]] void refuse(std::string_view key, std::string_view expected) const;
  void require(bool condition, std::string_view key, std::string_view expected) const {
    if (!condition) {
      refuse(key, expected);
    }
  }
  // InputError unless the key is absent, null or `expected`.
  void require_absent_or(std::string_view key, const nlohmann::json& expected) const;

  const std::string& origin() const { return origin_; }
  // The key with its path, as errors print it.
  std::string full_key(std::string_view key) const;

 private:
  const nlohmann::json* object_;
  std::string origin_;
  std::string path_;
};

}  // namespace kdtree
