// Errors. Two kinds:
//   InputError  something that the user gave is wrong (a file, a key, a flag): the message names
//   the file, key and
//               value and says what was expected; no source location, because it is not the
//               program's fault.
//   Error       anything else (a broken invariant, a failed system or library call): carries the
//   place in the source.
// Nobody ends the process below launch: errors travel as exceptions, and launch prints them and
// ends every rank.
#pragma once

#include <fmt/format.h>

#include <source_location>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace kdtree {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class InputError : public Error {
 public:
  using Error::Error;
};

// A format string that remembers where it was written.
template <class... Args>
struct LocatedFormat {
  template <class Text>
  // NOLINTNEXTLINE(google-explicit-constructor): made implicitly from a literal at the call
  consteval LocatedFormat(const Text& text,
                          std::source_location where = std::source_location::current())
      : format(text), location(where) {}
  fmt::format_string<Args...> format;
  std::source_location location;
};

template <class... Args>
[[noreturn]] void fail(LocatedFormat<std::type_identity_t<Args>...> text, Args&&... args) {
  throw Error(fmt::format("{} [{}:{}]", fmt::format(text.format, std::forward<Args>(args)...),
                          text.location.file_name(), text.location.line()));
}

// Throws Error unless `condition` holds. For invariants; never for what a user can get wrong.
template <class... Args>
void check(bool condition, LocatedFormat<std::type_identity_t<Args>...> text, Args&&... args) {
  if (!condition) {
    fail<Args...>(text, std::forward<Args>(args)...);
  }
}

template <class... Args>
[[noreturn]] void fail_input(fmt::format_string<Args...> text, Args&&... args) {
  throw InputError(fmt::format(text, std::forward<Args>(args)...));
}

// Throws InputError unless `condition` holds.
template <class... Args>
void require_input(bool condition, fmt::format_string<Args...> text, Args&&... args) {
  if (!condition) {
    throw InputError(fmt::format(text, std::forward<Args>(args)...));
  }
}

}  // namespace kdtree
