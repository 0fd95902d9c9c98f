// Files under construction. They stand in the folder PATH.partial until all of them are whole, and
// a journal there tells a later run what an interrupted one has finished.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "weights/file.h"

namespace kdtree {

struct OutputPlan {
  std::string path;  // what comes to be
  bool is_directory = false;
  // Names in the directory, "drafter/model.safetensors" for one in a folder; or the only file.
  std::vector<std::string> files = {};
  // Of everything that the content follows from: only a run with an equal key can be continued.
  std::string key = {};
  std::int64_t bytes = 0;  // of all files
  bool overwrite = false;  // replace what is at `path`
};

class PartialOutput {
 public:
  // Makes the folder and its files, or continues with those that are there. InputError if `path`
  // exists and is not to be replaced, or is a directory with other things than a checkpoint's files
  // in it, if the folder is somebody else's or in use, or if the disk has less room than needed.
  explicit PartialOutput(OutputPlan plan);

  // What note() was told in the run that this one continues, by item. Its files may have been
  // damaged since.
  const std::map<std::size_t, nlohmann::json>& finished() const { return finished_; }
  OutputFile& file(std::size_t index) { return *files_[index]; }
  // Writes down that an item is finished. Safe from several threads.
  void note(std::size_t item, const nlohmann::json& facts);
  // A further small file of the directory.
  void write_text(const std::string& name, std::string_view content);
  // Flushes everything to the disk and gives it its name, at one stroke.
  void finish();

 private:
  void prepare_folder();
  void read_journal();
  void publish();

  OutputPlan plan_;
  std::string folder_;
  std::unique_ptr<OutputFile> journal_;
  std::int64_t journal_bytes_ = 0;
  std::mutex mutex_;
  std::map<std::size_t, nlohmann::json> finished_;
  std::vector<std::unique_ptr<OutputFile>> files_;
};

}  // namespace kdtree
