#include <toml++/toml.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "command_line.h"
#include "core/check.h"
#include "option_kinds.h"

namespace kdtree {

namespace {

bool is_number_list(const toml::node& node) {
  const toml::array* list = node.as_array();
  return list != nullptr && std::all_of(list->begin(), list->end(),
                                        [](const toml::node& entry) { return entry.is_integer(); });
}

// A list of numbers as the word that it would be on the command line: "1,2,3".
std::string joined(const toml::array& list) {
  std::string word;
  for (const toml::node& entry : list) {
    word += (word.empty() ? "" : ",") + std::to_string(entry.as_integer()->get());
  }
  return word;
}

// The value of an option that is given once, as its word on the command line.
std::string as_word(const CLI::Option& option, const toml::node& node, const std::string& place) {
  if (option.get_items_expected_max() == 0) {
    require_input(node.is_boolean(), "{}: expected true or false", place);
    return node.as_boolean()->get() ? "true" : "false";
  }
  if (option.get_type_name().starts_with(kNumberType)) {
    require_input(node.is_integer(), "{}: expected a whole number", place);
    return std::to_string(node.as_integer()->get());
  }
  if (option.get_type_name().starts_with(kRealType)) {
    require_input(node.is_number(), "{}: expected a number", place);
    return fmt::format("{}", node.value<double>().value());
  }
  if (option.get_type_name().starts_with(kAutoOrRealType) && node.is_number()) {
    return fmt::format("{}", node.value<double>().value());
  }
  require_input(node.is_string(), "{}: expected a string", place);
  return node.as_string()->get();
}

// The values of an option that may be repeated. A list of numbers is one value, as prompt_ids is in
// a file of prompts.
std::vector<std::string> as_words(const toml::node& node, const std::string& place) {
  const auto one_word = [&](const toml::node& value) {
    require_input(value.is_string() || is_number_list(value),
                  "{}: expected a list of whole numbers, or a list of such lists or of strings as "
                  "\"1,2,3\"",
                  place);
    return value.is_string() ? value.as_string()->get() : joined(*value.as_array());
  };
  const toml::array* list = node.as_array();
  if (list == nullptr || is_number_list(node)) {
    return {one_word(node)};
  }
  std::vector<std::string> words;
  for (const toml::node& entry : *list) {
    words.push_back(one_word(entry));
  }
  return words;
}

CLI::Option* find_option(CLI::App& app, std::string key) {
  std::replace(key.begin(), key.end(), '_', '-');
  if (key == "config" || key == "help") {
    return nullptr;
  }
  return app.get_option_no_throw("--" + key);
}

std::string known_keys(CLI::App& app) {
  std::string keys;
  for (const CLI::Option* option : app.get_options()) {
    const std::string name = option->get_name().substr(2);
    if (name != "config" && name != "help") {
      keys += (keys.empty() ? "" : ", ") + name;
    }
  }
  return keys;
}

void apply_entry(CLI::Option& option, const toml::node& node, const std::string& place) {
  try {
    if (option.get_expected_max() > 1) {
      for (const std::string& word : as_words(node, place)) {
        option.add_result(word);
      }
    } else {
      option.add_result(as_word(option, node, place));
    }
    option.run_callback();
  } catch (const CLI::Error& error) {
    fail_input("{}: {}", place, error.what());
  }
}

toml::table parse_toml(const std::string& path) {
  std::ifstream stream(path);
  require_input(stream.good() && !std::filesystem::is_directory(path), "--config: cannot read {}",
                path);
  try {
    return toml::parse(stream, path);
  } catch (const toml::parse_error& error) {
    fail_input("{}: line {}: {}", path, error.source().begin.line, error.description());
  }
}

}  // namespace

void apply_toml(CLI::App& app, const std::string& path) {
  const toml::table table = parse_toml(path);
  std::set<const CLI::Option*> seen;
  for (const auto& [key, node] : table) {
    const std::string name(key.str());
    const std::string place =
        fmt::format("{}: line {}: key '{}'", path, node.source().begin.line, name);
    CLI::Option* option = find_option(app, name);
    require_input(option != nullptr, "{} is unknown, expected one of: {}", place, known_keys(app));
    require_input(seen.insert(option).second, "{} is there twice, with '-' and with '_'", place);
    if (option->count() == 0) {  // the command line wins
      apply_entry(*option, node, place);
    }
  }
}

}  // namespace kdtree
