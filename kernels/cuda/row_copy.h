// Copies of whole rows of any element type: in the largest unit that all addresses and sizes allow.
// For .cu files.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <initializer_list>

namespace kdtree {

// The largest of 16, 8, 4, 2, 1 bytes that divides all of these (0 is divisible by any).
inline int copy_unit_bytes(const void* first, const void* second,
                           std::initializer_list<std::int64_t> sizes) {
  std::uint64_t bits =
      reinterpret_cast<std::uintptr_t>(first) | reinterpret_cast<std::uintptr_t>(second) | 16U;
  for (const std::int64_t size : sizes) {
    bits |= static_cast<std::uint64_t>(size);
  }
  return static_cast<int>(bits & (~bits + 1));
}

// Calls body(Unit{}) with a type of that many bytes.
template <class Body>
void with_copy_unit(int bytes, Body&& body) {
  switch (bytes) {
    case 16:
      return body(uint4{});
    case 8:
      return body(std::uint64_t{});
    case 4:
      return body(std::uint32_t{});
    case 2:
      return body(std::uint16_t{});
    default:
      return body(std::uint8_t{});
  }
}

}  // namespace kdtree
