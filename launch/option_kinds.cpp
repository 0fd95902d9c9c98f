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

// A number above 0 up to `most`.
CLI::Validator positive_up_to(double most) {
  return {[most](std::string& word) {
            double number = 0;
            const bool good =
                CLI::detail::lexical_cast(word, number) && number > 0 && number <= most;
            return good ? std::string()
                        : fmt::format("'{}' is no number above 0 up to {:.0f}", word, most);
          },
          ""};
}

}  // namespace

void add_path(CLI::App& app, const std::string& flag, std::string& value, const std::string& help) {
  app.add_option(flag, value, help)->type_name("PATH");
}

void add_choice(CLI::App& app, const std::string& flag, std::string& value,
                const std::vector<std::string>& choices, const std::string& help) {
  CLI::IsMember check(choices);
  check.description("");  // the choices are the type already
  app.add_option(flag, value, fmt::format("{} (default {})", help, value.empty() ? "none" : value))
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
  app.add_option(flag, value, help)->check(positive_up_to(1))->type_name(kRealType);
}

void add_amount(CLI::App& app, const std::string& flag, double& value, const std::string& help) {
  app.add_option(flag, value, help)->check(positive_up_to(1'000'000))->type_name(kAmountType);
}

void add_auto_or_factor(CLI::App& app, const std::string& flag, std::string& value,
                        const std::string& help) {
  const CLI::Validator number = positive_up_to(100);
  const CLI::Validator check(
      [number](std::string& word) { return word == "auto" ? std::string() : number(word); }, "");
  app.add_option(flag, value, fmt::format("{} (default {})", help, value))
      ->check(check)
      ->type_name(kAutoOrRealType);
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
