#include "weights/number_formats.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/check.h"

namespace kdtree {

namespace {

constexpr std::int64_t kInt4Offset = 8;
constexpr float kInt4Steps = 7.5F;
constexpr int kInt4Bits = 4;
constexpr std::uint32_t kInt4Mask = 15;

template <class T>
T load(const void* source, std::size_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(source) + index * sizeof(T), sizeof(T));
  return value;
}

// One sign bit, four of exponent with bias 7, three of mantissa; no infinities, 0x7f is NaN (OCP
// 8-bit floating point specification, E4M3).
float decode_float8(std::uint8_t bits) {
  constexpr int kBias = 7;
  constexpr int kMantissaBits = 3;
  const int exponent = (bits >> kMantissaBits) & 15;
  const int mantissa = bits & 7;
  float magnitude =
      exponent == 0
          ? std::ldexp(static_cast<float>(mantissa), 1 - kBias - kMantissaBits)
          : std::ldexp(static_cast<float>(8 + mantissa), exponent - kBias - kMantissaBits);
  if ((bits & 0x7fU) == 0x7fU) {
    magnitude = std::numeric_limits<float>::quiet_NaN();
  }
  return (bits & 0x80U) != 0 ? -magnitude : magnitude;
}

std::array<float, 256> make_float8_table() {
  std::array<float, 256> table{};
  for (std::size_t bits = 0; bits < table.size(); ++bits) {
    table[bits] = decode_float8(static_cast<std::uint8_t>(bits));
  }
  return table;
}

}  // namespace

float float_from_float16(std::uint16_t bits) {
  constexpr int kMantissaBits = 10;
  constexpr int kMantissaShift = 13;           // 23 bits of a float32 minus 10
  constexpr std::uint32_t kExponentGap = 112;  // bias 127 minus 15
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000U) << 16;
  const std::uint32_t exponent = (bits >> kMantissaBits) & 31U;
  const std::uint32_t mantissa = bits & 0x3ffU;
  if (exponent == 0) {
    const float magnitude = std::ldexp(static_cast<float>(mantissa), -24);
    return sign != 0 ? -magnitude : magnitude;
  }
  const std::uint32_t wide = exponent == 31 ? 255U : exponent + kExponentGap;
  return std::bit_cast<float>(sign | (wide << 23) | (mantissa << kMantissaShift));
}

float float_from_float8_e4m3(std::uint8_t bits) {
  static const std::array<float, 256> kTable = make_float8_table();
  return kTable[bits];
}

void widen(DType dtype, const void* source, std::span<float> out) {
  if (out.empty()) {
    return;  // memcpy wants no null pointer, not even for nothing
  }
  switch (dtype) {
    case DType::kFloat32:
      std::memcpy(out.data(), source, out.size_bytes());
      return;
    case DType::kBFloat16:
      for (std::size_t i = 0; i < out.size(); ++i) {
        out[i] = load<BFloat16>(source, i).to_float();
      }
      return;
    case DType::kFloat16:
      for (std::size_t i = 0; i < out.size(); ++i) {
        out[i] = float_from_float16(load<std::uint16_t>(source, i));
      }
      return;
    case DType::kFloat8E4M3:
      for (std::size_t i = 0; i < out.size(); ++i) {
        out[i] = float_from_float8_e4m3(load<std::uint8_t>(source, i));
      }
      return;
    default:
      fail("{} cannot be widened to F32", dtype_name(dtype));
  }
}

void narrow(std::span<const float> values, DType dtype, void* out) {
  if (values.empty()) {
    return;
  }
  if (dtype == DType::kFloat32) {
    std::memcpy(out, values.data(), values.size_bytes());
    return;
  }
  check(dtype == DType::kBFloat16, "F32 cannot be stored as {}", dtype_name(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const BFloat16 rounded = BFloat16::from_float(values[i]);
    std::memcpy(static_cast<char*>(out) + i * sizeof(rounded), &rounded, sizeof(rounded));
  }
}

void dequantize_int4(std::span<const std::uint32_t> words, std::span<const float> scales,
                     std::int64_t group_size, std::span<float> out) {
  const auto group = static_cast<std::size_t>(group_size);
  for (std::size_t i = 0; i < out.size(); ++i) {
    const std::uint32_t code =
        (words[i / kInt4PerWord] >> (kInt4Bits * (i % kInt4PerWord))) & kInt4Mask;
    out[i] = static_cast<float>(static_cast<std::int64_t>(code) - kInt4Offset) * scales[i / group];
  }
}

Int4Matrix quantize_int4(std::span<const float> values, std::int64_t columns,
                         std::int64_t group_size, DType scale_dtype) {
  check(group_size > 0 && group_size % kInt4PerWord == 0 && columns % group_size == 0,
        "{} columns in groups of {}", columns, group_size);
  const auto group = static_cast<std::size_t>(group_size);
  Int4Matrix matrix;
  matrix.words.resize(values.size() / kInt4PerWord);
  matrix.scales.resize(values.size() / group);
  for (std::size_t g = 0; g < matrix.scales.size(); ++g) {
    const auto block = values.subspan(g * group, group);
    float largest = 0;
    for (const float value : block) {
      largest = std::max(largest, std::abs(value));
    }
    float scale = largest / kInt4Steps;
    if (scale_dtype == DType::kBFloat16) {
      scale = BFloat16::from_float(scale).to_float();
    }
    scale = scale == 0 ? 1.0F : scale;
    matrix.scales[g] = scale;
    for (std::size_t i = 0; i < group; ++i) {
      const float steps = std::nearbyint(block[i] / scale);
      const auto code = static_cast<std::uint32_t>(std::clamp(steps, -8.0F, 7.0F) + 8.0F);
      matrix.words[(g * group + i) / kInt4PerWord] |= code << (kInt4Bits * (i % kInt4PerWord));
    }
  }
  return matrix;
}

}  // namespace kdtree
