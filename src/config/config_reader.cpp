#include "config/config_reader.h"

#include <spdlog/fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/check.h"
#include "core/json_text.h"

namespace kdtree {

namespace {

constexpr double kLargestExactInteger = 9007199254740992.0;  // 2^53

std::optional<std::int64_t> as_integer(const nlohmann::json& value) {
  if (value.is_number_unsigned()) {
    const auto number = value.get<std::uint64_t>();
    if (number > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      return std::nullopt;
    }
    return static_cast<std::int64_t>(number);
  }
  if (value.is_number_integer()) {
    return value.get<std::int64_t>();
  }
  if (value.is_number_float()) {
    const auto number = value.get<double>();
    if (std::abs(number) <= kLargestExactInteger && std::floor(number) == number) {
      return static_cast<std::int64_t>(number);
    }
  }
  return std::nullopt;
}

std::string expectation(IntegerBounds bounds) {
  return fmt::format("an integer from {} to {}", bounds.low, bounds.high);
}

bool within(const std::optional<std::int64_t>& value, IntegerBounds bounds) {
  return value && *value >= bounds.low && *value <= bounds.high;
}

}  // namespace

ConfigReader::ConfigReader(const nlohmann::json& object, std::string origin, std::string path)
    : object_(&object), origin_(std::move(origin)), path_(std::move(path)) {
  require_input(object.is_object(), "{}: {} is {}, expected a JSON object", origin_,
                path_.empty() ? "the whole file" : path_, describe_json(object));
}

const nlohmann::json* ConfigReader::find(std::string_view key) const {
  const auto found = object_->find(key);
  return found == object_->end() || found->is_null() ? nullptr : &*found;
}

std::optional<ConfigReader> ConfigReader::object(std::string_view key) const {
  const nlohmann::json* value = find(key);
  if (value == nullptr) {
    return std::nullopt;
  }
  return ConfigReader(*value, origin_, full_key(key));
}

std::int64_t ConfigReader::integer(std::string_view key, IntegerBounds bounds) const {
  const nlohmann::json* value = find(key);
  const auto number = value == nullptr ? std::nullopt : as_integer(*value);
  require(within(number, bounds), key, expectation(bounds));
  return *number;
}

double ConfigReader::number(std::string_view key, NumberBounds bounds) const {
  const nlohmann::json* value = find(key);
  const bool good = value != nullptr && value->is_number() && value->get<double>() >= bounds.low &&
                    value->get<double>() <= bounds.high;
  if (!good) {
    refuse(key, bounds.high == std::numeric_limits<double>::max()
                    ? fmt::format("a number of at least {}", bounds.low)
                    : fmt::format("a number from {} to {}", bounds.low, bounds.high));
  }
  return value->get<double>();
}

std::int64_t ConfigReader::integer_or(std::string_view key, std::int64_t absent,
                                      IntegerBounds bounds) const {
  return find(key) == nullptr ? absent : integer(key, bounds);
}

double ConfigReader::number_or(std::string_view key, double absent, NumberBounds bounds) const {
  return find(key) == nullptr ? absent : number(key, bounds);
}

bool ConfigReader::flag_or(std::string_view key, bool absent) const {
  const nlohmann::json* value = find(key);
  if (value == nullptr) {
    return absent;
  }
  require(value->is_boolean(), key, "true or false");
  return value->get<bool>();
}

std::string ConfigReader::text_or(std::string_view key, std::string_view absent,
                                  std::initializer_list<std::string_view> choices) const {
  return find(key) == nullptr ? std::string(absent) : text(key, choices);
}

std::string ConfigReader::text(std::string_view key,
                               std::initializer_list<std::string_view> choices) const {
  const nlohmann::json* value = find(key);
  if (value != nullptr && value->is_string()) {
    const auto& found = value->get_ref<const std::string&>();
    if (std::find(choices.begin(), choices.end(), found) != choices.end()) {
      return found;
    }
  }
  refuse(key, fmt::format("{}", fmt::join(choices, " or ")));
}

std::vector<std::int64_t> ConfigReader::integers_or_empty(std::string_view key,
                                                          IntegerBounds bounds, bool scalar) const {
  const nlohmann::json* value = find(key);
  if (value == nullptr) {
    return {};
  }
  if (scalar && !value->is_array()) {
    return {integer(key, bounds)};
  }
  require(value->is_array(), key, "a list of integers");
  std::vector<std::int64_t> numbers;
  for (const nlohmann::json& element : *value) {
    const auto number = as_integer(element);
    require(within(number, bounds), key, "a list; each element " + expectation(bounds));
    numbers.push_back(*number);
  }
  return numbers;
}

void ConfigReader::refuse(std::string_view key, std::string_view expected) const {
  const auto found = object_->find(key);
  if (found == object_->end()) {
    fail_input("{}: key '{}' is missing, expected {}", origin_, full_key(key), expected);
  }
  fail_input("{}: key '{}' is {}, expected {}", origin_, full_key(key), describe_json(*found),
             expected);
}

void ConfigReader::require_absent_or(std::string_view key, const nlohmann::json& expected) const {
  const nlohmann::json* value = find(key);
  require(value == nullptr || *value == expected, key,
          expected.is_null() ? "null (not supported)" : describe_json(expected));
}

std::string ConfigReader::full_key(std::string_view key) const {
  return path_.empty() ? std::string(key) : fmt::format("{}.{}", path_, key);
}

}  // namespace kdtree
