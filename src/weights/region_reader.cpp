#include "weights/region_reader.h"

#include <algorithm>
#include <limits>
#include <span>

#include "core/check.h"
#include "weights/number_formats.h"
#include "weights/raw_tensor.h"

namespace kdtree {

namespace {

std::size_t to_size(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

}  // namespace

FileSet::FileSet(const LoadPlan& plan) {
  for (const LoadRegion& region : plan.regions) {
    open(region.values);
    open(region.scales);
  }
  for (const ShapeCheck& shape : plan.shape_checks) {
    open(shape.tensor);
  }
  for (const StoredTensor* tensor : plan.checksum_only) {
    open(tensor);
  }
}

void FileSet::open(const StoredTensor* tensor) {
  if (tensor != nullptr && !tensor->random && !files_.contains(tensor->file)) {
    files_.emplace(tensor->file, std::make_unique<InputFile>(tensor->file));
  }
}

void FileSet::read(const StoredTensor& tensor, std::int64_t offset, std::int64_t bytes,
                   void* target, Purpose purpose) const {
  files_.at(tensor.file)->read(tensor.file_offset + offset, bytes, target);
  bytes_read_ += bytes;
  if (purpose == Purpose::kChecksumOnly) {
    checksum_bytes_ += bytes;
  }
}

StreamingChecksum::StreamingChecksum() : state_(XXH3_createState()) {
  check(state_ != nullptr && XXH3_64bits_reset(state_.get()) == XXH_OK, "no memory for a checksum");
}

void StreamingChecksum::add(const void* data, std::int64_t bytes) {
  XXH3_64bits_update(state_.get(), data, to_size(bytes));
}

void StreamingChecksum::verify(const StoredTensor& tensor) const {
  const std::uint64_t found = XXH3_64bits_digest(state_.get());
  require_input(found == *tensor.checksum,
                "{}: checksum is {:016x}, expected {:016x}: the file is damaged",
                tensor_place(tensor), found, *tensor.checksum);
}

void verify_tensor(const FileSet& files, const StoredTensor& tensor, std::int64_t piece_bytes) {
  std::vector<std::byte> piece(to_size(std::min(piece_bytes, tensor.bytes)));
  StreamingChecksum checksum;
  for (std::int64_t offset = 0; offset < tensor.bytes; offset += piece_bytes) {
    const std::int64_t bytes = std::min(piece_bytes, tensor.bytes - offset);
    files.read(tensor, offset, bytes, piece.data(), FileSet::Purpose::kChecksumOnly);
    checksum.add(piece.data(), bytes);
  }
  checksum.verify(tensor);
}

void check_scales(const StoredTensor& scales, std::span<const float> values, std::int64_t columns,
                  std::int64_t first_row, std::int64_t first_column) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    const float scale = values[i];
    // false for NaN too
    if (scale >= 0 && scale <= std::numeric_limits<float>::max()) {
      continue;
    }
    const auto index = static_cast<std::int64_t>(i);
    fail_input("{}: scale [{}, {}] is {}, expected a finite number, 0 or above",
               tensor_place(scales), first_row + index / columns, first_column + index % columns,
               scale);
  }
}

RegionReader::RegionReader(const FileSet& files, const LoadRegion& region, bool verify)
    : files_(files), region_(region) {
  const bool vector = region.values->shape.rank() == 1;
  const std::int64_t total_rows = vector ? 1 : region.values->shape[0];
  const bool whole =
      region.rows.size() == total_rows && region.columns.size() == region.total_columns;
  verify_values_ = verify && whole && region.values->checksum;
  const bool group_scales = region.decode == LoadRegion::Decode::kInt4;
  verify_scales_ = verify && group_scales && whole && region.scales->checksum;
  if (region.decode == LoadRegion::Decode::kFloat8) {
    load_block_scales();
    if (verify && region.scales->checksum) {
      scales_checksum_.verify(*region.scales);
    }
    check_scales(*region.scales, block_scales_, region.scales->shape[1], 0, 0);
  }
}

void RegionReader::read_block(const Block& block, void* out) const {
  const std::int64_t element = dtype_bytes(block.tensor.dtype);
  const std::int64_t row_bytes = block.total_columns * element;
  const std::int64_t part_bytes = block.columns.size() * element;
  if (part_bytes == row_bytes) {
    files_.read(block.tensor, block.first_row * row_bytes, block.count * row_bytes, out);
    return;
  }
  for (std::int64_t row = 0; row < block.count; ++row) {
    files_.read(block.tensor, (block.first_row + row) * row_bytes + block.columns.begin * element,
                part_bytes, static_cast<std::byte*>(out) + row * part_bytes);
  }
}

// The region's columns of `values`; an element of `values` holds per_element logical columns.
void RegionReader::read_values(std::int64_t first, std::int64_t count, std::int64_t per_element,
                               void* out) {
  const Range columns{region_.columns.begin / per_element, region_.columns.end / per_element};
  read_block({.tensor = *region_.values,
              .first_row = region_.rows.begin + first,
              .count = count,
              .columns = columns,
              .total_columns = region_.total_columns / per_element},
             out);
  if (verify_values_) {
    values_checksum_.add(out, count * columns.size() * dtype_bytes(region_.values->dtype));
  }
}

void RegionReader::load_block_scales() {
  const StoredTensor& scales = *region_.scales;
  raw_scales_.resize(to_size(scales.bytes));
  files_.read(scales, 0, scales.bytes, raw_scales_.data());
  scales_checksum_.add(raw_scales_.data(), scales.bytes);
  block_scales_.resize(to_size(scales.shape.num_elements()));
  widen(scales.dtype, raw_scales_.data(), block_scales_);
}

void RegionReader::read_rows(std::int64_t first, std::int64_t count, void* out) {
  switch (region_.decode) {
    case LoadRegion::Decode::kCopy:
      read_values(first, count, 1, out);
      if (region_.is_scales) {
        check_copied_scales(first, count, out);
      }
      return;
    case LoadRegion::Decode::kWiden:
      widen_rows(first, count, out);
      return;
    case LoadRegion::Decode::kInt4:
      int4_rows(first, count, out);
      return;
    case LoadRegion::Decode::kFloat8:
      float8_rows(first, count, out);
      return;
  }
}

void RegionReader::check_copied_scales(std::int64_t first, std::int64_t count, const void* copied) {
  floats_.resize(to_size(count * region_.columns.size()));
  widen(region_.values->dtype, copied, floats_);
  check_scales(*region_.values, floats_, region_.columns.size(), region_.rows.begin + first,
               region_.columns.begin);
}

void RegionReader::widen_rows(std::int64_t first, std::int64_t count, void* out) {
  const std::int64_t elements = count * region_.columns.size();
  raw_.resize(to_size(elements * dtype_bytes(region_.values->dtype)));
  floats_.resize(to_size(elements));
  read_values(first, count, 1, raw_.data());
  widen(region_.values->dtype, raw_.data(), floats_);
  narrow(floats_, region_.output, out);
}

void RegionReader::int4_rows(std::int64_t first, std::int64_t count, void* out) {
  const std::int64_t columns = region_.columns.size();
  const std::int64_t groups = columns / region_.group_size;
  const StoredTensor& scales = *region_.scales;
  std::vector<std::uint32_t> words(to_size(count * columns / kInt4PerWord));
  read_values(first, count, kInt4PerWord, words.data());
  const std::int64_t scale_bytes = count * groups * dtype_bytes(scales.dtype);
  raw_scales_.resize(to_size(scale_bytes));
  read_block({.tensor = scales,
              .first_row = region_.rows.begin + first,
              .count = count,
              .columns = {region_.columns.begin / region_.group_size,
                          region_.columns.end / region_.group_size},
              .total_columns = region_.total_columns / region_.group_size},
             raw_scales_.data());
  if (verify_scales_) {
    scales_checksum_.add(raw_scales_.data(), scale_bytes);
  }
  scale_floats_.resize(to_size(count * groups));
  widen(scales.dtype, raw_scales_.data(), scale_floats_);
  check_scales(scales, scale_floats_, groups, region_.rows.begin + first,
               region_.columns.begin / region_.group_size);
  floats_.resize(to_size(count * columns));
  // Rows are whole numbers of words and groups, so that all of them decode as one long row.
  dequantize_int4(words, scale_floats_, region_.group_size, floats_);
  narrow(floats_, region_.output, out);
}

void RegionReader::float8_rows(std::int64_t first, std::int64_t count, void* out) {
  const std::int64_t columns = region_.columns.size();
  raw_.resize(to_size(count * columns));
  floats_.resize(to_size(count * columns));
  read_values(first, count, 1, raw_.data());
  widen(DType::kFloat8E4M3, raw_.data(), floats_);
  const std::int64_t block_columns = region_.scales->shape[1];
  for (std::int64_t row = 0; row < count; ++row) {
    const std::int64_t block_row = (region_.rows.begin + first + row) / kFloat8Block;
    for (std::int64_t column = 0; column < columns; ++column) {
      const std::int64_t block =
          block_row * block_columns + (region_.columns.begin + column) / kFloat8Block;
      floats_[to_size(row * columns + column)] *= block_scales_[to_size(block)];
    }
  }
  narrow(floats_, region_.output, out);
}

void RegionReader::finish() {
  if (verify_values_) {
    values_checksum_.verify(*region_.values);
  }
  if (verify_scales_) {
    scales_checksum_.verify(*region_.scales);
  }
}

}  // namespace kdtree
