"""Number formats of stored weights: bf16, fp8 E4M3 with block scales, INT4 with group scales.

Arrays of bf16 are uint16 bit patterns, of fp8 uint8 bit patterns, of packed INT4 uint32 words.
"""

from __future__ import annotations

import numpy as np

INT4_PER_WORD = 8
INT4_OFFSET = 8
FP8_BLOCK = 128


def bf16_from_float32(values: np.ndarray) -> np.ndarray:
    """Rounds finite float32 to the nearest bf16, ties to even; returns bit patterns, same shape."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    # Half of the dropped part, less one when the kept part is even: a carry then rounds up.
    rounding = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return ((bits + rounding) >> np.uint32(16)).astype(np.uint16)


def float32_from_bf16(patterns: np.ndarray) -> np.ndarray:
    """Widens bf16 bit patterns; exact."""
    return (patterns.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _fp8_e4m3_table() -> np.ndarray:
    """[256] float32 value of each fp8 E4M3 (finite-only variant) bit pattern.

    One sign bit, four exponent bits with bias 7, three mantissa bits; exponent 0 is subnormal;
    0x7f and 0xff are NaN, there is no infinity (OCP 8-bit floating point specification).
    """
    patterns = np.arange(256)
    exponent = (patterns >> 3) & 15
    mantissa = patterns & 7
    magnitude = np.where(exponent == 0, mantissa / 8.0 * 2.0**-6,
                         (1.0 + mantissa / 8.0) * 2.0**(exponent - 7.0))
    magnitude[(patterns & 0x7F) == 0x7F] = np.nan
    return np.where(patterns >= 128, -magnitude, magnitude).astype(np.float32)


FP8_E4M3_VALUES = _fp8_e4m3_table()


def dequantize_fp8_blocks(patterns: np.ndarray, weight_scale_inv: np.ndarray) -> np.ndarray:
    """[out, in] fp8 and [ceil(out/128), ceil(in/128)] float32 -> [out, in] float32.

    weight_scale_inv multiplies in spite of its name; blocks at the right and bottom edge may be
    partial (DeepSeek-V3 weight documentation).
    """
    out_features, in_features = patterns.shape
    scale = np.repeat(np.repeat(weight_scale_inv, FP8_BLOCK, axis=0), FP8_BLOCK, axis=1)
    return FP8_E4M3_VALUES[patterns] * scale[:out_features, :in_features].astype(np.float32)


def pack_int4(values: np.ndarray) -> np.ndarray:
    """[out, in] integers in [-8, 7] -> [out, in/8] uint32.

    Element k sits in word k/8 at bits 4*(k%8), lowest nibble first, stored as value + 8
    (compressed-tensors "pack-quantized").
    """
    out_features, in_features = values.shape
    if in_features % INT4_PER_WORD != 0:
        raise ValueError(f"in_features {in_features} is not a multiple of {INT4_PER_WORD}")
    nibbles = (values + INT4_OFFSET).astype(np.uint32).reshape(out_features, -1, INT4_PER_WORD)
    words = np.zeros(nibbles.shape[:2], dtype=np.uint32)
    for place in range(INT4_PER_WORD):
        words |= nibbles[:, :, place] << np.uint32(4 * place)
    return words


def unpack_int4(words: np.ndarray) -> np.ndarray:
    """[out, in/8] uint32 (or int32 of the same bits) -> [out, in] int8 in [-8, 7]."""
    words = np.ascontiguousarray(words).view(np.uint32)
    shifts = 4 * np.arange(INT4_PER_WORD, dtype=np.uint32)
    nibbles = (words[:, :, None] >> shifts) & np.uint32(15)
    return (nibbles.astype(np.int8) - INT4_OFFSET).reshape(words.shape[0], -1)


def quantize_w4a16(weight: np.ndarray, group_size: int,
                   scale_dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Quantises a matrix to INT4 with one scale for group_size neighbours of a row.

    weight [out, in] float32 -> words [out, in/8] uint32, scale [out, in/group_size] float32.
    scale = absmax / 7.5, rounded to scale_dtype ("BF16" or "F32") before it is used;
    q = clamp(round_half_even(weight / scale), -8, 7). A group of zeros gets scale 0 and q = 0.
    (compressed-tensors, symmetric INT4: the range -8..7 is 15 wide, so absmax maps to 7.5.)
    """
    out_features, in_features = weight.shape
    if in_features % group_size != 0:
        raise ValueError(f"in_features {in_features} is not a multiple of group {group_size}")
    groups = weight.astype(np.float32).reshape(out_features, -1, group_size)
    scale = np.abs(groups).max(axis=2) / np.float32(7.5)
    if scale_dtype == "BF16":
        scale = float32_from_bf16(bf16_from_float32(scale))
    elif scale_dtype != "F32":
        raise ValueError(f"scale_dtype {scale_dtype} is neither BF16 nor F32")
    divisor = np.where(scale == 0, np.float32(1), scale)
    # numpy's rint rounds halves to even.
    quantized = np.clip(np.rint(groups / divisor[:, :, None]), -8, 7)
    quantized = np.where(scale[:, :, None] == 0, 0, quantized).astype(np.int8)
    return pack_int4(quantized.reshape(out_features, in_features)), scale.astype(np.float32)


def dequantize_w4a16(words: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """words [out, in/8], scale [out, in/group_size] float32 -> float32(q) * float32(scale).

    The product is a float32 and is not rounded any further.
    """
    quantized = unpack_int4(words)
    group_size = quantized.shape[1] // scale.shape[1]
    return quantized.astype(np.float32) * np.repeat(scale.astype(np.float32), group_size, axis=1)
