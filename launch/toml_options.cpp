#include <toml++/toml.h>

#include <algorithm>
#include <string>

#include "command_line.h"
#include "core/check.h"

namespace kdtree {

namespace {

// A value as the words that the flag would have on the command line: a list of numbers is one word,
// "1,2,3".
std::string as_word(const toml::node& node, const std::string& place) {
  if (const auto* text = node.as_string()) {
    return text->get();
  }
  if (const auto* number = node.as_integer()) {
    return std::to_string(number->get());
  }
  if (const auto* flag = node.as_boolean()) {
    return flag->get() ? "true" : "false";
  }
  if (const auto* list = node.as_array()) {
    std::string joined;
    for (const toml::node& entry : *list) {
      joined += (joined.empty() ? "" : ",") + as_word(entry, place);
    }
    return joined;
  }
  fail_input("{}: expected a string, a whole number, true, false or a list of these", place);
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
  // An option that may be given several times takes a list of its values.
  const auto* list = node.as_array();
  const bool repeatable = option.get_expected_max() > 1;
  try {
    if (repeatable && list != nullptr) {
      for (const toml::node& entry : *list) {
        option.add_result(as_word(entry, place));
      }
    } else {
      require_input(list == nullptr, "{}: expected a single value, got a list", place);
      option.add_result(as_word(node, place));
    }
    option.run_callback();
  } catch (const CLI::Error& error) {
    fail_input("{}: {}", place, error.what());
  }
}

}  // namespace

void apply_toml(CLI::App& app, const std::string& path) {
  toml::table table;
  try {
    table = toml::parse_file(path);
  } catch (const toml::parse_error& error) {
    fail_input("{}: line {}: {}", path, error.source().begin.line, error.description());
  }
  for (const auto& [key, node] : table) {
    const std::string name(key.str());
    const std::string place =
        fmt::format("{}: line {}: key '{}'", path, node.source().begin.line, name);
    CLI::Option* option = find_option(app, name);
    require_input(option != nullptr, "{} is unknown, expected one of: {}", place, known_keys(app));
    if (option->count() == 0) {  // the command line wins
      apply_entry(*option, node, place);
    }
  }
}

}  // namespace kdtree
