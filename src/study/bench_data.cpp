#include "study/bench_data.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstring>

#include "core/check.h"

namespace kdtree {

namespace {

// Host memory of a piece on its way to the device.
constexpr std::int64_t kPieceBytes = std::int64_t{16} << 20;
constexpr std::int64_t kBytesOfWord = 8;
constexpr std::int64_t kCodesPerWord = 8;
// Spread of n * 2^exponent, n uniform in -128..127, and of a code minus 8, per unit of scale.
constexpr double kSpreadOfByte = 73.9;
constexpr double kSpreadOfCode = 4.6;

std::int8_t random_byte(std::uint64_t seed, std::int64_t index) {
  const std::uint64_t word = random_bits(seed, index / kBytesOfWord);
  return static_cast<std::int8_t>(word >> (8 * (index % kBytesOfWord)));
}

// The power of two next to what makes a sum of `in` products with values around 1 come out
// around 1.
int exponent_for(std::int64_t in, double spread) {
  return static_cast<int>(std::lround(
      std::log2(1 / (spread * std::sqrt(static_cast<double>(std::max<std::int64_t>(in, 1)))))));
}

// Makes pieces of `count` elements of Element with make(first, span) and uploads them.
template <class Element, class Make>
void upload_pieces(Backend& backend, void* target, std::int64_t count, const Make& make) {
  const auto element = static_cast<std::int64_t>(sizeof(Element));
  const std::int64_t step = kPieceBytes / element;
  std::vector<Element> piece(static_cast<std::size_t>(std::min(step, count)));
  for (std::int64_t first = 0; first < count; first += step) {
    const std::int64_t part = std::min(step, count - first);
    make(first, std::span(piece).first(static_cast<std::size_t>(part)));
    backend.upload(static_cast<std::byte*>(target) + first * element, piece.data(), part * element);
    backend.synchronize();  // the piece is written again
  }
}

template <class Element, class Convert>
void fill_bytes_as(Backend& backend, const LargeValues& values, const TensorView& target,
                   const Convert& convert) {
  std::array<Element, 256> table{};
  for (int byte = 0; byte < 256; ++byte) {
    table[static_cast<std::size_t>(byte)] =
        convert(std::ldexp(static_cast<float>(static_cast<std::int8_t>(byte)), values.exponent));
  }
  upload_pieces<Element>(
      backend, target.raw(), target.num_elements(),
      [&](std::int64_t first, std::span<Element> piece) {
        // A piece begins with a whole word.
        for (std::size_t i = 0; i < piece.size(); i += kBytesOfWord) {
          std::uint64_t word =
              random_bits(values.seed, (first + static_cast<std::int64_t>(i)) / kBytesOfWord);
          const std::size_t end = std::min<std::size_t>(piece.size(), i + kBytesOfWord);
          for (std::size_t j = i; j < end; ++j, word >>= 8) {
            piece[j] = table[word & 0xff];
          }
        }
      });
}

}  // namespace

std::vector<float> BenchRandom::floats(std::int64_t count, double low, double high, DType dtype) {
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) {
    value = static_cast<float>(uniform(low, high));
    value = dtype == DType::kBFloat16 ? BFloat16::from_float(value).to_float() : value;
  }
  return values;
}

float LargeValues::at(std::int64_t index) const {
  return std::ldexp(static_cast<float>(random_byte(seed, index)), exponent);
}

void fill_large(Backend& backend, const LargeValues& values, const TensorView& target) {
  check(target.contiguous(), "fill_large of a strided tensor");
  if (target.dtype() == DType::kFloat32) {
    fill_bytes_as<float>(backend, values, target, [](float value) { return value; });
  } else {
    check(target.dtype() == DType::kBFloat16, "fill_large of a tensor of {}",
          dtype_name(target.dtype()));
    fill_bytes_as<BFloat16>(backend, values, target, BFloat16::from_float);
  }
}

void fill_bits(Backend& backend, std::uint64_t seed, void* target, std::int64_t bytes) {
  check(bytes % kBytesOfWord == 0, "fill_bits of {} bytes", bytes);
  upload_pieces<std::uint64_t>(backend, target, bytes / kBytesOfWord,
                               [&](std::int64_t first, std::span<std::uint64_t> piece) {
                                 for (std::uint64_t& word : piece) {
                                   word = random_bits(seed, first++);
                                 }
                               });
}

DeviceTensor upload_floats(Backend& backend, DType dtype, const Shape& shape,
                           std::span<const float> values) {
  check(shape.num_elements() == static_cast<std::int64_t>(values.size()), "{} values for {}",
        values.size(), shape.to_string());
  DeviceTensor tensor(backend, dtype, shape);
  if (dtype == DType::kFloat32) {
    tensor.upload(backend, values);
    backend.synchronize();
    return tensor;
  }
  std::vector<BFloat16> narrow(values.size());
  std::transform(values.begin(), values.end(), narrow.begin(), BFloat16::from_float);
  tensor.upload(backend, std::span<const BFloat16>(narrow));
  backend.synchronize();
  return tensor;
}

DeviceTensor upload_indices(Backend& backend, const Shape& shape,
                            std::span<const std::int32_t> values) {
  check(shape.num_elements() == static_cast<std::int64_t>(values.size()), "{} indices for {}",
        values.size(), shape.to_string());
  DeviceTensor tensor(backend, DType::kInt32, shape);
  tensor.upload(backend, values);
  backend.synchronize();
  return tensor;
}

std::vector<float> download_rows(Backend& backend, const ConstTensorView& matrix,
                                 std::int64_t first, std::int64_t count) {
  const ConstTensorView rows = matrix.rows(first, count);
  check(rows.contiguous(), "download_rows of a strided tensor");
  std::vector<float> values(static_cast<std::size_t>(rows.num_elements()));
  if (rows.dtype() == DType::kFloat32) {
    backend.download(values.data(), rows.raw(), rows.bytes());
    backend.synchronize();
    return values;
  }
  std::vector<BFloat16> narrow(values.size());
  backend.download(narrow.data(), rows.raw(), rows.bytes());
  backend.synchronize();
  std::transform(narrow.begin(), narrow.end(), values.begin(),
                 [](BFloat16 value) { return value.to_float(); });
  return values;
}

std::vector<std::int32_t> download_indices(Backend& backend, const ConstTensorView& tensor) {
  std::vector<std::int32_t> values(static_cast<std::size_t>(tensor.num_elements()));
  backend.download(values.data(), tensor.data<std::int32_t>(), tensor.bytes());
  backend.synchronize();
  return values;
}

BenchMatrix::BenchMatrix(Backend& backend, std::int64_t out, std::int64_t in, std::uint64_t seed)
    : seed_(seed),
      exponent_(exponent_for(in, kSpreadOfByte)),
      data_(backend, DType::kBFloat16, Shape{out, in}) {
  fill_large(backend, {.seed = seed, .exponent = exponent_}, data_.view());
  view_ = {.format = WeightFormat::kBFloat16,
           .out_features = out,
           .in_features = in,
           .data = data_.view().raw()};
  backend.prepare(view_);
}

BenchMatrix::BenchMatrix(Backend& backend, std::int64_t out, std::int64_t in,
                         std::int64_t group_size, std::uint64_t seed)
    : seed_(seed),
      // A scale is (64 + 0..63) * 2^exponent, 95 * 2^exponent on the average.
      exponent_(exponent_for(in, 95 * kSpreadOfCode)),
      data_(backend, DType::kInt32, Shape{out, in / kCodesPerWord}),
      scales_(backend, DType::kBFloat16, Shape{out, in / group_size}) {
  check(in % group_size == 0 && in * out % 16 == 0, "an INT4 matrix [{}, {}] in groups of {}", out,
        in, group_size);
  fill_bits(backend, seed, data_.view().raw(), data_.view().bytes());
  const std::int64_t groups = in / group_size;
  upload_pieces<BFloat16>(backend, scales_.view().raw(), out * groups,
                          [&](std::int64_t first, std::span<BFloat16> piece) {
                            for (BFloat16& scale : piece) {
                              scale = BFloat16::from_float(
                                  static_cast<float>(int4_scale(first / groups, first % groups)));
                              ++first;
                            }
                          });
  view_ = {.format = WeightFormat::kInt4Group,
           .out_features = out,
           .in_features = in,
           .data = data_.view().raw(),
           .scales = scales_.view().raw(),
           .scale_dtype = DType::kBFloat16,
           .group_size = group_size};
  backend.prepare(view_);
}

double BenchMatrix::int4_scale(std::int64_t out, std::int64_t group) const {
  const std::int64_t index = out * scales_.view().size(1) + group;
  const auto steps = static_cast<double>(64 + (random_bits(~seed_, index) & 63U));
  return std::ldexp(steps, exponent_);
}

std::vector<double> BenchMatrix::row(std::int64_t out) const {
  const std::int64_t in = view_.in_features;
  std::vector<double> weights(static_cast<std::size_t>(in));
  if (view_.format == WeightFormat::kBFloat16) {
    const LargeValues values{.seed = seed_, .exponent = exponent_};
    for (std::int64_t i = 0; i < in; ++i) {
      weights[static_cast<std::size_t>(i)] = values.at(out * in + i);
    }
    return weights;
  }
  double scale = 0;
  std::uint64_t codes = 0;
  for (std::int64_t i = 0; i < in; ++i) {
    const std::int64_t place = out * in + i;
    if (i % view_.group_size == 0) {
      scale = int4_scale(out, i / view_.group_size);
    }
    if (i == 0 || place % 16 == 0) {
      codes = random_bits(seed_, place / 16);
    }
    const auto code = static_cast<int>((codes >> (4 * (place % 16))) & 0xfU);
    weights[static_cast<std::size_t>(i)] = (code - 8) * scale;
  }
  return weights;
}

}  // namespace kdtree
