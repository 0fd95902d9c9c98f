// Files: positioned reads and writes that several threads may share.
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
  // Tells the system that the file is read from front to back, so that it reads further ahead.
  void expect_sequential_reads() const;
  // Has the system begin to read [offset, offset + bytes) into its cache, without waiting for it.
  void will_need(std::int64_t offset, std::int64_t bytes) const;

 private:
  std::string path_;
  int descriptor_ = -1;
  std::int64_t size_ = 0;
};

// A file open for writing, and for reading back what was written.
class OutputFile {
 public:
  // Keeps what is there already. Error if it cannot be opened or made.
  explicit OutputFile(std::string path);
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  ~OutputFile();

  const std::string& path() const { return path_; }
  std::int64_t size() const;
  // Writes at `offset`; what lies between writes is zero. Safe from several threads. Error if that
  // fails.
  void write(std::int64_t offset, const void* data, std::int64_t bytes);
  // Cuts or extends with zeros to `bytes`.
  void resize(std::int64_t bytes);
  // Flushes to the disk.
  void sync();
  // For this process alone, as long as the file is open; false if another one has it.
  bool lock();

 private:
  std::string path_;
  int descriptor_ = -1;
};

}  // namespace kdtree
