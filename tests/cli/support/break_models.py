"""Writes broken copies of the test models, each wrong in one way, and some that are merely unusual.

    python3 break_models.py TEST_DATA GOLDENS OUTPUT
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import struct
import sys
from pathlib import Path
from typing import Any, Callable

import numpy as np

from checkpoint_ref import INDEX_NAME, read_safetensors, write_safetensors
from kdtr import PREFIX_BYTES, Bundle, Tensor, read_kdtr, round_up, write_kdtr, xxh3_64

Header = dict[str, Any]
Tensors = dict[str, Tensor]


def rewrite(bundle: Bundle, path: Path, change: Callable[[Header, Tensors], None]) -> None:
    """A bundle that is valid as a file, with a changed header or table."""
    header = copy.deepcopy(bundle.header)
    tensors = dict(bundle.tensors)
    change(header, tensors)
    write_kdtr(path, header, tensors)


def raw_header(content: bytes) -> Header:
    (header_bytes,) = struct.unpack("<Q", content[8:16])
    return json.loads(content[PREFIX_BYTES:PREFIX_BYTES + header_bytes])


def flip_tensor(source: Path, path: Path, name: str) -> None:
    """Flips a bit in the last byte of a tensor, behind the back of its checksum."""
    content = bytearray(source.read_bytes())
    (header_bytes,) = struct.unpack("<Q", content[8:16])
    entry = raw_header(bytes(content))["tensors"][name]
    data_start = round_up(PREFIX_BYTES + header_bytes, 4096)
    content[data_start + entry["offset"] + entry["bytes"] - 1] ^= 1
    path.write_bytes(content)


def raw_bundle(path: Path, text: bytes) -> None:
    """A bundle whose header is any text, with a right checksum."""
    prefix = b"KDTR" + struct.pack("<IQQQ", 1, len(text), xxh3_64(text), 0)
    path.write_bytes(prefix + text)


def break_files(source: Path, out: Path) -> None:
    """What is wrong with the bundle as a file."""
    content = source.read_bytes()
    (header_bytes,) = struct.unpack("<Q", content[8:16])

    def patched(name: str, offset: int, data: bytes) -> None:
        (out / name).write_bytes(content[:offset] + data + content[offset + len(data):])

    (out / "empty.kdtr").write_bytes(b"")
    (out / "prefix.kdtr").write_bytes(content[:20])
    (out / "header.kdtr").write_bytes(content[:PREFIX_BYTES + header_bytes // 2])
    (out / "data.kdtr").write_bytes(content[:len(content) - 1000])
    (out / "longer.kdtr").write_bytes(content + b"\0")
    patched("magic.kdtr", 0, b"GGUF")
    patched("version.kdtr", 4, struct.pack("<I", 2))
    patched("huge_header.kdtr", 8, struct.pack("<Q", 2**63))
    patched("header_checksum.kdtr", PREFIX_BYTES + 40, b"#")
    raw_bundle(out / "no_json.kdtr", b"{never JSON")
    raw_bundle(out / "no_tensors.kdtr", b"{}")
    flip_tensor(source, out / "split_checksum.kdtr", "model.layers.0.mlp.down_proj.weight")
    flip_tensor(source, out / "expert_checksum.kdtr", "model.layers.1.mlp.experts.7.up_proj.weight")
    flip_tensor(source, out / "norm_checksum.kdtr", "model.norm.weight")
    flip_tensor(source, out / "drafter_checksum.kdtr", "drafter.norm.weight")


def break_tensors(tiny: Bundle, int4: Bundle, out: Path) -> None:
    """What is wrong with the tensors or the bundle's own keys."""
    def reshape(_: Header, tensors: Tensors) -> None:
        tensor = tensors["model.norm.weight"]
        tensors["model.norm.weight"] = Tensor(tensor.dtype, tensor.array.reshape(2, -1))

    def retype(_: Header, tensors: Tensors) -> None:
        tensor = tensors["lm_head.weight"]
        tensors["lm_head.weight"] = Tensor("I32", tensor.array.astype(np.int32))

    def unsupported_type(_: Header, tensors: Tensors) -> None:
        tensor = tensors["lm_head.weight"]
        tensors["lm_head.weight"] = Tensor("F64", tensor.array.astype(np.float64))

    def remove(_: Header, tensors: Tensors) -> None:
        del tensors["model.layers.2.mlp.gate.weight"]

    def add(_: Header, tensors: Tensors) -> None:
        tensors["model.layers.1.self_attn.surprise.weight"] = tensors["model.norm.weight"]

    def only_scales(_: Header, tensors: Tensors) -> None:
        del tensors["model.layers.1.mlp.experts.3.up_proj.weight.qw"]

    def group_size(size: Any) -> Callable[[Header, Tensors], None]:
        def change(header: Header, _: Tensors) -> None:
            header["quantization"]["group_size"] = size
        return change

    def no_drafter(header: Header, tensors: Tensors) -> None:
        del header["drafter"]
        for name in [name for name in tensors if name.startswith("drafter.")]:
            del tensors[name]

    def only_quantized(header: Header, tensors: Tensors) -> None:
        for name in [name for name in tensors if name + ".qw" in tensors]:
            del tensors[name]
        del header["goldens"]["original"]

    def other_golden(header: Header, _: Tensors) -> None:
        header["goldens"]["original"]["cases"][1]["greedy_ids"][7] ^= 1

    def bad_golden(header: Header, _: Tensors) -> None:
        header["goldens"]["original"]["cases"][0]["prompt_ids"] = "one, two"

    rewrite(tiny, out / "shape.kdtr", reshape)
    rewrite(tiny, out / "dtype.kdtr", retype)
    rewrite(tiny, out / "unsupported_dtype.kdtr", unsupported_type)
    rewrite(tiny, out / "missing_tensor.kdtr", remove)
    rewrite(tiny, out / "unknown_tensor.kdtr", add)
    rewrite(int4, out / "only_scales.kdtr", only_scales)
    rewrite(int4, out / "group_size_7.kdtr", group_size(7))
    rewrite(int4, out / "group_size_24.kdtr", group_size(24))
    rewrite(int4, out / "group_size_text.kdtr", group_size("16"))
    rewrite(tiny, out / "no_drafter.kdtr", no_drafter)
    rewrite(int4, out / "only_quantized.kdtr", only_quantized)
    rewrite(tiny, out / "other_golden.kdtr", other_golden)
    rewrite(tiny, out / "bad_golden.kdtr", bad_golden)


def break_configs(tiny: Bundle, out: Path) -> None:
    """What is wrong with the configs inside a bundle."""
    def target(key: str, value: Any) -> Callable[[Header, Tensors], None]:
        def change(header: Header, _: Tensors) -> None:
            header["target"]["config"][key] = value
        return change

    def drafter(key: str, value: Any) -> Callable[[Header, Tensors], None]:
        def change(header: Header, _: Tensors) -> None:
            config = header["drafter"]["config"]
            (config["dflash_config"] if key in config["dflash_config"] else config)[key] = value
        return change

    def remove(key: str) -> Callable[[Header, Tensors], None]:
        def change(header: Header, _: Tensors) -> None:
            del header["target"]["config"][key]
        return change

    rewrite(tiny, out / "architecture.kdtr", target("architectures", ["LlamaForCausalLM"]))
    rewrite(tiny, out / "missing_key.kdtr", remove("kv_lora_rank"))
    rewrite(tiny, out / "key_type.kdtr", target("hidden_size", "wide"))
    rewrite(tiny, out / "eos_type.kdtr", target("eos_token_id", {"id": 1}))
    rewrite(tiny, out / "draft_hidden.kdtr", drafter("hidden_size", 64))
    rewrite(tiny, out / "draft_tap.kdtr", drafter("target_layer_ids", [0, 3]))
    rewrite(tiny, out / "draft_vocabulary.kdtr", drafter("vocab_size", 640))
    rewrite(tiny, out / "draft_mask.kdtr", drafter("mask_token_id", 320))
    # Not wrong: without the key there is no limit to check against.
    rewrite(tiny, out / "no_position_limit.kdtr", remove("max_position_embeddings"))


def copied(source: Path, path: Path) -> Path:
    shutil.copytree(source, path)
    return path


def edit_config(directory: Path, change: Callable[[Header], None]) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    change(config)
    path.write_text(json.dumps(config), encoding="utf-8")


def shard_of(directory: Path, tensor: str) -> str:
    """The file of a directory that holds the tensor."""
    index = json.loads((directory / INDEX_NAME).read_text(encoding="utf-8"))
    return index["weight_map"][tensor]


def break_directories(goldens: Path, out: Path) -> None:
    """What is wrong with Hugging Face directories."""
    kimi = goldens / "kimi_nested_int4"
    plain = goldens / "dflash_trained_bf16" / "target"
    draft = goldens / "dflash_trained_bf16" / "draft"

    (copied(plain, out / "dir_no_config") / "config.json").unlink()
    (copied(plain, out / "dir_config_no_json") / "config.json").write_text("{ model: ")
    (copied(plain, out / "dir_no_weights") / "model.safetensors").unlink()
    garbage = copied(plain, out / "dir_garbage") / "model.safetensors"
    garbage.write_bytes(struct.pack("<Q", 64) + b"\xff" * 4096)
    long_header = copied(plain, out / "dir_long_header") / "model.safetensors"
    long_header.write_bytes(b"\xff" * 4096)
    (copied(kimi, out / "dir_no_shard") / "model-00002-of-000003.safetensors").unlink()

    # A tensor that the index places in a shard, taken out of it.
    lacking = copied(kimi, out / "dir_lacking")
    shard = lacking / "model-00001-of-000003.safetensors"
    tensors = read_safetensors(shard)
    del tensors["language_model.model.norm.weight" if
                "language_model.model.norm.weight" in tensors else sorted(tensors)[0]]
    write_safetensors(shard, tensors)

    index = copied(kimi, out / "dir_index_path") / INDEX_NAME
    entries = json.loads(index.read_text(encoding="utf-8"))
    entries["weight_map"][sorted(entries["weight_map"])[0]] = "../elsewhere.safetensors"
    index.write_text(json.dumps(entries), encoding="utf-8")

    def raw_header_change(name: str, change: Callable[[bytes], bytes]) -> None:
        """The header's text changed at the same length, or the data behind it."""
        file = copied(plain, out / name) / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    def moved(begin: int, end: int) -> Callable[[bytes], bytes]:
        """The second tensor's offsets are moved."""
        def change(content: bytes) -> bytes:
            (size,) = struct.unpack("<Q", content[:8])
            header = json.loads(content[8:8 + size])
            names = [name for name in header if name != "__metadata__"]
            second = sorted(names, key=lambda name: header[name]["data_offsets"])[1]
            offsets = header[second]["data_offsets"]
            header[second]["data_offsets"] = [offsets[0] + begin, offsets[1] + end]
            text = json.dumps(header).encode("utf-8")
            return struct.pack("<Q", len(text)) + text + content[8 + size:]
        return change

    def twice(content: bytes) -> bytes:
        (size,) = struct.unpack("<Q", content[:8])
        text = b'{"__metadata__":{},' + content[9:8 + size]
        return struct.pack("<Q", len(text)) + text + content[8 + size:]

    raw_header_change("dir_overlap", moved(-2, -2))
    raw_header_change("dir_hole", moved(2, 2))
    raw_header_change("dir_wrong_size", moved(0, 2))
    raw_header_change("dir_truncated", lambda content: content[:-2])
    raw_header_change("dir_twice", twice)

    def tensor_change(source: Path, name: str, file: str,
                      change: Callable[[Tensors], None]) -> None:
        """A directory that is valid as a file, with a changed tensor."""
        path = copied(source, out / name) / file
        tensors = read_safetensors(path)
        change(tensors)
        write_safetensors(path, tensors)

    def scale(tensor: str, place: tuple[int, int], value: float) -> Callable[[Tensors], None]:
        """One scale becomes `value`."""
        def change(tensors: Tensors) -> None:
            array = tensors[tensor].array.copy()
            wide = np.float32(value)
            array[place] = wide.view(np.uint32) >> 16 if array.dtype == np.uint16 else wide
            tensors[tensor] = Tensor(tensors[tensor].dtype, array)
        return change

    def replaced(tensor: str, make: Callable[[np.ndarray], np.ndarray],
                 dtype: str | None = None) -> Callable[[Tensors], None]:
        def change(tensors: Tensors) -> None:
            old = tensors[tensor]
            tensors[tensor] = Tensor(dtype or old.dtype, make(old.array))
        return change

    fp8 = goldens / "deepseek_v3_fp8_groups"
    expert = "language_model.model.layers.2.mlp.experts.0.down_proj.weight"
    shard = shard_of(kimi, expert + "_scale")
    blocks = "model.layers.0.mlp.down_proj.weight_scale_inv"
    whole = "model.safetensors"
    for name, value in (("nan", np.nan), ("infinite", np.inf), ("negative", -0.5)):
        tensor_change(kimi, f"dir_int4_{name}", shard, scale(expert + "_scale", (3, 1), value))
        tensor_change(fp8, f"dir_fp8_{name}", whole, scale(blocks, (1, 0), value))
    tensor_change(kimi, "dir_int4_scale_shape", shard,
                  replaced(expert + "_scale", lambda array: array.reshape(2, -1)))
    tensor_change(fp8, "dir_fp8_scale_shape", whole, replaced(blocks, lambda array: array[:1]))
    tensor_change(kimi, "dir_weight_shape", shard_of(kimi, expert + "_shape"),
                  replaced(expert + "_shape", lambda array: array[::-1].copy()))
    tensor_change(fp8, "dir_dtype_f64", whole,
                  replaced("model.norm.weight", lambda array: array.astype(np.float64), "F64"))
    raw_header_change("dir_dtype_unknown",
                      lambda content: content.replace(b'"dtype":"BF16"', b'"dtype":"BF61"', 1))

    def first_entry(key: str, value: Any) -> Callable[[bytes], bytes]:
        """Another value under a key of the first tensor's entry."""
        def change(content: bytes) -> bytes:
            (size,) = struct.unpack("<Q", content[:8])
            header = json.loads(content[8:8 + size])
            names = [name for name in header if name != "__metadata__"]
            header[min(names, key=lambda name: header[name]["data_offsets"])][key] = value
            text = json.dumps(header).encode("utf-8")
            return struct.pack("<Q", len(text)) + text + content[8 + size:]
        return change

    raw_header_change("dir_shape_overflow", first_entry("shape", [2**40, 2**40]))
    raw_header_change("dir_shape_negative", first_entry("shape", [-1, -16]))
    raw_header_change("dir_offset_negative", first_entry("data_offsets", [-2, 62]))
    raw_header_change("dir_offset_float", first_entry("data_offsets", [0.0, 64.0]))
    raw_header_change("dir_offset_text", first_entry("data_offsets", ["0", "64"]))
    raw_header_change("dir_name_bytes",
                      lambda content: content.replace(b'"model.norm.weight"',
                                                      b'"model.n\xffrm.weight"', 1))
    raw_header_change("dir_empty_file", lambda content: b"")

    def index_change(name: str, change: Callable[[Header], None]) -> None:
        path = copied(kimi, out / name) / INDEX_NAME
        entries = json.loads(path.read_text(encoding="utf-8"))
        change(entries)
        path.write_text(json.dumps(entries), encoding="utf-8")

    index_change("dir_index_list", lambda entries: entries.update(weight_map=[]))
    index_change("dir_index_number",
                 lambda entries: entries["weight_map"].update({min(entries["weight_map"]): 3}))
    index_change("dir_index_absolute", lambda entries: entries["weight_map"].update(
        {min(entries["weight_map"]): "/shard.safetensors"}))

    # What stands where a file should.
    directory = copied(plain, out / "dir_directory") / "model.safetensors"
    directory.unlink()
    directory.mkdir()
    for source, name, file in ((plain, "dir_pipe", "model.safetensors"),
                               (kimi, "dir_pipe_shard", "model-00002-of-000003.safetensors")):
        pipe = copied(source, out / name) / file
        pipe.unlink()
        os.mkfifo(pipe)
    os.mkfifo(out / "pipe.kdtr")
    link = copied(plain, out / "dir_end_link") / "generation_config.json"
    link.unlink(missing_ok=True)
    link.symlink_to("nowhere")

    def config_change(name: str, **values: Any) -> None:
        edit_config(copied(plain, out / name), lambda config: config.update(values))

    yarn = {"type": "yarn", "factor": 0, "original_max_position_embeddings": 64}
    config_change("dir_few_tokens", vocab_size=511)
    config_change("dir_no_experts", n_routed_experts=0)
    config_change("dir_top_k", num_experts_per_tok=17)
    config_change("dir_rope_factor", rope_scaling=yarn)
    config_change("dir_end_beyond", eos_token_id=512)
    config_change("dir_eps_nan", rms_norm_eps=float("nan"))

    def group_size(config: Header) -> None:
        text = config.get("text_config", config)
        quantization = text.get("quantization_config") or config["quantization_config"]
        quantization["config_groups"]["group_0"]["weights"]["group_size"] = 48

    edit_config(copied(kimi, out / "dir_group_size"), group_size)

    def architecture(name: str) -> Callable[[Header], None]:
        return lambda config: config.update(architectures=[name])

    def kernel(config: Header) -> None:
        config["dflash_config"]["conv_kernel_size"] = 3

    edit_config(copied(draft, out / "draft_dflash2"), architecture("DFlash2DraftModel"))
    edit_config(copied(draft, out / "draft_domino"), architecture("DominoDraftModel"))
    edit_config(copied(draft, out / "draft_eagle3"), architecture("LlamaForCausalLMEagle3"))
    edit_config(copied(draft, out / "draft_kernel"), kernel)
    edit_config(copied(draft, out / "draft_projector"),
                lambda config: config["dflash_config"].update(projector_type="domino"))


def main() -> None:
    data, goldens, out = (Path(argument) for argument in sys.argv[1:])
    out.mkdir(parents=True, exist_ok=True)
    tiny_path = data / "model_tiny.kdtr"
    tiny, int4 = read_kdtr(tiny_path), read_kdtr(data / "model_int4_tiny2.kdtr")
    break_files(tiny_path, out)
    break_tensors(tiny, int4, out)
    break_configs(tiny, out)
    break_directories(goldens, out)


if __name__ == "__main__":
    main()
