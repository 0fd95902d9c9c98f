#!/usr/bin/env python3
"""Checks the files about experts that kdtree generate writes.

    check_expert_files.py loads BUNDLE LOADS RESULTS      counts against the rows of --dump-steps
    check_expert_files.py placement BUNDLE PLACEMENT RANKS SLOTS
    check_expert_files.py exchange BUNDLE COUNTERS RANKS KIND
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


def check_exchange(config: dict[str, Any], path: str, ranks: int, kind: str) -> None:
    """What one rank does not compute another one does; sums send what they must."""
    with open(path, encoding="utf-8") as stream:
        file = json.load(stream)
    require(file["format"] == "kdtree-exchange" and file["version"] == 1, "another format")
    require(file["run"]["exchange"] == kind, f"exchange {file['run']['exchange']}")
    require(file["steps"] > 0, "no steps")
    numbers = list(range(config["first_k_dense_replace"], config["num_hidden_layers"]))
    require([layer["layer"] for layer in file["layers"]] == numbers, "other layers")
    for layer in file["layers"]:
        each = layer["ranks"]
        require(len(each) == ranks, f"{len(each)} ranks")

        def total(name: str, each: list[dict[str, Any]] = each) -> float:
            return sum(rank[name] for rank in each)

        choices = total("expert_rows")
        k = config["num_experts_per_tok"]
        require(choices > 0 and choices % k == 0, f"{choices} choices of {k}")
        rows = choices // k
        require(rows <= total("rows_computed") <= min(ranks, k) * rows, "rows_computed")
        require(file["steps"] <= total("experts_touched") <= choices, "experts_touched")
        require(1 <= layer["load_max_over_mean"] <= ranks, f"load {layer['load_max_over_mean']}")
        require(0 <= layer["waiting_share"] < 1, f"waiting {layer['waiting_share']}")
        require(all(rank["compute_us"] > 0 for rank in each), "no time to compute")
        require(all(rank["combine_us"] >= 0 for rank in each), "combine_us")
        row_bytes = config["hidden_size"] * 4
        if kind != "alltoall":
            require(total("rows_dispatched") == 0, "rows were dispatched")
            expected = 2 * (ranks - 1) * rows * row_bytes
            require(total("bytes_sent") == expected, f"{total('bytes_sent')}, not {expected}")
        else:
            sent = total("rows_dispatched")
            require(0 < sent <= (ranks - 1) * rows, f"{sent} of {rows} rows dispatched")
            least = sent * (2 * row_bytes + 8 * k) + (ranks - 1) * rows * row_bytes
            require(total("bytes_sent") >= least, f"{total('bytes_sent')} of {least} bytes")


def main() -> None:
    kind, bundle, path, *rest = sys.argv[1:]
    config = read_kdtr(Path(bundle)).header["target"]["config"]
    if kind == "exchange":
        check_exchange(config, path, int(rest[0]), rest[1])
    elif kind == "loads":
        check_loads(config, path, rest[0])
    else:
        check_placement(config, path, int(rest[0]), int(rest[1]))


if __name__ == "__main__":
    main()
