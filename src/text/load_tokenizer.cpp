#include <cstdint>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "core/check.h"
#include "text/tokenizer.h"

namespace kdtree {

namespace {

// Published ones have some 10 MB.
constexpr std::uintmax_t kMaxFileBytes = std::uintmax_t{256} << 20U;

NamedText read_named_text(const std::filesystem::path& path) {
  std::error_code status;
  const std::uintmax_t bytes = std::filesystem::file_size(path, status);
  require_input(!status, "{}: {}", path.string(), status.message());
  require_input(bytes <= kMaxFileBytes, "{}: {} bytes, expected at most {}", path.string(), bytes,
                kMaxFileBytes);
  NamedText file = {path.string(), std::string(static_cast<std::size_t>(bytes), '\0')};
  std::ifstream stream(path, std::ios::binary);
  require_input(
      stream.good() && stream.read(file.content.data(), static_cast<std::streamsize>(bytes)).good(),
      "{}: cannot be read", path.string());
  return file;
}

}  // namespace

Tokenizer load_tokenizer(const std::string& directory) {
  const std::filesystem::path folder = directory;
  std::error_code ignored;
  if (std::filesystem::exists(folder / "tiktoken.model", ignored)) {
    return parse_tiktoken(read_named_text(folder / "tiktoken.model"),
                          read_named_text(folder / "tokenizer_config.json"));
  }
  require_input(std::filesystem::exists(folder / "tokenizer.json", ignored),
                "{}: no tokenizer, expected tiktoken.model or tokenizer.json in it", directory);
  return parse_tokenizer_json(read_named_text(folder / "tokenizer.json"));
}

}  // namespace kdtree
