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

// The files of a directory.
ModelFileFinder files_in(const std::filesystem::path& folder) {
  return [folder](const std::string& name) -> std::optional<NamedText> {
    // A link that leads nowhere is an error of its own, not an absent file.
    std::error_code ignored;
    const auto status = std::filesystem::symlink_status(folder / name, ignored);
    if (!std::filesystem::exists(status)) {
      return std::nullopt;
    }
    return read_named_text(folder / name);
  };
}

}  // namespace

Tokenizer load_tokenizer(const ModelFileFinder& find, const std::string& origin) {
  if (const auto ranks = find("tiktoken.model")) {
    const auto config = find("tokenizer_config.json");
    require_input(config.has_value(),
                  "{}: no tokenizer_config.json, expected beside tiktoken.model", origin);
    return parse_tiktoken(*ranks, *config);
  }
  const auto file = find("tokenizer.json");
  require_input(file.has_value(),
                "{}: no tokenizer, expected tiktoken.model or tokenizer.json in it", origin);
  return parse_tokenizer_json(*file);
}

Tokenizer load_tokenizer(const std::string& path) {
  const std::filesystem::path folder = path;
  std::error_code ignored;
  require_input(std::filesystem::exists(folder, ignored), "{}: no such file or directory", path);
  if (std::filesystem::is_directory(folder, ignored)) {
    return load_tokenizer(files_in(folder), path);
  }
  return folder.extension() == ".model"
             ? parse_tiktoken(read_named_text(folder),
                              read_named_text(folder.parent_path() / "tokenizer_config.json"))
             : parse_tokenizer_json(read_named_text(folder));
}

std::string load_bos_text(const ModelFileFinder& find) {
  const auto file = find("tokenizer_config.json");
  if (!file) {
    return "";
  }
  const nlohmann::json json = parse_json(file->content, file->origin);
  const JsonPlace config(json, file->origin);
  if (!config.flag_or("add_bos_token", false)) {
    return "";
  }
  const JsonPlace token = config.at("bos_token", "the token that add_bos_token asks for");
  return token.value().is_object() ? token.at("content", "the text of the token").text()
                                   : token.text();
}

std::string load_bos_text(const std::string& path) {
  std::error_code ignored;
  const std::filesystem::path place = path;
  return load_bos_text(
      files_in(std::filesystem::is_directory(place, ignored) ? place : place.parent_path()));
}

}  // namespace kdtree
