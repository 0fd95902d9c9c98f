#include "weights/region_reader.h"

#include <algorithm>
#include <limits>
#include <span>
#include <utility>

#include "core/check.h"
#include "weights/number_formats.h"
#include "weights/quantize.h"
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
    auto file = std::make_unique<InputFile>(tensor->file);
    file->expect_sequential_reads();  // regions are sorted by their place
    files_.emplace(tensor->file, std::move(file));
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

void FileSet::will_need(const LoadRegion& region, const RegionPiece& piece) const {
  // Shards hold hardly more than what is read.
  if (piece.columns.size() == region.total_columns || piece.rows.size() == 1 ||
      region.values->slice) {
    return;
  }
  const auto advise = [&](const StoredTensor& tensor, std::int64_t per_element) {
    const std::int64_t element = dtype_bytes(tensor.dtype);
    const std::int64_t row_bytes = region.total_columns / per_element * element;
    const std::int64_t first_row = region.rows.begin + piece.rows.begin;
    const std::int64_t first = (region.columns.begin + piece.columns.begin) / per_element;
    const std::int64_t last = (region.columns.begin + piece.columns.end) / per_element;
    const std::int64_t begin = first_row * row_bytes + first * element;
    const std::int64_t end = (first_row + piece.rows.size() - 1) * row_bytes + last * element;
    files_.at(tensor.file)->will_need(tensor.file_offset + begin, end - begin);
  };
  const bool int4 = region.decode == LoadRegion::Decode::kInt4;
  advise(*region.values, int4 ? kInt4PerWord : 1);
  if (int4) {
    advise(*region.scales, region.group_size);
  }
}

StreamingChecksum::StreamingChecksum() : state_(XXH3_createState()) {
  check(state_ != nullptr && XXH3_64bits_reset(state_.get()) == XXH_OK, "no memory for a checksum");
}

void StreamingChecksum::add(const void* data, std::int64_t bytes) {
  XXH3_64bits_update(state_.get(), data, to_size(bytes));
}

std::uint64_t StreamingChecksum::value() const {
  return XXH3_64bits_digest(state_.get());
}

void StreamingChecksum::verify(const StoredTensor& tensor) const {
  const std::uint64_t found = value();
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

std::vector<RegionPiece> cut_region(const LoadRegion& region, std::int64_t piece_bytes) {
  std::vector<RegionPiece> pieces;
  const std::int64_t num_rows = region.rows.size();
  const std::int64_t num_columns = region.columns.size();
  if (region.row_bytes() <= piece_bytes) {
    const std::int64_t step = piece_bytes / region.row_bytes();
    for (std::int64_t row = 0; row < num_rows; row += step) {
      pieces.push_back({{row, std::min(row + step, num_rows)}, {0, num_columns}});
    }
    return pieces;
  }
  // The region begins at a group's border.
  const std::int64_t group = std::max({region.group_size, region.quantize_group, std::int64_t{1}});
  const std::int64_t step =
      std::max(piece_bytes / dtype_bytes(region.output) / group, std::int64_t{1}) * group;
  for (std::int64_t row = 0; row < num_rows; ++row) {
    for (std::int64_t column = 0; column < num_columns; column += step) {
      pieces.push_back({{row, row + 1}, {column, std::min(column + step, num_columns)}});
    }
  }
  return pieces;
}

void read_rows(const FileSet& files, const StoredTensor& tensor, const StoredSlice& block,
               void* out) {
  const StoredSlice extent = stored_extent(tensor);
  const std::int64_t element = dtype_bytes(tensor.dtype);
  const std::int64_t row_bytes = extent.columns.size() * element;
  const std::int64_t part_bytes = block.columns.size() * element;
  const std::int64_t first_row = block.rows.begin - extent.rows.begin;
  if (part_bytes == row_bytes) {
    files.read(tensor, first_row * row_bytes, block.rows.size() * row_bytes, out);
    return;
  }
  const std::int64_t first_byte = (block.columns.begin - extent.columns.begin) * element;
  for (std::int64_t row = 0; row < block.rows.size(); ++row) {
    files.read(tensor, (first_row + row) * row_bytes + first_byte, part_bytes,
               static_cast<std::byte*>(out) + row * part_bytes);
  }
}

RegionReader::RegionReader(const FileSet& files, const LoadRegion& region, bool verify)
    : files_(files), region_(region) {
  const auto whole = [](const StoredTensor& tensor, const StoredSlice& read) {
    return read == stored_extent(tensor);
  };
  verify_values_ =
      verify && region.values->checksum && whole(*region.values, stored_values(region));
  verify_scales_ = verify && region.decode == LoadRegion::Decode::kInt4 &&
                   region.scales->checksum && whole(*region.scales, stored_scales(region));
  if (region.decode == LoadRegion::Decode::kFloat8) {
    load_block_scales();
    if (verify && region.scales->checksum) {
      scales_checksum_.verify(*region.scales);
    }
    check_scales(*region.scales, block_scales_, region.scales->shape[1], 0, 0);
  }
}

void RegionReader::read_block(const Block& block, void* out) const {
  read_rows(files_, block.tensor,
            {.rows = {block.first_row, block.first_row + block.count}, .columns = block.columns},
            out);
}

// The piece's columns of `values`; an element of `values` holds per_element logical columns.
void RegionReader::read_values(const RegionPiece& piece, std::int64_t per_element, void* out) {
  const Range columns{(region_.columns.begin + piece.columns.begin) / per_element,
                      (region_.columns.begin + piece.columns.end) / per_element};
  read_block({.tensor = *region_.values,
              .first_row = region_.rows.begin + piece.rows.begin,
              .count = piece.rows.size(),
              .columns = columns},
             out);
  if (verify_values_) {
    values_checksum_.add(out,
                         piece.rows.size() * columns.size() * dtype_bytes(region_.values->dtype));
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

void RegionReader::read(const RegionPiece& piece, void* out) {
  switch (region_.decode) {
    case LoadRegion::Decode::kCopy:
      read_values(piece, 1, out);
      if (region_.is_scales) {
        check_copied_scales(piece, out);
      }
      return;
    case LoadRegion::Decode::kWiden:
      widen_piece(piece, out);
      return;
    case LoadRegion::Decode::kInt4:
      int4_piece(piece, out);
      return;
    case LoadRegion::Decode::kFloat8:
      float8_piece(piece, out);
      return;
  }
}

Int4Matrix RegionReader::read_rounded(const RegionPiece& piece, std::vector<float>& values) {
  const std::int64_t columns = piece.columns.size();
  values.resize(to_size(piece.rows.size() * columns));
  read(piece, values.data());
  return quantize_rows({.values = values,
                        .first_row = region_.rows.begin + piece.rows.begin,
                        .first_column = region_.columns.begin + piece.columns.begin,
                        .columns = columns,
                        .group_size = region_.quantize_group},
                       tensor_place(*region_.values));
}

void RegionReader::check_copied_scales(const RegionPiece& piece, const void* copied) {
  floats_.resize(to_size(piece.rows.size() * piece.columns.size()));
  widen(region_.values->dtype, copied, floats_);
  check_scales(*region_.values, floats_, piece.columns.size(),
               region_.rows.begin + piece.rows.begin, region_.columns.begin + piece.columns.begin);
}

void RegionReader::widen_piece(const RegionPiece& piece, void* out) {
  const std::int64_t elements = piece.rows.size() * piece.columns.size();
  raw_.resize(to_size(elements * dtype_bytes(region_.values->dtype)));
  floats_.resize(to_size(elements));
  read_values(piece, 1, raw_.data());
  widen(region_.values->dtype, raw_.data(), floats_);
  narrow(floats_, region_.output, out);
}

void RegionReader::int4_piece(const RegionPiece& piece, void* out) {
  const std::int64_t elements = piece.rows.size() * piece.columns.size();
  const StoredTensor& scales = *region_.scales;
  words_.resize(to_size(elements / kInt4PerWord));
  read_values(piece, kInt4PerWord, words_.data());
  const std::int64_t group = region_.group_size;
  const Range groups{(region_.columns.begin + piece.columns.begin) / group,
                     (region_.columns.begin + piece.columns.end) / group};
  const std::int64_t num_scales = piece.rows.size() * groups.size();
  const std::int64_t scale_bytes = num_scales * dtype_bytes(scales.dtype);
  const std::int64_t first_row = region_.rows.begin + piece.rows.begin;
  raw_scales_.resize(to_size(scale_bytes));
  read_block(
      {.tensor = scales, .first_row = first_row, .count = piece.rows.size(), .columns = groups},
      raw_scales_.data());
  if (verify_scales_) {
    scales_checksum_.add(raw_scales_.data(), scale_bytes);
  }
  scale_floats_.resize(to_size(num_scales));
  widen(scales.dtype, raw_scales_.data(), scale_floats_);
  check_scales(scales, scale_floats_, groups.size(), first_row, groups.begin);
  floats_.resize(to_size(elements));
  // Rows are whole numbers of words and groups, so that all of them decode as one long row.
  dequantize_int4(words_, scale_floats_, group, floats_);
  narrow(floats_, region_.output, out);
}

void RegionReader::float8_piece(const RegionPiece& piece, void* out) {
  const std::int64_t columns = piece.columns.size();
  const std::int64_t first_row = region_.rows.begin + piece.rows.begin;
  const std::int64_t first_column = region_.columns.begin + piece.columns.begin;
  raw_.resize(to_size(piece.rows.size() * columns));
  floats_.resize(to_size(piece.rows.size() * columns));
  read_values(piece, 1, raw_.data());
  widen(DType::kFloat8E4M3, raw_.data(), floats_);
  const std::int64_t block_columns = region_.scales->shape[1];
  for (std::int64_t row = 0; row < piece.rows.size(); ++row) {
    const std::int64_t block_row = (first_row + row) / kFloat8Block;
    for (std::int64_t column = 0; column < columns; ++column) {
      const std::int64_t block = block_row * block_columns + (first_column + column) / kFloat8Block;
      floats_[to_size(row * columns + column)] *= block_scales_[to_size(block)];
    }
  }
  narrow(floats_, region_.output, out);
}

std::int64_t RegionReader::scratch_bytes() const {
  const std::size_t floats = floats_.capacity() + scale_floats_.capacity();
  const std::size_t group_scales =
      region_.decode == LoadRegion::Decode::kFloat8 ? 0 : raw_scales_.capacity();
  return static_cast<std::int64_t>(raw_.capacity() + group_scales + floats * sizeof(float) +
                                   words_.capacity() * sizeof(std::uint32_t));
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
