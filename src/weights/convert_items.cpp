#include "weights/convert_items.h"

#include <xxhash.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "core/check.h"
#include "core/progress.h"
#include "weights/number_formats.h"
#include "weights/quantize.h"
#include "weights/region_reader.h"

namespace kdtree {

namespace {

// What is written down of an item that is finished.
struct ItemFacts {
  std::vector<std::uint64_t> checksums;  // of its outputs
  double relative_error = 0;             // quantised ones only
  double max_abs_error = 0;
};

nlohmann::json to_json(const ItemFacts& facts) {
  return {{"checksums", facts.checksums},
          {"relative_error", facts.relative_error},
          {"max_abs_error", facts.max_abs_error}};
}

std::optional<ItemFacts> from_json(const nlohmann::json& json, std::size_t num_outputs) {
  ItemFacts facts;
  try {
    facts.checksums = json.at("checksums").get<std::vector<std::uint64_t>>();
    facts.relative_error = json.at("relative_error").get<double>();
    facts.max_abs_error = json.at("max_abs_error").get<double>();
  } catch (const nlohmann::json::exception&) {
    return std::nullopt;  // a damaged journal
  }
  return facts.checksums.size() == num_outputs ? std::optional(facts) : std::nullopt;
}

// An output that is written from its first byte to its last.
class OutputStream {
 public:
  OutputStream(OutputFile& file, std::int64_t offset) : file_(file), offset_(offset) {}

  void write(const void* data, std::int64_t bytes) {
    file_.write(offset_, data, bytes);
    offset_ += bytes;
    checksum_.add(data, bytes);
  }
  std::uint64_t checksum() const { return checksum_.value(); }

 private:
  OutputFile& file_;
  std::int64_t offset_;
  StreamingChecksum checksum_;
};

class Writer {
 public:
  Writer(std::span<const PlacedItem> items, PartialOutput& output, const WriteOptions& options)
      : items_(items),
        output_(output),
        options_(options),
        facts_(items.size()),
        progress_("converting", total_bytes(items)) {
    for (const PlacedItem& placed : items) {
      for (const StoredTensor* source : placed.item->sources()) {
        sources_.open(source);
      }
    }
  }

  ItemResults run() {
    std::vector<std::thread> threads;
    for (int i = 0; i < std::max(options_.num_threads, 1); ++i) {
      threads.emplace_back([this] { work(); });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    if (failure_) {
      std::rethrow_exception(failure_);
    }
    progress_.finish();
    return results();
  }

 private:
  static std::int64_t total_bytes(std::span<const PlacedItem> items) {
    std::int64_t bytes = 0;
    for (const PlacedItem& placed : items) {
      for (const OutputTensor& output : placed.item->outputs) {
        bytes += output.bytes;
      }
    }
    return bytes;
  }

  void work() {
    try {
      for (std::size_t i = next_++; i < items_.size() && !failed_; i = next_++) {
        do_item(i);
      }
    } catch (...) {
      const std::scoped_lock lock(failure_mutex_);
      failed_ = true;
      if (!failure_) {
        failure_ = std::current_exception();
      }
    }
  }

  void do_item(std::size_t index) {
    const PlacedItem& placed = items_[index];
    const auto earlier = output_.finished().find(index);
    if (earlier != output_.finished().end()) {
      const auto facts = from_json(earlier->second, placed.item->outputs.size());
      if (facts && is_there(placed, *facts)) {
        facts_[index] = *facts;
        num_resumed_ += std::ssize(placed.item->outputs);
        return;
      }
    }
    facts_[index] = placed.item->quantize ? quantize(placed) : copy(placed);
    output_.note(index, to_json(facts_[index]));
  }

  // Whether the outputs in the file still have the checksums that were written down.
  bool is_there(const PlacedItem& placed, const ItemFacts& facts) {
    const InputFile file(output_.file(placed.file).path());
    std::vector<std::byte> piece;
    for (std::size_t i = 0; i < placed.offsets.size(); ++i) {
      const std::int64_t bytes = placed.item->outputs[i].bytes;
      if (placed.offsets[i] + bytes > file.size()) {
        return false;
      }
      StreamingChecksum checksum;
      for (std::int64_t done = 0; done < bytes; done += std::ssize(piece)) {
        piece.resize(static_cast<std::size_t>(std::min(options_.piece_bytes, bytes - done)));
        file.read(placed.offsets[i] + done, std::ssize(piece), piece.data());
        checksum.add(piece.data(), std::ssize(piece));
      }
      if (checksum.value() != facts.checksums[i]) {
        return false;
      }
    }
    for (const OutputTensor& output : placed.item->outputs) {
      progress_.add(output.bytes);
    }
    return true;
  }

  ItemFacts copy(const PlacedItem& placed) {
    const ConvertItem& item = *placed.item;
    OutputStream out(output_.file(placed.file), placed.offsets.front());
    if (item.source == nullptr) {
      out.write(item.literal.data(), std::ssize(item.literal));
    } else {
      copy_block(*item.source, item.block, out);
    }
    return {.checksums = {out.checksum()}};
  }

  void copy_block(const StoredTensor& source, const StoredSlice& block, OutputStream& out) {
    const std::int64_t element = dtype_bytes(source.dtype);
    const bool whole = block == stored_extent(source);
    std::vector<std::byte> piece;
    StreamingChecksum checksum;
    // Long rows are cut, short ones are read together.
    const std::int64_t row_bytes = block.columns.size() * element;
    const std::int64_t rows =
        std::max<std::int64_t>(options_.piece_bytes / std::max<std::int64_t>(row_bytes, 1), 1);
    const std::int64_t columns =
        rows > 1 ? block.columns.size()
                 : std::max<std::int64_t>(
                       std::min(block.columns.size(), options_.piece_bytes / element), 1);
    for (std::int64_t row = block.rows.begin; row < block.rows.end; row += rows) {
      for (std::int64_t column = block.columns.begin; column < block.columns.end;
           column += columns) {
        const StoredSlice part{.rows = {row, std::min(row + rows, block.rows.end)},
                               .columns = {column, std::min(column + columns, block.columns.end)}};
        piece.resize(static_cast<std::size_t>(part.rows.size() * part.columns.size() * element));
        read_rows(sources_, source, part, piece.data());
        checksum.add(piece.data(), std::ssize(piece));
        out.write(piece.data(), std::ssize(piece));
        progress_.add(std::ssize(piece));
      }
    }
    if (whole && source.checksum) {
      checksum.verify(source);
    }
  }

  ItemFacts quantize(const PlacedItem& placed) {
    const LoadRegion& region = *placed.item->quantize;
    OutputStream words(output_.file(placed.file), placed.offsets[0]);
    OutputStream scales(output_.file(placed.file), placed.offsets[1]);
    RegionReader reader(sources_, region, /*verify=*/true);
    QuantizationError error;
    std::vector<float> values;
    std::vector<std::byte> narrow_scales;
    for (const RegionPiece& piece : cut_region(region, options_.piece_bytes)) {
      const Int4Matrix packed = reader.read_rounded(piece, values);
      error.add(values, packed, region.quantize_group);
      narrow_scales.resize(packed.scales.size() * sizeof(std::uint16_t));
      narrow(packed.scales, DType::kBFloat16, narrow_scales.data());
      const auto word_bytes =
          static_cast<std::int64_t>(packed.words.size() * sizeof(std::uint32_t));
      words.write(packed.words.data(), word_bytes);
      scales.write(narrow_scales.data(), std::ssize(narrow_scales));
      progress_.add(word_bytes + std::ssize(narrow_scales));
    }
    reader.finish();
    return {.checksums = {words.checksum(), scales.checksum()},
            .relative_error = error.relative_frobenius(),
            .max_abs_error = error.max_abs()};
  }

  ItemResults results() const {
    ItemResults results;
    for (std::size_t i = 0; i < items_.size(); ++i) {
      const ConvertItem& item = *items_[i].item;
      results.checksums.insert(results.checksums.end(), facts_[i].checksums.begin(),
                               facts_[i].checksums.end());
      if (item.quantize) {
        results.quantized.push_back({.name = item.quantize->values->name,
                                     .relative_error = facts_[i].relative_error,
                                     .max_abs_error = facts_[i].max_abs_error});
      }
    }
    results.num_resumed = num_resumed_;
    return results;
  }

  std::span<const PlacedItem> items_;
  PartialOutput& output_;
  const WriteOptions& options_;
  FileSet sources_;
  std::vector<ItemFacts> facts_;
  Progress progress_;
  std::atomic<std::size_t> next_{0};
  std::atomic<std::int64_t> num_resumed_{0};
  std::atomic<bool> failed_{false};
  std::mutex failure_mutex_;
  std::exception_ptr failure_;
};

}  // namespace

std::vector<const StoredTensor*> ConvertItem::sources() const {
  std::vector<const StoredTensor*> tensors;
  if (source != nullptr) {
    tensors.push_back(source);
  }
  if (quantize) {
    tensors.push_back(quantize->values);
    if (quantize->scales != nullptr) {
      tensors.push_back(quantize->scales);
    }
  }
  return tensors;
}

ItemResults write_items(std::span<const PlacedItem> items, PartialOutput& output,
                        const WriteOptions& options) {
  return Writer(items, output, options).run();
}

std::string checksum_text(std::string_view bytes) {
  return fmt::format("{:016x}", XXH3_64bits(bytes.data(), bytes.size()));
}

}  // namespace kdtree
