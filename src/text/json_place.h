// A value of a JSON file that knows where it stands, so that errors can say it.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kdtree {

// Does not own the value. Keys are joined by dots, elements are in brackets:
// "pre_tokenizer.pretokenizers[1].pattern".
class JsonPlace {
 public:
  JsonPlace(const nlohmann::json& value, const std::string& origin, std::string path = "")
      : value_(&value), origin_(&origin), path_(std::move(path)) {}

  const nlohmann::json& value() const { return *value_; }
  const std::string& path() const { return path_; }
  // File and key.
  std::string where() const;

  // The value under `key` of an object; none if it is absent or null. InputError if this is no
  // object.
  std::optional<JsonPlace> find(std::string_view key) const;
  // The same; InputError if there is none. `expected` says what it should be.
  JsonPlace at(std::string_view key, std::string_view expected) const;
  // The elements of a list; InputError if this is none.
  std::vector<JsonPlace> elements() const;

  // InputError unless the value is of that kind.
  const std::string& text() const;
  std::int32_t id() const;  // from 0 below kMaxTokens
  bool flag() const;
  // The flag under `key`, `absent` if there is none.
  bool flag_or(std::string_view key, bool absent) const;
  // The text under `key` has to be one of `choices`; its index among them.
  std::size_t choice(std::string_view key, std::initializer_list<std::string_view> choices) const;
  // InputError unless there is no such key, or its value is null or `value`.
  void require_absent_or(std::string_view key, const nlohmann::json& value) const;

  // Throws InputError: the value against what was expected.
  [[noreturn]] void refuse(std::string_view expected) const;

 private:
  const nlohmann::json* value_;
  const std::string* origin_;
  std::string path_;
};

}  // namespace kdtree
