// The flags of kdtree convert.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

namespace kdtree {

struct ConvertCommand {
  std::string model;
  std::string draft;
  std::string output;
  std::string quantize;
  std::int64_t group_size = 32;
  bool keep_originals = false;
  std::int64_t shard_for = 0;  // 0: not
  bool overwrite = false;
  std::int64_t threads = 0;  // 0: the host's cores
  std::string output_format = "text";

  // InputError for flags that are missing or do not go together.
  void check() const;
};

void add_convert_options(CLI::App& app, ConvertCommand& command);

}  // namespace kdtree
