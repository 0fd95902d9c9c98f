"""Reader and writer of the KDTR bundle, format version 1.

Layout, all little-endian:

    bytes 0-3    b"KDTR"
    bytes 4-7    u32 version = 1
    bytes 8-15   u64 header_bytes
    bytes 16-23  u64 XXH3-64 (seed 0) of the header JSON
    bytes 24-31  u64 zero
    then         header_bytes of UTF-8 JSON, zero padding up to
                 data_start = round_up(32 + header_bytes, 4096)
    then         the tensors, each at data_start + offset

An offset is a multiple of 64, and of 4096 for a tensor of 64 KiB or more. Gaps are zero and the
file ends with the last tensor's last byte. The reader checks every one of these promises.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MAGIC = b"KDTR"
VERSION = 1
PREFIX_BYTES = 32
PAGE_BYTES = 4096
ALIGNMENT_BYTES = 64
LARGE_TENSOR_BYTES = 64 * 1024

# BF16 and F8_E4M3 have no numpy type: their bit patterns are kept as unsigned integers.
NUMPY_DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "F8_E4M3": np.dtype("u1"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "U8": np.dtype("u1"),
}


class KdtrError(Exception):
    """A file that is not a valid KDTR bundle; the text names the file, the place and the cause."""


@dataclass(frozen=True)
class Tensor:
    """A stored tensor: dtype is a key of NUMPY_DTYPES, array its values or bit patterns."""

    dtype: str
    array: np.ndarray


@dataclass(frozen=True)
class Bundle:
    """header is the JSON object without its "tensors" table, tensors the stored tensors by name."""

    header: dict[str, Any]
    tensors: dict[str, Tensor]


def _load_xxhash() -> ctypes.CDLL:
    for name in (ctypes.util.find_library("xxhash"), "libxxhash.so.0"):
        if name is None:
            continue
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        library.XXH3_64bits.restype = ctypes.c_uint64
        library.XXH3_64bits.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        return library
    raise RuntimeError(
        "KDTR checksums need the shared library libxxhash.so.0, which was not found: "
        "install the Debian package libxxhash0")


_xxhash: ctypes.CDLL | None = None


def xxh3_64(data: bytes) -> int:
    """XXH3-64 of data with seed 0."""
    global _xxhash
    if _xxhash is None:
        _xxhash = _load_xxhash()
    return int(_xxhash.XXH3_64bits(data, len(data)))


def round_up(value: int, multiple: int) -> int:
    return (value + multiple - 1) // multiple * multiple


def tensor_alignment(num_bytes: int) -> int:
    return PAGE_BYTES if num_bytes >= LARGE_TENSOR_BYTES else ALIGNMENT_BYTES


def write_kdtr(path: Path, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Writes a bundle; tensors keep the order of the mapping, so equal input gives equal bytes."""
    if "tensors" in header:
        raise ValueError("the tensor table is made by the writer")
    table: dict[str, Any] = {}
    payloads: list[tuple[int, bytes]] = []
    end = 0
    for name, tensor in tensors.items():
        expected = NUMPY_DTYPES[tensor.dtype]
        if tensor.array.dtype != expected:
            raise ValueError(f"{name}: {tensor.dtype} is held as {expected}, "
                             f"not {tensor.array.dtype}")
        data = np.ascontiguousarray(tensor.array).tobytes()
        offset = round_up(end, tensor_alignment(len(data)))
        table[name] = {
            "dtype": tensor.dtype,
            "shape": [int(size) for size in tensor.array.shape],
            "offset": offset,
            "bytes": len(data),
            "checksum": f"{xxh3_64(data):016x}",
        }
        payloads.append((offset, data))
        end = offset + len(data)

    # "goldens" goes last so that a reader of the raw header meets the tensor table first.
    ordered = {key: value for key, value in header.items() if key != "goldens"}
    ordered["tensors"] = table
    if "goldens" in header:
        ordered["goldens"] = header["goldens"]
    text = json.dumps(ordered, separators=(",", ":"), allow_nan=False).encode("utf-8")
    data_start = round_up(PREFIX_BYTES + len(text), PAGE_BYTES)
    content = bytearray(data_start + end)
    content[:PREFIX_BYTES] = MAGIC + struct.pack("<IQQQ", VERSION, len(text), xxh3_64(text), 0)
    content[PREFIX_BYTES:PREFIX_BYTES + len(text)] = text
    for offset, data in payloads:
        content[data_start + offset:data_start + offset + len(data)] = data
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _require(condition: bool, path: Path, message: str) -> None:
    if not condition:
        raise KdtrError(f"{path}: {message}")


def _require_zero(content: bytes, begin: int, end: int, path: Path) -> None:
    _require(not any(content[begin:end]), path, f"bytes {begin} to {end} must be zero padding")


def _read_header(content: bytes, path: Path) -> tuple[dict[str, Any], int]:
    """Checks the prefix and the JSON header; returns the header and data_start."""
    _require(len(content) >= PREFIX_BYTES, path, f"only {len(content)} bytes, no room for a prefix")
    _require(content[:4] == MAGIC, path, f"magic is {content[:4]!r}, not {MAGIC!r}")
    version, header_bytes, checksum, reserved = struct.unpack("<IQQQ", content[4:PREFIX_BYTES])
    _require(version == VERSION, path, f"version is {version}, this reader knows {VERSION}")
    _require(reserved == 0, path, f"bytes 24-31 hold {reserved}, not zero")
    header_end = PREFIX_BYTES + header_bytes
    _require(header_end <= len(content), path,
             f"header ends at byte {header_end}, the file at {len(content)}")
    text = content[PREFIX_BYTES:header_end]
    actual = xxh3_64(text)
    _require(actual == checksum, path,
             f"header checksum is {actual:016x}, the prefix says {checksum:016x}")
    try:
        header = json.loads(text.decode("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise KdtrError(f"{path}: header is not UTF-8 JSON: {error}") from error
    _require(isinstance(header, dict) and isinstance(header.get("tensors"), dict), path,
             "header holds no tensor table")
    data_start = round_up(header_end, PAGE_BYTES)
    _require_zero(content, header_end, min(data_start, len(content)), path)
    return header, data_start


def read_kdtr(path: Path) -> Bundle:
    """Reads a bundle and verifies its layout and every checksum; raises KdtrError otherwise."""
    path = Path(path)
    content = path.read_bytes()
    header, data_start = _read_header(content, path)
    table = header.pop("tensors")
    tensors: dict[str, Tensor] = {}
    end = data_start
    for name, entry in sorted(table.items(), key=lambda item: item[1]["offset"]):
        dtype, shape = entry["dtype"], entry["shape"]
        offset, num_bytes = entry["offset"], entry["bytes"]
        _require(dtype in NUMPY_DTYPES, path, f"{name}: unknown dtype {dtype}")
        numpy_dtype = NUMPY_DTYPES[dtype]
        shape_bytes = int(np.prod(shape, dtype=np.int64)) * numpy_dtype.itemsize
        _require(num_bytes == shape_bytes, path,
                 f"{name}: {num_bytes} bytes, but shape {shape} of {dtype} takes {shape_bytes}")
        _require(offset % tensor_alignment(num_bytes) == 0, path,
                 f"{name}: offset {offset} is not a multiple of {tensor_alignment(num_bytes)}")
        begin = data_start + offset
        _require(begin >= end, path, f"{name}: starts at {begin}, inside the tensor before it")
        _require(begin + num_bytes <= len(content), path,
                 f"{name}: ends at {begin + num_bytes}, the file at {len(content)}")
        _require_zero(content, end, begin, path)
        data = content[begin:begin + num_bytes]
        actual = f"{xxh3_64(data):016x}"
        _require(actual == entry["checksum"], path,
                 f"{name}: checksum is {actual}, the header says {entry['checksum']}")
        tensors[name] = Tensor(dtype, np.frombuffer(data, dtype=numpy_dtype).reshape(shape))
        end = begin + num_bytes
    _require(len(content) == end, path, f"{len(content)} bytes, the last tensor ends at {end}")
    return Bundle(header, tensors)
