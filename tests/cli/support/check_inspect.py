"""Compares what kdtree inspect printed with the checkpoint itself.

    python3 check_inspect.py MODEL JSON [TEXT]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from checkpoint_ref import PREFIX, is_ignored, read_stored_tensors
from config_ref import text_config
from kdtr import Tensor, read_kdtr


def require(condition: bool, text: str) -> None:
    if not condition:
        raise SystemExit(f"check_inspect: {text}")


def used_tensors(config: dict[str, Any], stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under canonical names, without those that the engine has no use for."""
    named = {name.removeprefix(PREFIX): tensor for name, tensor in stored.items()}
    layers = int(text_config(config)["num_hidden_layers"])
    return {name: tensor for name, tensor in named.items() if not is_ignored(name, layers)}


def parts_of(model: Path) -> dict[str, tuple[dict[str, Any], dict[str, Tensor]]]:
    """Config and tensors of "target" and "drafter", under canonical names."""
    if model.is_file():
        bundle = read_kdtr(model)
        tensors = {name: tensor for name, tensor in bundle.tensors.items()
                   if not name.startswith("files/")}
        parts = {}
        for part in ("target", "drafter"):
            if part in bundle.header:
                config = bundle.header[part]["config"]
                chosen = {name.removeprefix("drafter."): tensor for name, tensor in tensors.items()
                          if name.startswith("drafter.") == (part == "drafter")}
                if part == "target":
                    chosen = used_tensors(config, chosen)
                parts[part] = (config, chosen)
        return parts
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    kept = used_tensors(config, read_stored_tensors(model))
    if config["architectures"] == ["DFlashDraftModel"]:
        return {"drafter": (config, {name.removeprefix("model."): tensor
                                     for name, tensor in kept.items()})}
    return {"target": (config, kept)}


def check_part(part: dict[str, Any], config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    require(part["config"] == config, "another config")
    table = part["tensors"]
    listed = {entry["name"]: (entry["dtype"], entry["shape"], entry["bytes"])
              for entry in table["list"]}
    expected = {name: (tensor.dtype, list(tensor.array.shape), tensor.array.nbytes)
                for name, tensor in tensors.items()}
    require(listed == expected, f"tensors differ: {sorted(set(listed) ^ set(expected))[:5]}")
    total = sum(tensor.array.nbytes for tensor in tensors.values())
    require((table["count"], table["bytes"]) == (len(tensors), total), "count or bytes")
    sums = table["by_dtype"].values()
    require(sum(entry["tensors"] for entry in sums) == len(tensors)
            and sum(entry["bytes"] for entry in sums) == total, f"by_dtype is {table['by_dtype']}")


def check_target(model: Path, target: dict[str, Any]) -> None:
    header = read_kdtr(model).header if model.is_file() else {}
    goldens = {weights: len(golden["cases"])
               for weights, golden in header.get("goldens", {}).items()}
    require(target["golden_cases"] == goldens, f"golden_cases is {target['golden_cases']}")
    if header:
        size = header.get("quantization", {}).get("group_size", 0)
        require(target["quantization_group_size"] == size, "quantization_group_size")


def main() -> None:
    model = Path(sys.argv[1])
    report = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    require(report["path"] == str(model), f"path is {report['path']}")
    parts = parts_of(model)
    keys = {"path", *parts}
    if model.is_file():
        keys.add("bundle")
        files = [{"name": name.removeprefix("files/"), "bytes": tensor.array.nbytes}
                 for name, tensor in sorted(read_kdtr(model).tensors.items())
                 if name.startswith("files/")]
        require(report["bundle"] == {"files": files}, f"bundle is {report['bundle']}")
    require(set(report) == keys, f"keys are {list(report)}")
    for name, (config, tensors) in parts.items():
        check_part(report[name], config, tensors)
    if "target" in report:
        check_target(model, report["target"])
    if len(sys.argv) > 3:
        text = Path(sys.argv[3]).read_text(encoding="utf-8")
        require(text.startswith(f"{model}\n"), "the text does not begin with the path")
        for part in parts:
            require(f"\n{part}\n" in text, f"the text has no {part}")
            for entry in report[part]["tensors"]["list"]:
                require(entry["name"] in text, f"the text lacks {entry['name']}")


if __name__ == "__main__":
    main()
