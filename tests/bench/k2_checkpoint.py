#!/usr/bin/env python3
"""Writes a checkpoint with the tensors of Kimi K2.6, as large as the disk has room for.

    k2_checkpoint.py DIRECTORY --size-gb N [--shard-gb N] [--seed N]

One dense layer and as many MoE layers of the real sizes as fit into `size-gb` (10^9 bytes); where
not even one does, experts are left out, then most of the vocabulary and of the dense layer's MLP.
Names, types and layouts are those of the published files: routed experts are INT4 of
compressed-tensors (weight_packed, weight_scale, weight_shape), everything else bf16, within a shard
wider types first and then by name. All weights are random and valid: excerpts of one random block a
kind, at random places of it. Needs little memory. Prints a JSON line with what was written.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
PREFIX = "language_model."
GROUP = 32  # values a scale
BLOCK_BYTES = 64 << 20
DTYPE_BYTES = {"I64": 8, "I32": 4, "F32": 4, "BF16": 2}
# Where the real sizes do not fit.
SMALL_VOCABULARY = 4096
SMALL_INTERMEDIATE = 2048


@dataclass(frozen=True)
class Entry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: str  # of its values: see Values

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * DTYPE_BYTES[self.dtype]


def bf16(values: np.ndarray) -> bytes:
    """Cut, not rounded: the values are random."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()


class Values:
    """Random bytes of every kind, excerpts of one block each."""

    def __init__(self, seed: int):
        self._rng = np.random.default_rng(seed)
        halves = BLOCK_BYTES // 2
        self._blocks = {
            "packed": self._rng.bytes(BLOCK_BYTES),
            "weight": bf16(0.02 * self._rng.standard_normal(halves, np.float32)),
            # Codes reach 8: weights of up to 0.08.
            "scale": bf16(self._rng.uniform(0.001, 0.01, halves)),
            "norm": bf16(1 + 0.1 * self._rng.standard_normal(halves, np.float32)),
            "bias": (0.1 * self._rng.standard_normal(BLOCK_BYTES // 4, np.float32)).tobytes(),
        }

    def write(self, entry: Entry, file: Any) -> None:
        if entry.kind.startswith("shape "):
            file.write(np.array(entry.kind.split()[1:], np.int64).tobytes())
            return
        block = memoryview(self._blocks[entry.kind])
        place = int(self._rng.integers(BLOCK_BYTES // 8)) * 8
        left = entry.num_bytes
        while left > 0:
            part = min(left, BLOCK_BYTES - place)
            file.write(block[place:place + part])
            left -= part
            place = 0


def linear(name: str, rows: int, columns: int) -> Entry:
    return Entry(f"{PREFIX}{name}.weight", "BF16", (rows, columns), "weight")


def norm(name: str, size: int) -> Entry:
    return Entry(f"{PREFIX}{name}.weight", "BF16", (size,), "norm")


def packed(name: str, rows: int, columns: int) -> list[Entry]:
    name = f"{PREFIX}{name}.weight"
    return [Entry(f"{name}_packed", "I32", (rows, columns // 8), "packed"),
            Entry(f"{name}_scale", "BF16", (rows, columns // GROUP), "scale"),
            Entry(f"{name}_shape", "I64", (2,), f"shape {rows} {columns}")]


def mlp(name: str, width: int, hidden: int) -> list[Entry]:
    return [linear(f"{name}.gate_proj", width, hidden), linear(f"{name}.up_proj", width, hidden),
            linear(f"{name}.down_proj", hidden, width)]


def attention(name: str, text: dict[str, Any]) -> list[Entry]:
    hidden, heads, rank = text["hidden_size"], text["num_attention_heads"], text["kv_lora_rank"]
    nope, rope, value = (text[key] for key in
                         ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    query = text["q_lora_rank"]
    return [linear(f"{name}.q_a_proj", query, hidden), norm(f"{name}.q_a_layernorm", query),
            linear(f"{name}.q_b_proj", heads * (nope + rope), query),
            linear(f"{name}.kv_a_proj_with_mqa", rank + rope, hidden),
            norm(f"{name}.kv_a_layernorm", rank),
            linear(f"{name}.kv_b_proj", heads * (nope + value), rank),
            linear(f"{name}.o_proj", hidden, heads * value)]


def experts(name: str, text: dict[str, Any]) -> list[Entry]:
    hidden, width, count = (text[key] for key in
                            ("hidden_size", "moe_intermediate_size", "n_routed_experts"))
    entries = [linear(f"{name}.gate", count, hidden),
               Entry(f"{PREFIX}{name}.gate.e_score_correction_bias", "F32", (count,), "bias"),
               *mlp(f"{name}.shared_experts", width * text["n_shared_experts"], hidden)]
    for expert in range(count):
        place = f"{name}.experts.{expert}"
        entries += packed(f"{place}.gate_proj", width, hidden)
        entries += packed(f"{place}.up_proj", width, hidden)
        entries += packed(f"{place}.down_proj", hidden, width)
    return entries


def all_entries(text: dict[str, Any]) -> list[Entry]:
    hidden = text["hidden_size"]
    entries = []
    for layer in range(text["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        entries += [norm(f"{name}.input_layernorm", hidden),
                    norm(f"{name}.post_attention_layernorm", hidden),
                    *attention(f"{name}.self_attn", text)]
        entries += (mlp(f"{name}.mlp", text["intermediate_size"], hidden)
                    if layer < text["first_k_dense_replace"] else experts(f"{name}.mlp", text))
    return entries + [linear("model.embed_tokens", text["vocab_size"], hidden),
                      norm("model.norm", hidden), linear("lm_head", text["vocab_size"], hidden)]


def total_bytes(text: dict[str, Any], **changes: int) -> int:
    return sum(entry.num_bytes for entry in all_entries({**text, **changes}))


def fit(text: dict[str, Any], size: int) -> dict[str, int]:
    """The changes of config.json with which the tensors take `size` bytes at most."""
    two = total_bytes(text, num_hidden_layers=2)
    layer = total_bytes(text, num_hidden_layers=3) - two
    if two <= size:
        return {"num_hidden_layers": 2 + (size - two) // layer}
    changes = {"num_hidden_layers": 2, "n_routed_experts": text["num_experts_per_tok"]}
    if total_bytes(text, **changes) > size:
        changes |= {"vocab_size": SMALL_VOCABULARY, "intermediate_size": SMALL_INTERMEDIATE,
                    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    least = total_bytes(text, **changes)
    if least > size:
        sys.exit(f"--size-gb {size / 1e9}: expected {least / 1e9:.2f} at least")
    more = {**changes, "n_routed_experts": changes["n_routed_experts"] + 1}
    changes["n_routed_experts"] += (size - least) // (total_bytes(text, **more) - least)
    return changes


def write_shard(path: Path, entries: list[Entry], values: Values) -> None:
    entries = sorted(entries, key=lambda entry: (-DTYPE_BYTES[entry.dtype], entry.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape,
                              "data_offsets": [end, end + entry.num_bytes]}
        end += entry.num_bytes
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(content)) + content)
        for entry in entries:
            values.write(entry, file)


def into_shards(entries: list[Entry], shard_bytes: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        if shards[-1] and filled + entry.num_bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += entry.num_bytes
    return shards


def write_checkpoint(folder: Path, size: int, shard_bytes: int, seed: int) -> dict[str, Any]:
    """What was written, for a JSON line."""
    config = json.loads((ROOT / "configs/models/kimi-k2.6.json").read_text(encoding="utf-8"))
    text = config["text_config"]
    text.update(fit(text, size))
    shards = into_shards(all_entries(text), shard_bytes)
    num_bytes = sum(entry.num_bytes for shard in shards for entry in shard)
    free = shutil.disk_usage(folder).free
    if free < num_bytes + (1 << 30):
        sys.exit(f"{folder}: {free / 1e9:.1f} GB free, {num_bytes / 1e9:.1f} GB and some expected")
    values = Values(seed)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):06}.safetensors"
        write_shard(folder / name, shard, values)
        weight_map |= {entry.name: name for entry in shard}
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    keys = ("num_hidden_layers", "n_routed_experts", "vocab_size", "intermediate_size")
    return {"what": "checkpoint", "bytes": num_bytes, "shards": len(shards),
            "tensors": len(weight_map), **{key: text[key] for key in keys}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size-gb", type=float, required=True)
    parser.add_argument("--shard-gb", type=float, default=5)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    print(json.dumps(write_checkpoint(arguments.directory, int(arguments.size_gb * 1e9),
                                      int(arguments.shard_gb * 1e9), arguments.seed)))


if __name__ == "__main__":
    main()
