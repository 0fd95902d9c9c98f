#include "text/json_place.h"

#include <algorithm>

#include "core/check.h"
#include "core/json_text.h"
#include "text/tokenizer_parts.h"

namespace kdtree {

std::string JsonPlace::where() const {
  return path_.empty() ? *origin_ : fmt::format("{}: key '{}'", *origin_, path_);
}

std::optional<JsonPlace> JsonPlace::find(std::string_view key) const {
  if (!value_->is_object()) {
    refuse("an object");
  }
  const auto found = value_->find(key);
  if (found == value_->end() || found->is_null()) {
    return std::nullopt;
  }
  return JsonPlace(*found, *origin_,
                   path_.empty() ? std::string(key) : fmt::format("{}.{}", path_, key));
}

JsonPlace JsonPlace::at(std::string_view key, std::string_view expected) const {
  const auto found = find(key);
  require_input(found.has_value(), "{}: key '{}{}{}' is missing, expected {}", *origin_, path_,
                path_.empty() ? "" : ".", key, expected);
  return *found;
}

std::vector<JsonPlace> JsonPlace::elements() const {
  if (!value_->is_array()) {
    refuse("a list");
  }
  std::vector<JsonPlace> all;
  for (const nlohmann::json& element : *value_) {
    all.emplace_back(element, *origin_, fmt::format("{}[{}]", path_, all.size()));
  }
  return all;
}

const std::string& JsonPlace::text() const {
  if (!value_->is_string()) {
    refuse("a string");
  }
  return value_->get_ref<const std::string&>();
}

std::int32_t JsonPlace::id() const {
  // Integers that are not negative are unsigned to the parser.
  if (!value_->is_number_unsigned() || value_->get<std::uint64_t>() >= kMaxTokens) {
    refuse(fmt::format("a token id from 0 to {}", kMaxTokens - 1));
  }
  return value_->get<std::int32_t>();
}

bool JsonPlace::flag() const {
  if (!value_->is_boolean()) {
    refuse("true or false");
  }
  return value_->get<bool>();
}

bool JsonPlace::flag_or(std::string_view key, bool absent) const {
  const auto found = find(key);
  return found ? found->flag() : absent;
}

std::size_t JsonPlace::choice(std::string_view key,
                              std::initializer_list<std::string_view> choices) const {
  const std::string expected = fmt::format("{}", fmt::join(choices, " or "));
  const JsonPlace place = at(key, expected);
  const auto* const found =
      place.value_->is_string()
          ? std::find(choices.begin(), choices.end(), place.value_->get_ref<const std::string&>())
          : choices.end();
  if (found == choices.end()) {
    place.refuse(expected);
  }
  return static_cast<std::size_t>(found - choices.begin());
}

void JsonPlace::require_absent_or(std::string_view key, const nlohmann::json& value) const {
  const auto found = find(key);
  if (found && *found->value_ != value) {
    found->refuse(value.is_null() ? "null: nothing else is supported"
                                  : describe_json(value) + ": nothing else is supported");
  }
}

void JsonPlace::refuse(std::string_view expected) const {
  fail_input("{}{} {}, expected {}", where(), path_.empty() ? ": is" : " is",
             describe_json(*value_), expected);
}

}  // namespace kdtree
