// Encodes texts for bench_tokenizer.py, and times nothing else.
//   usage: kdtree_encode_texts TOKENIZER
// A line of stdin is the path of a file: documents, separated by zero bytes. Their ids (int32, one
// document after the other) go to the file PATH.ids, and a line to stdout: the nanoseconds of
// processor time that the encoding took.
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "core/check.h"
#include "text/tokenizer.h"

namespace {

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  kdtree::require_input(file.good(), "{}: cannot be read", path);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::vector<std::string_view> documents_of(std::string_view content) {
  std::vector<std::string_view> documents;
  std::size_t begin = 0;
  for (std::size_t end = content.find('\0'); end != std::string_view::npos;
       end = content.find('\0', begin)) {
    documents.push_back(content.substr(begin, end - begin));
    begin = end + 1;
  }
  documents.push_back(content.substr(begin));
  return documents;
}

// Of all threads. On a machine that others use too, a wall clock would time them as well.
std::int64_t processor_ns() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return std::int64_t{1'000'000'000} * now.tv_sec + now.tv_nsec;
}

std::int64_t encode_file(const kdtree::Tokenizer& tokenizer, const std::string& path) {
  const std::string content = read_file(path);
  const std::vector<std::string_view> documents = documents_of(content);
  std::vector<std::vector<std::int32_t>> ids;
  ids.reserve(documents.size());
  const std::int64_t start = processor_ns();
  for (const std::string_view document : documents) {
    ids.push_back(tokenizer.encode(document, true));
  }
  const std::int64_t elapsed = processor_ns() - start;
  std::ofstream out(path + ".ids", std::ios::binary);
  for (const auto& document : ids) {
    out.write(reinterpret_cast<const char*>(document.data()),
              static_cast<std::streamsize>(document.size() * sizeof(std::int32_t)));
  }
  out.close();
  kdtree::require_input(out.good(), "{}.ids: cannot be written", path);
  return elapsed;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    kdtree::require_input(argc == 2, "usage: kdtree_encode_texts TOKENIZER");
    const kdtree::Tokenizer tokenizer = kdtree::load_tokenizer(argv[1]);
    for (std::string path; std::getline(std::cin, path);) {
      std::cout << encode_file(tokenizer, path) << std::endl;  // flushed: the caller waits for it
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kdtree_encode_texts: error: %s\n", error.what());
    return 1;
  }
  return 0;
}
