// Element types of tensors, with their sizes and names.
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

namespace kdtree {

enum class DType : std::uint8_t {
  kFloat32,
  kBFloat16,
  kFloat16,
  kFloat8E4M3,  // finite only (E4M3FN), as fp8 checkpoints store it
  kInt64,
  kInt32,
  kUInt8,
};

// Bytes of one element.
constexpr std::int64_t dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::kInt64:
      return 8;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kBFloat16:
    case DType::kFloat16:
      return 2;
    case DType::kFloat8E4M3:
    case DType::kUInt8:
      return 1;
  }
  return 0;
}

// The name that safetensors and KDTR headers use ("F32", "BF16", ...).
constexpr std::string_view dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "F32";
    case DType::kBFloat16:
      return "BF16";
    case DType::kFloat16:
      return "F16";
    case DType::kFloat8E4M3:
      return "F8_E4M3";
    case DType::kInt64:
      return "I64";
    case DType::kInt32:
      return "I32";
    case DType::kUInt8:
      return "U8";
  }
  return "?";
}

// bfloat16: the upper half of an IEEE float32. Widening is exact; narrowing rounds to nearest, ties
// to even.
struct BFloat16 {
  std::uint16_t bits = 0;

  constexpr float to_float() const {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }

  static constexpr BFloat16 from_float(float value) {
    const auto word = std::bit_cast<std::uint32_t>(value);
    if ((word & 0x7fffffffU) >
        0x7f800000U) {  // NaN stays NaN: keep it quiet, never round it to infinity
      return {static_cast<std::uint16_t>((word >> 16) | 0x40U)};
    }
    const std::uint32_t rounding = 0x7fffU + ((word >> 16) & 1U);
    return {static_cast<std::uint16_t>((word + rounding) >> 16)};
  }
};
static_assert(sizeof(BFloat16) == 2);

// The DType of a C++ element type.
template <class T>
inline constexpr DType kDTypeOf = DType::kUInt8;
template <>
inline constexpr DType kDTypeOf<float> = DType::kFloat32;
template <>
inline constexpr DType kDTypeOf<BFloat16> = DType::kBFloat16;
template <>
inline constexpr DType kDTypeOf<std::int32_t> = DType::kInt32;
template <>
inline constexpr DType kDTypeOf<std::int64_t> = DType::kInt64;

}  // namespace kdtree
