#include <cstdint>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "core/check.h"
#include "core/json_text.h"
#include "text/json_place.h"
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

Tokenizer load_tokenizer(const std::string& path) {
  const std::filesystem::path folder = path;
  std::error_code ignored;
  require_input(std::filesystem::exists(folder, ignored), "{}: no such file or directory", path);
  if (!std::filesystem::is_directory(folder, ignored)) {
    return folder.extension() == ".model"
               ? parse_tiktoken(read_named_text(folder),
                                read_named_text(folder.parent_path() / "tokenizer_config.json"))
               : parse_tokenizer_json(read_named_text(folder));
  }
  if (std::filesystem::exists(folder / "tiktoken.model", ignored)) {
    return parse_tiktoken(read_named_text(folder / "tiktoken.model"),
                          read_named_text(folder / "tokenizer_config.json"));
  }
  require_input(std::filesystem::exists(folder / "tokenizer.json", ignored),
                "{}: no tokenizer, expected tiktoken.model or tokenizer.json in it", path);
  return parse_tokenizer_json(read_named_text(folder / "tokenizer.json"));
}

std::string load_bos_text(const std::string& path) {
  std::error_code ignored;
  const std::filesystem::path place = path;
  const std::filesystem::path file =
      (std::filesystem::is_directory(place, ignored) ? place : place.parent_path()) /
      "tokenizer_config.json";
  if (!std::filesystem::exists(file, ignored)) {
    return "";
  }
  const std::string origin = file.string();
  const nlohmann::json json = read_json_file(origin);
  const JsonPlace config(json, origin);
  if (!config.flag_or("add_bos_token", false)) {
    return "";
  }
  const JsonPlace token = config.at("bos_token", "the token that add_bos_token asks for");
  return token.value().is_object() ? token.at("content", "the text of the token").text()
                                   : token.text();
}

}  // namespace kdtree
