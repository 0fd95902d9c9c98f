"""Reader and writer of Hugging Face checkpoint directories, with numpy only.

Reads config.json and safetensors files (one, or shards with an index) of bf16, f32, f16, integer,
fp8 E4M3 with 128x128 block scales, and compressed-tensors pack-quantized INT4 weights; everything
comes back as float32 under the names without a `language_model.` prefix.
"""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from config_ref import text_config
from kdtr import NUMPY_DTYPES, Tensor
from number_formats import (FP8_E4M3_VALUES, bf16_from_float32, dequantize_fp8_blocks,
                            dequantize_w4a16, float32_from_bf16, quantize_w4a16)

INDEX_NAME = "model.safetensors.index.json"
PREFIX = "language_model."
IGNORED_PREFIXES = ("vision_tower.", "mm_projector.")
ROUTED_EXPERT = re.compile(r"model\.layers\.\d+\.mlp\.experts\.\d+\.\w+_proj\.weight")


# --- One safetensors file --------------------------------------------------------------------


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """u64 header size, JSON header, data; offsets count from the end of the header."""
    content = path.read_bytes()
    (header_bytes,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8:8 + header_bytes])
    data = content[8 + header_bytes:]
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        dtype = NUMPY_DTYPES[entry["dtype"]]
        array = np.frombuffer(data[begin:end], dtype=dtype).reshape(entry["shape"])
        tensors[name] = Tensor(entry["dtype"], array)
    return tensors


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Wider types first, then by name, so that every tensor is aligned to its element."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    chunks = []
    offset = 0
    by_alignment = sorted(tensors, key=lambda name: (-tensors[name].array.itemsize, name))
    for name in by_alignment:
        data = np.ascontiguousarray(tensors[name].array).tobytes()
        header[name] = {"dtype": tensors[name].dtype, "shape": list(tensors[name].array.shape),
                        "data_offsets": [offset, offset + len(data)]}
        chunks.append(data)
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(chunks))


def to_float32(tensor: Tensor) -> np.ndarray:
    """Unscaled values of a stored tensor, widened to float32."""
    if tensor.dtype == "BF16":
        return float32_from_bf16(tensor.array)
    if tensor.dtype == "F8_E4M3":
        return FP8_E4M3_VALUES[tensor.array]
    return tensor.array.astype(np.float32)


# --- A directory -----------------------------------------------------------------------------


def read_stored_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint as stored, through the index if there is one."""
    index_path = directory / INDEX_NAME
    if not index_path.exists():
        return read_safetensors(directory / "model.safetensors")
    weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
    tensors: dict[str, Tensor] = {}
    for file_name in sorted(set(weight_map.values())):
        for name, tensor in read_safetensors(directory / file_name).items():
            if weight_map.get(name) != file_name:
                raise ValueError(f"{directory / file_name}: {name} is not so in the index")
            tensors[name] = tensor
    missing = sorted(set(weight_map) - set(tensors))
    if missing:
        raise ValueError(f"{directory}: the index names {missing[0]}, no file holds it")
    return tensors


def is_ignored(name: str, num_hidden_layers: int) -> bool:
    """Vision parts, rotary tables and layers past the last one (multi-token prediction)."""
    if name.startswith(IGNORED_PREFIXES) or name.endswith("rotary_emb.inv_freq"):
        return True
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return layer is not None and int(layer.group(1)) >= num_hidden_layers


def dequantize_stored(tensors: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """Resolves weight_scale_inv and weight_packed / weight_scale into float32 weights."""
    weights = {}
    for name, tensor in tensors.items():
        base, _, kind = name.rpartition(".")
        if kind == "weight_packed":
            scale = to_float32(tensors[base + ".weight_scale"])
            weights[base + ".weight"] = dequantize_w4a16(tensor.array, scale)
        elif kind == "weight" and base + ".weight_scale_inv" in tensors:
            scale = to_float32(tensors[base + ".weight_scale_inv"])
            weights[name] = dequantize_fp8_blocks(tensor.array, scale)
        elif kind not in ("weight_scale", "weight_shape", "weight_scale_inv"):
            weights[name] = to_float32(tensor)
    return weights


def read_hf_directory(directory: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the parsed config.json and the float32 weights of the language model or drafter."""
    directory = Path(directory)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    num_hidden_layers = int(text_config(config)["num_hidden_layers"])
    stored = {name.removeprefix(PREFIX): tensor
              for name, tensor in read_stored_tensors(directory).items()}
    kept = {name: tensor for name, tensor in stored.items()
            if not is_ignored(name, num_hidden_layers)}
    return config, dequantize_stored(kept)


@dataclass(frozen=True)
class HfLayout:
    """How write_hf_directory stores a checkpoint.

    dtype: "BF16" or "F32" for what is not quantised (e_score_correction_bias stays F32).
    int4_group_size: routed experts become pack-quantized INT4 with scales of `dtype`.
    nested: Kimi-K2.5's way, text_config inside config.json and a `language_model.` prefix.
    """

    dtype: str = "BF16"
    num_shards: int = 1
    int4_group_size: int | None = None
    nested: bool = False


def stored_tensors(weights: dict[str, np.ndarray], layout: HfLayout) -> dict[str, Tensor]:
    """The tensors a checkpoint of this layout holds, without prefix."""
    def floating(array: np.ndarray, dtype: str) -> Tensor:
        if dtype == "BF16":
            return Tensor("BF16", bf16_from_float32(array))
        return Tensor("F32", np.ascontiguousarray(array, dtype=np.float32))

    tensors = {}
    for name, weight in weights.items():
        if layout.int4_group_size and ROUTED_EXPERT.fullmatch(name):
            words, scale = quantize_w4a16(weight, layout.int4_group_size, layout.dtype)
            tensors[name + "_packed"] = Tensor("I32", words.view(np.int32))
            tensors[name + "_scale"] = floating(scale, layout.dtype)
            tensors[name + "_shape"] = Tensor("I64", np.array(weight.shape, dtype=np.int64))
        else:
            is_bias = name.endswith("e_score_correction_bias")
            tensors[name] = floating(weight, "F32" if is_bias else layout.dtype)
    return tensors


def quantization_config(group_size: int) -> dict[str, Any]:
    """The compressed-tensors section of a Kimi-K2 checkpoint with INT4 routed experts."""
    weights = {"num_bits": 4, "group_size": group_size, "strategy": "group", "symmetric": True,
               "type": "int", "dynamic": False, "actorder": None, "observer": "minmax"}
    group = {"targets": ["Linear"], "input_activations": None, "output_activations": None,
             "weights": weights}
    ignored = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
               r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
    return {"quant_method": "compressed-tensors", "format": "pack-quantized",
            "quantization_status": "compressed", "kv_cache_scheme": None,
            "config_groups": {"group_0": group}, "ignore": ignored}


def write_hf_directory(directory: Path, config: dict[str, Any], weights: dict[str, np.ndarray],
                       layout: HfLayout = HfLayout()) -> None:
    """Writes config.json and safetensors; config is flat, nesting is the layout's matter."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = dict(config)
    if layout.int4_group_size:
        config["quantization_config"] = quantization_config(layout.int4_group_size)
    if layout.nested:
        config = {"architectures": ["KimiK25ForConditionalGeneration"],
                  "model_type": "kimi_k25", "text_config": config}
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")

    prefix = PREFIX if layout.nested else ""
    tensors = {prefix + name: tensor for name, tensor in stored_tensors(weights, layout).items()}
    if layout.num_shards == 1:
        write_safetensors(directory / "model.safetensors", tensors)
        return
    # Neighbouring tensors go to different shards, so that a reader must follow the index.
    weight_map = {}
    for shard_index in range(layout.num_shards):
        file_name = f"model-{shard_index + 1:05}-of-{layout.num_shards:06}.safetensors"
        names = sorted(tensors)[shard_index::layout.num_shards]
        write_safetensors(directory / file_name, {name: tensors[name] for name in names})
        weight_map.update({name: file_name for name in names})
    total_size = sum(tensor.array.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
