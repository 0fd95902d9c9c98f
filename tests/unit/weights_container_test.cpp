// The two containers: what they write they read, and no damaged header gets through or crashes.
#include <gtest/gtest.h>
#include <xxhash.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "core/check.h"
#include "tests/unit/checkpoint_builder.h"
#include "tests/unit/weights_test_support.h"
#include "weights/kdtr.h"
#include "weights/safetensors.h"

namespace kdtree {
namespace {

using Json = nlohmann::json;

std::string safetensors_file(const std::string& header, const std::string& data) {
  const std::uint64_t bytes = header.size();
  std::string file(sizeof(bytes), '\0');
  std::memcpy(file.data(), &bytes, sizeof(bytes));
  return file + header + data;
}

// A bundle around `header`, with its checksum right.
std::string kdtr_file(const std::string& header, const std::string& data) {
  std::string file = "KDTR";
  const auto append = [&file](auto value) {
    file.append(reinterpret_cast<const char*>(&value), sizeof(value));
  };
  append(std::uint32_t{1});
  append(static_cast<std::uint64_t>(header.size()));
  append(static_cast<std::uint64_t>(XXH3_64bits(header.data(), header.size())));
  append(std::uint64_t{0});
  file += header;
  file.resize((file.size() + 4095) / 4096 * 4096);
  return file + data;
}

std::vector<BuiltTensor> sample_tensors() {
  std::vector<BuiltTensor> tensors = {{{"b", DType::kFloat32, {2, 3}}, {}},
                                      {{"a", DType::kBFloat16, {5}}, {}},
                                      {{"empty", DType::kInt32, {0, 7}}, {}},
                                      {{"scalar", DType::kUInt8, Shape()}, {}},
                                      {{"large", DType::kInt64, {70, 130}}, {}}};
  std::uint8_t value = 1;
  for (BuiltTensor& tensor : tensors) {
    tensor.data.resize(static_cast<std::size_t>(tensor.info.bytes()));
    for (std::byte& byte : tensor.data) {
      byte = static_cast<std::byte>(value = static_cast<std::uint8_t>(value * 5 + 1));
    }
  }
  return tensors;
}

void expect_same(const RawTable& table, const std::string& file_content) {
  const std::vector<BuiltTensor> tensors = sample_tensors();
  ASSERT_EQ(table.size(), tensors.size());
  for (const BuiltTensor& tensor : tensors) {
    const RawTensor& raw = table.at(tensor.info.name);
    EXPECT_EQ(raw.dtype, dtype_name(tensor.info.dtype));
    EXPECT_EQ(raw.bytes, tensor.info.bytes());
    EXPECT_EQ(Shape(std::span<const std::int64_t>(raw.shape)), tensor.info.shape);
    EXPECT_EQ(file_content.substr(static_cast<std::size_t>(raw.file_offset), tensor.data.size()),
              std::string(reinterpret_cast<const char*>(tensor.data.data()), tensor.data.size()));
    if (raw.checksum) {
      EXPECT_EQ(*raw.checksum, XXH3_64bits(tensor.data.data(), tensor.data.size()));
    }
  }
}

TEST(WeightsSafetensors, ReadsWhatItWrites) {
  const TemporaryFolder folder;
  const std::string path = folder / "model.safetensors";
  write_built_safetensors(sample_tensors(), path);
  expect_same(read_safetensors_header(path), read_file(path));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder / ""), {}), 1);
}

TEST(WeightsSafetensors, RefusesDamagedHeaders) {
  const TemporaryFolder folder;
  const std::string path = folder / "bad.safetensors";
  const auto refused = [&path](const std::string& content, const std::string& part) {
    write_file(path, content);
    expect_input_error([&path] { read_safetensors_header(path); }, {path, part});
  };
  const std::string data(8, 'x');
  refused("1234", "too few");
  refused(std::string(8, '\xff') + "{}", "safetensors allows 100000000");
  refused(safetensors_file("{}", "").substr(0, 9), "truncated");
  refused(safetensors_file("[]", ""), "does not begin with '{'");
  refused(safetensors_file(R"({"a": 1})", ""), "expected an object");
  refused(safetensors_file(R"({"a":)", ""), "not valid JSON");
  const auto entry = [](const std::string& fields) { return "{\"a\": {" + fields + "}}"; };
  const std::string good = R"("dtype": "F32", "shape": [2], "data_offsets": [0, 8])";
  write_file(path, safetensors_file(entry(good), data));
  EXPECT_EQ(read_safetensors_header(path).size(), 1U);
  refused(safetensors_file(entry(good), data + "y"), "something follows");
  refused(safetensors_file(entry(good), "x"), "truncated: expected");
  refused(safetensors_file("{\"a\": {" + good + "}, \"a\": {" + good + "}}", data), "twice");
  refused(safetensors_file(entry(R"("shape": [2], "data_offsets": [0, 8])"), data), "dtype");
  refused(safetensors_file(entry(R"("dtype": "F99", "shape": [2], "data_offsets": [0, 8])"), data),
          "unknown dtype \"F99\"");
  refused(safetensors_file(entry(R"("dtype": "F32", "shape": [3], "data_offsets": [0, 8])"), data),
          "takes 12");
  refused(safetensors_file(entry(R"("dtype": "F32", "shape": [-2], "data_offsets": [0, 8])"), data),
          "is -2");
  refused(safetensors_file(entry(R"("dtype": "F32", "shape": 2, "data_offsets": [0, 8])"), data),
          "expected a list");
  refused(safetensors_file(entry(R"("dtype": "F32", "shape": [4294967296, 4294967296, 4294967296],)"
                                 R"("data_offsets": [0, 8])"),
                           data),
          "more than any file");
  refused(safetensors_file(entry(R"("dtype": "F32", "shape": [2], "data_offsets": [8, 0])"), data),
          "backwards");
  refused(safetensors_file(entry(R"("dtype": "F32", "shape": [2], "data_offsets": [0])"), data),
          "[begin, end]");
  refused(
      safetensors_file(entry(R"("dtype": "F32", "shape": [2], "data_offsets": [0, 1e30])"), data),
      "data_offsets[1]");
  refused(safetensors_file(entry(R"("dtype": "F32", "shape": [1], "data_offsets": [4, 8])"), data),
          "no gaps");
  refused(safetensors_file(R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},)"
                           R"( "b": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}})",
                           data),
          "inside the one before");
  refused(safetensors_file(R"({"__metadata__": {"format": 3}})", ""), "strings only");
  expect_input_error([] { read_safetensors_header("/nonexistent/x"); }, {"/nonexistent/x"});
}

TEST(WeightsKdtr, ReadsWhatItWrites) {
  const TemporaryFolder folder;
  const std::string path = folder / "model.kdtr";
  write_built_bundle({{"target", {{"config", {{"k", 1}}}}}, {"goldens", {1, 2}}}, sample_tensors(),
                     path);
  const KdtrHeader header = read_kdtr_header(path);
  EXPECT_EQ(header.json, Json::parse(R"({"target": {"config": {"k": 1}}, "goldens": [1, 2]})"));
  expect_same(header.tensors, read_file(path));
  for (const auto& [name, raw] : header.tensors) {
    EXPECT_EQ(raw.file_offset % (raw.bytes >= 65536 ? 4096 : 64), 0) << name;
  }
}

TEST(WeightsKdtr, NamesAreUnique) {
  const OutputTensor tensor = output_tensor("a", DType::kFloat32, {1});
  EXPECT_THROW(kdtr_layout(Json::object(), {tensor, tensor}), Error);
}

TEST(WeightsKdtr, RefusesDamagedHeaders) {
  const TemporaryFolder folder;
  const std::string path = folder / "bad.kdtr";
  const auto refused = [&path](const std::string& content, const std::string& part) {
    write_file(path, content);
    expect_input_error([&path] { read_kdtr_header(path); }, {path, part});
  };
  const std::string good = kdtr_file(R"({"tensors": {}})", "");
  write_file(path, good);
  EXPECT_TRUE(read_kdtr_header(path).tensors.empty());

  refused("", "begins with ''");
  refused("GGUF" + good.substr(4), "begins with 'GGUF', expected 'KDTR'");
  refused(std::string("\x80\x02KD", 4) + good.substr(4), "'\\x80\\x02KD'");
  refused(good.substr(0, 20), "truncated: 20 bytes");
  refused(good.substr(0, 40), "truncated: the header ends at byte 47");
  refused(good.substr(0, 4000), "truncated: expected 4096 bytes, the file has 4000");
  refused(good + "x", "expected 4096 bytes, the file has 4097");
  std::string changed = good;
  changed[4] = 2;
  refused(changed, "format version 2; this program reads up to 1");
  changed = good;
  changed[24] = 1;
  refused(changed, "bytes 24 to 31");
  changed = good;
  changed[14] = 1;
  refused(changed, "header of");
  changed = good;
  changed[33] = ' ';
  refused(changed, "header checksum");
  refused(kdtr_file("[1]", ""), "not a JSON object");
  refused(kdtr_file("{}", ""), "no tensor table");
  refused(kdtr_file(R"({"tensors": []})", ""), "no tensor table");
  refused(kdtr_file(R"({"tensors": {"a": {}, "a": {}}})", ""), "twice");
}

TEST(WeightsKdtr, RefusesDamagedTables) {
  const TemporaryFolder folder;
  const std::string path = folder / "bad.kdtr";
  const Json entry = {{"dtype", "F32"},
                      {"shape", {2}},
                      {"offset", 0},
                      {"bytes", 8},
                      {"checksum", "0123456789abcdef"}};
  const auto file_with = [&](const Json& tensors) {
    write_file(path, kdtr_file(Json({{"tensors", tensors}}).dump(), "12345678"));
  };
  const auto refused = [&](const char* key, const Json& value, const std::string& part) {
    Json changed = entry;
    changed[key] = value;
    file_with({{"some.name", changed}});
    expect_input_error([&path] { read_kdtr_header(path); }, {path, "some.name", part});
  };
  file_with({{"some.name", entry}});
  EXPECT_EQ(read_kdtr_header(path).tensors.at("some.name").checksum, 0x0123456789abcdefULL);
  refused("dtype", "F99", "unknown dtype");
  refused("dtype", 3, "expected a string");
  refused("shape", {3}, "takes 12");
  refused("shape", nullptr, "expected a list");
  refused("shape", {1ULL << 60, 1ULL << 60}, "more than any file");
  refused("bytes", 12, "holds 12 bytes");
  refused("bytes", -8, "is -8");
  refused("slice", 7, "slice is 7");
  refused("slice", {{"of", {4, 4}}}, "expected \"of\"");
  refused("slice", {{"of", {4, 4}}, {"first", {0, 0}}}, "with 1 dimensions");
  refused("offset", 8, "not a multiple of 64");
  refused("offset", 1ULL << 63, "expected an integer");
  refused("checksum", "0123", "16 lower-case hexadecimal digits");
  refused("checksum", "0123456789ABCDEF", "16 lower-case hexadecimal digits");
  refused("checksum", 7, "expected a string");
  Json changed = entry;
  changed["offset"] = 64;
  file_with({{"some.name", changed}});
  expect_input_error([&path] { read_kdtr_header(path); }, {path, "truncated: expected"});
  file_with({{"some.name", entry}, {"some.other", entry}});
  expect_input_error([&path] { read_kdtr_header(path); }, {path, "inside the one before"});
}

// Flips, overwrites and truncates: the readers answer or throw InputError, nothing else.
void mutate(const std::string& content, std::size_t header_bytes, const std::string& path,
            const std::function<void()>& open) {
  constexpr int kMutations = 700;
  std::mt19937_64 random(7);
  std::string alphabet = "{}[]\",:0123456789-eE.truefalsn\\\xff\x80 ";
  alphabet.push_back('\0');
  int num_accepted = 0;
  for (int mutation = 0; mutation < kMutations; ++mutation) {
    std::string changed = content;
    const std::uint64_t kind = random() % 8;
    const std::size_t num_changes = 1 + random() % 3;
    for (std::size_t change = 0; change < num_changes; ++change) {
      const std::size_t place = random() % std::min(changed.size(), header_bytes);
      if (kind < 4) {
        changed[place] = static_cast<char>(changed[place] ^ (1 << (random() % 8)));
      } else {
        changed[place] = alphabet[random() % alphabet.size()];
      }
    }
    if (kind == 3 || kind == 7) {
      changed.resize(random() % changed.size());
    }
    // So that damaged JSON gets past the bundle's checksum of it.
    if (changed.starts_with("KDTR") && changed.size() > 32) {
      std::uint64_t bytes = 0;
      std::memcpy(&bytes, changed.data() + 8, sizeof(bytes));
      if (bytes <= changed.size() - 32) {
        const std::uint64_t checksum = XXH3_64bits(changed.data() + 32, bytes);
        std::memcpy(changed.data() + 16, &checksum, sizeof(checksum));
      }
    }
    write_file(path, changed);
    try {
      open();
      ++num_accepted;
    } catch (const InputError& error) {
      ASSERT_NE(std::string(error.what()).find(path), std::string::npos) << error.what();
    }
  }
  // Some changes are harmless (a digit of a checksum, a letter of a name).
  EXPECT_LT(num_accepted, kMutations / 2);
}

TEST(WeightsKdtr, SurvivesMutations) {
  const TemporaryFolder folder;
  const std::string path = folder / "model.kdtr";
  write_built_bundle({{"target", {{"config", Json::object()}}}}, sample_tensors(), path);
  mutate(read_file(path), 32 + 600, path, [&path] { read_kdtr_header(path); });
}

TEST(WeightsKdtr, OpenTargetSurvivesMutations) {
  const TemporaryFolder folder;
  const std::string path = folder / "model.kdtr";
  ModelConfig config = tiny_target();
  config.n_routed_experts = 0;
  config.num_hidden_layers = 1;
  write_bundle({.target = config}, path);
  mutate(read_file(path), 5000, path, [&path] { open_target(path); });
}

TEST(WeightsSafetensors, SurvivesMutations) {
  const TemporaryFolder folder;
  const std::string path = folder / "model.safetensors";
  write_built_safetensors(sample_tensors(), path);
  mutate(read_file(path), 8 + 400, path, [&path] { read_safetensors_header(path); });
}

}  // namespace
}  // namespace kdtree
