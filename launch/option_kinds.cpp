#include "option_kinds.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <string_view>

#include "core/check.h"

namespace kdtree {

namespace {

std::vector<std::string> split_at_commas(const std::string& text) {
  std::vector<std::string> words;
  std::size_t begin = 0;
  while (true) {
    const std::size_t comma = text.find(',', begin);
    words.push_back(text.substr(begin, comma - begin));
    if (comma == std::string::npos) {
      return words;
    }
    begin = comma + 1;
  }
}

}  // namespace

void add_path(CLI::App& app, const std::string& flag, std::string& value, const std::string& help) {
  app.add_option(flag, value, help)->type_name("PATH");
}

void add_choice(CLI::App& app, const std::string& flag, std::string& value,
                const std::vector<std::string>& choices, const std::string& help) {
  CLI::IsMember check(choices);
  check.description("");  // the choices are the type already
  app.add_option(flag, value, fmt::format("{} (default {})", help, value))
      ->check(check)
      ->type_name(fmt::format("{}", fmt::join(choices, "|")));
}

void add_count(CLI::App& app, const std::string& flag, std::int64_t& value, CLI::Range range,
               const std::string& help) {
  range.description("");
  app.add_option(flag, value, fmt::format("{} (default {})", help, value))
      ->check(range)
      ->type_name(kNumberType);
}

void add_share(CLI::App& app, const std::string& flag, double& value, const std::string& help) {
  const CLI::Validator check(
      [](std::string& word) {
        double share = 0;
        const bool number = CLI::detail::lexical_cast(word, share);
        return number && share > 0 && share <= 1
                   ? std::string()
                   : fmt::format("'{}' is no number above 0 up to 1", word);
      },
      "");
  app.add_option(flag, value, help)->check(check)->type_name(kRealType);
}

std::vector<std::int64_t> parse_number_list(const std::string& flag, const std::string& text,
                                            std::int64_t low, std::int64_t high) {
  std::vector<std::int64_t> numbers;
  for (const std::string& word : split_at_commas(text)) {
    std::int64_t number = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), number);
    require_input(
        error == std::errc() && end == word.data() + word.size() && number >= low && number <= high,
        "{}: '{}' in '{}', expected whole numbers from {} to {} with commas between "
        "them, as 1,2,4",
        flag, word, text, low, high);
    numbers.push_back(number);
  }
  return numbers;
}

std::vector<std::string> parse_name_list(const std::string& flag, const std::string& text,
                                         const std::vector<std::string>& choices) {
  if (text.empty()) {
    return {};
  }
  std::vector<std::string> names = split_at_commas(text);
  for (const std::string& name : names) {
    require_input(std::find(choices.begin(), choices.end(), name) != choices.end(),
                  "{}: unknown name '{}', expected a list of: {}", flag, name,
                  fmt::join(choices, ", "));
  }
  return names;
}

}  // namespace kdtree
