// The kinds of options that the subcommands have; help and errors are alike for all of a kind.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace kdtree {

// Type name of options that take a whole number; apply_toml knows them by it.
inline constexpr const char* kNumberType = "N";
// Of options that take any number.
inline constexpr const char* kRealType = "SHARE";
inline constexpr const char* kAmountType = "GB";
// Of options that take a number or the word auto.
inline constexpr const char* kAutoOrRealType = "auto|REAL";

// The largest count that any option takes.
inline constexpr std::int64_t kUnbounded = std::numeric_limits<std::int32_t>::max();

// `value` holds the default and receives the option's value; it outlives `app`.
void add_path(CLI::App& app, const std::string& flag, std::string& value, const std::string& help);
void add_choice(CLI::App& app, const std::string& flag, std::string& value,
                const std::vector<std::string>& choices, const std::string& help);
void add_count(CLI::App& app, const std::string& flag, std::int64_t& value, CLI::Range range,
               const std::string& help);
// A number above 0 up to 1; the default 0 stands for "not given".
void add_share(CLI::App& app, const std::string& flag, double& value, const std::string& help);

// A number of GB above 0 up to a million; the default 0 stands for "not given".
void add_amount(CLI::App& app, const std::string& flag, double& value, const std::string& help);

// The word auto, or a number above 0 up to 100.
void add_auto_or_factor(CLI::App& app, const std::string& flag, std::string& value,
                        const std::string& help);

// The whole numbers of "1,2,4", each within [low, high]. InputError names flag, value and what was
// expected.
std::vector<std::int64_t> parse_number_list(const std::string& flag, const std::string& text,
                                            std::int64_t low, std::int64_t high);
// The words of "a,b", each one of `choices`; none for an empty text. InputError as above.
std::vector<std::string> parse_name_list(const std::string& flag, const std::string& text,
                                         const std::vector<std::string>& choices);

}  // namespace kdtree
