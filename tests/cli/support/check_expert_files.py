#!/usr/bin/env python3
"""Checks the files about experts that kdtree generate writes.

    check_expert_files.py loads BUNDLE LOADS RESULTS      counts against the rows of --dump-steps
    check_expert_files.py placement BUNDLE PLACEMENT RANKS SLOTS
"""

import json
import sys
from pathlib import Path
from typing import Any

from kdtr import read_kdtr


def require(condition: bool, text: str) -> None:
    if not condition:
        sys.exit(f"check_expert_files: {text}")


def read_layers(path: str, kind: str, config: dict[str, Any]) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8") as stream:
        file = json.load(stream)
    require(file["format"] == kind and file["version"] == 1, f"{file['format']} {file['version']}")
    for key in ("num_hidden_layers", "n_routed_experts"):
        require(file[key] == config[key], f"{key} is {file[key]}")
    numbers = list(range(config["first_k_dense_replace"], config["num_hidden_layers"]))
    require([layer["layer"] for layer in file["layers"]] == numbers, "other layers")
    return file["layers"]


def check_loads(config: dict[str, Any], path: str, results: str) -> None:
    """Every row of a prompt and every node of a tree counts, padding does not."""
    rows = 0
    for line in Path(results).read_text(encoding="utf-8").splitlines():
        result = json.loads(line)
        rows += len(result["prompt_ids"]) + sum(len(step["parents"]) for step in result["steps"])
    require(rows > 0, "no rows")
    for layer in read_layers(path, "kdtree-expert-load", config):
        counts = layer["counts"]
        require(len(counts) == config["n_routed_experts"] and min(counts) >= 0, f"counts {counts}")
        expected = rows * config["num_experts_per_tok"]
        require(sum(counts) == expected, f"{sum(counts)} choices, expected {expected}")
        require(max(counts) <= rows, f"an expert was chosen {max(counts)} times by {rows} rows")


def check_placement(config: dict[str, Any], path: str, ranks: int, slots: int) -> None:
    for layer in read_layers(path, "kdtree-expert-placement", config):
        require(len(layer["slots"]) == ranks, f"{len(layer['slots'])} ranks")
        placed = [expert for rank in layer["slots"] for expert in rank]
        require(len(placed) == slots, f"{len(placed)} slots")
        require(set(placed) == set(range(config["n_routed_experts"])), f"experts {set(placed)}")
        require(all(len(set(rank)) == len(rank) for rank in layer["slots"]), "twice on a rank")


def main() -> None:
    kind, bundle, path, *rest = sys.argv[1:]
    config = read_kdtr(Path(bundle)).header["target"]["config"]
    if kind == "loads":
        check_loads(config, path, rest[0])
    else:
        check_placement(config, path, int(rest[0]), int(rest[1]))


if __name__ == "__main__":
    main()
