#include "weights/partial_output.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>

#include "core/check.h"
#include "core/log.h"
#include "weights/container.h"

namespace kdtree {

namespace {

namespace fs = std::filesystem;

constexpr const char* kJournalName = "convert.journal";

std::string in_folder(const std::string& folder, const std::string& name) {
  return (fs::path(folder) / name).string();
}

// Makes renames in `folder` last.
void sync_folder(const fs::path& folder) {
  const std::string path = folder.empty() ? "." : folder.string();
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  check(descriptor >= 0, "{}: {}", path, std::strerror(errno));
  // Not every file system can; the rename is there all the same.
  static_cast<void>(::fsync(descriptor));
  ::close(descriptor);
}

// The first thing in a directory that no checkpoint has; empty if there is none.
std::string strange_entry(const fs::path& directory) {
  static constexpr std::array<std::string_view, 7> kEndings = {
      ".safetensors", ".json", ".kdtr", ".model", ".jinja", ".journal", ".txt"};
  for (const auto& entry : fs::directory_iterator(directory)) {
    const std::string name = entry.path().filename().string();
    if (entry.is_directory() && name == kDrafterFolder) {
      if (std::string inner = strange_entry(entry.path()); !inner.empty()) {
        return inner;
      }
      continue;
    }
    const bool known = std::any_of(kEndings.begin(), kEndings.end(),
                                   [&name](std::string_view end) { return name.ends_with(end); });
    if (!entry.is_regular_file() || !known) {
      return entry.path().string();
    }
  }
  return "";
}

void check_place(const OutputPlan& plan) {
  std::error_code ignored;
  const fs::path path = plan.path;
  const fs::file_status found = fs::status(path, ignored);
  if (!fs::exists(found)) {
    return;
  }
  require_input(plan.overwrite, "{}: exists already: give --overwrite to replace it", plan.path);
  require_input(fs::is_directory(found) == plan.is_directory,
                "{}: is {} and would become {}: remove it first", plan.path,
                plan.is_directory ? "a file" : "a directory",
                plan.is_directory ? "a directory" : "a file");
  if (plan.is_directory) {
    const std::string strange = strange_entry(path);
    require_input(strange.empty(),
                  "{}: is in the directory that would be replaced: remove it first", strange);
  }
}

void check_room(const OutputPlan& plan, const std::string& folder) {
  std::int64_t written = 0;
  for (const std::string& name : plan.files) {
    std::error_code error;
    const auto bytes = fs::file_size(in_folder(folder, name), error);
    written += error ? 0 : static_cast<std::int64_t>(bytes);
  }
  std::error_code error;
  const fs::space_info space = fs::space(folder, error);
  const std::int64_t missing = plan.bytes - written;
  require_input(error || missing <= static_cast<std::int64_t>(space.available),
                "{}: {:.1f} GB are to be written, its disk has room for {:.1f} GB", plan.path,
                static_cast<double>(missing) / 1e9, static_cast<double>(space.available) / 1e9);
}

}  // namespace

PartialOutput::PartialOutput(OutputPlan plan) : plan_(std::move(plan)) {
  fs::path place = fs::path(plan_.path);
  if (!place.has_filename()) {
    place = place.parent_path();  // "model/"
  }
  plan_.path = place.string();
  folder_ = plan_.path + ".partial";
  check_place(plan_);
  prepare_folder();
  check_room(plan_, folder_);
  for (const std::string& name : plan_.files) {
    fs::create_directories(fs::path(in_folder(folder_, name)).parent_path());
    files_.push_back(std::make_unique<OutputFile>(in_folder(folder_, name)));
  }
}

void PartialOutput::prepare_folder() {
  std::error_code error;
  if (fs::exists(folder_)) {
    const bool ours = fs::is_directory(folder_) &&
                      (fs::exists(in_folder(folder_, kJournalName)) || fs::is_empty(folder_));
    require_input(ours, "{}: is in the way, and no interrupted conversion: remove it", folder_);
  }
  fs::create_directory(folder_, error);
  require_input(!error, "{}: cannot be made: {}", folder_, error.message());
  journal_ = std::make_unique<OutputFile>(in_folder(folder_, kJournalName));
  require_input(journal_->lock(), "{}: another conversion is at work there", folder_);
  read_journal();
  if (journal_bytes_ == 0) {
    for (const auto& entry : fs::directory_iterator(folder_)) {
      if (entry.path().filename() != kJournalName) {
        fs::remove_all(entry.path());
      }
    }
    journal_->resize(0);
    const std::string line = nlohmann::json({{"key", plan_.key}}).dump() + "\n";
    journal_->write(0, line.data(), std::ssize(line));
    journal_bytes_ = std::ssize(line);
  }
}

// Takes over what an earlier run with the same key has finished; journal_bytes_ stays 0 if there is
// no such run.
void PartialOutput::read_journal() {
  const InputFile file(journal_->path());
  std::string text(static_cast<std::size_t>(file.size()), '\0');
  file.read(0, file.size(), text.data());
  std::size_t begin = 0;
  // A last line without its end was cut off while it was written.
  for (std::size_t end = text.find('\n'); end != std::string::npos; end = text.find('\n', begin)) {
    const auto line = nlohmann::json::parse(text.substr(begin, end - begin), nullptr,
                                            /*allow_exceptions=*/false);
    if (begin == 0) {
      if (!line.is_object() || line.value("key", "") != plan_.key) {
        spdlog::info("{}: an interrupted conversion of something else, starting over", folder_);
        return;
      }
    } else if (line.is_object() && line.contains("item") && line["item"].is_number_unsigned()) {
      finished_[line["item"].get<std::size_t>()] = line;
    }
    begin = end + 1;
  }
  journal_bytes_ = static_cast<std::int64_t>(begin);
}

void PartialOutput::note(std::size_t item, const nlohmann::json& facts) {
  nlohmann::json line = facts;
  line["item"] = item;
  const std::string text = line.dump() + "\n";
  const std::scoped_lock lock(mutex_);
  journal_->write(journal_bytes_, text.data(), std::ssize(text));
  journal_bytes_ += std::ssize(text);
}

void PartialOutput::write_text(const std::string& name, std::string_view content) {
  const std::string path = in_folder(folder_, name);
  fs::create_directories(fs::path(path).parent_path());
  OutputFile file(path);
  file.write(0, content.data(), std::ssize(content));
  file.resize(std::ssize(content));
  file.sync();
}

void PartialOutput::finish() {
  for (const auto& file : files_) {
    file->sync();
  }
  files_.clear();
  sync_folder(folder_);
  publish();
  sync_folder(fs::path(plan_.path).parent_path());
}

void PartialOutput::publish() {
  const auto rename = [](const std::string& from, const std::string& to, unsigned flags) {
    check(::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), flags) == 0, "{} to {}: {}",
          from, to, std::strerror(errno));
  };
  if (!plan_.is_directory) {
    rename(in_folder(folder_, plan_.files.front()), plan_.path, 0);
    fs::remove_all(folder_);
    return;
  }
  if (fs::exists(plan_.path)) {
    // Once exchanged, the old directory is what an interrupted conversion left: so it is marked.
    OutputFile mark(in_folder(plan_.path, kJournalName));
    rename(folder_, plan_.path, RENAME_EXCHANGE);
    fs::remove_all(folder_);
  } else {
    rename(folder_, plan_.path, RENAME_NOREPLACE);
  }
  fs::remove(in_folder(plan_.path, kJournalName));
}

}  // namespace kdtree
