// Files: positioned reads that several threads may share, and writes that appear whole or not at
// all.
#pragma once

#include <cstdint>
#include <string>

namespace kdtree {

// A file open for reading.
class InputFile {
 public:
  // InputError if it cannot be opened or is not a regular file.
  explicit InputFile(std::string path);
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;
  ~InputFile();

  const std::string& path() const { return path_; }
  std::int64_t size() const { return size_; }
  // Fills target[0, bytes) from `offset`. Safe from several threads. InputError if the file ends
  // before that or cannot be read.
  void read(std::int64_t offset, std::int64_t bytes, void* target) const;

 private:
  std::string path_;
  int descriptor_ = -1;
  std::int64_t size_ = 0;
};

// A file that is written under a temporary name beside its place and takes its own in finish();
// without finish() nothing is left behind.
class OutputFile {
 public:
  // Error if the temporary file cannot be made.
  explicit OutputFile(std::string path);
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  ~OutputFile();

  // Writes at `offset`; what lies between writes is zero. Error if that fails.
  void write(std::int64_t offset, const void* data, std::int64_t bytes);
  // Cuts or extends with zeros to `bytes`, flushes to the disk and renames.
  void finish(std::int64_t bytes);

 private:
  std::string path_;
  std::string temporary_;
  int descriptor_ = -1;
};

}  // namespace kdtree
