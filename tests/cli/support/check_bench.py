"""Checks the JSON lines of kdtree bench kernels: valid, complete, consistent. No time is judged.

    python3 check_bench.py RESULTS [--all | --kernels LIST] --rows LIST [--prefix LIST] [--ranks N]
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

KEYS = ["kernel", "shape", "dtype", "rows", "copies", "weight_bytes", "cache_bytes",
        "activation_bytes", "bytes", "flops", "median_us", "min_us", "max_us", "gb_per_s",
        "tflop_per_s", "share_of_ceiling", "check", "model", "ranks", "seed", "repeats", "backend",
        "threads", "host", "device", "version", "commit", "compiler", "build_type", "cuda"]
DEVICE_KEYS = ["name", "architecture", "uuid", "driver_cuda", "num_processors", "memory_bytes",
               "cache_bytes"]
CEILING = "sum_words"
KERNELS = ["linear", "experts", "tree_attention", "absorb_query", "expand_value", "rope",
           "rms_norm", "add_rms_norm", "swiglu", "router", "top_k", "log_sum_exp_partials",
           "merge_top_k", "build_trees", "expand_trees", "accept", "compact"]
WITH_WEIGHTS = {"linear", "experts", "absorb_query", "expand_value"}
# Their rows follow from budgets and sequences, not from --rows.
OWN_ROWS = {CEILING, "build_trees", "expand_trees", "accept", "compact"}

Line = dict[str, Any]


def require(condition: bool, text: str) -> None:
    if not condition:
        raise SystemExit(f"check_bench: {text}")


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def check_line(line: Line, where: str) -> None:
    require(list(line) == KEYS, f"{where}: keys are {list(line)}")
    require(list(line["device"]) == DEVICE_KEYS, f"{where}: device {line['device']}")
    require(line["device"]["name"] != "" and line["device"]["num_processors"] > 0,
            f"{where}: device {line['device']}")
    require(line["backend"] == "cpu" and line["dtype"] == "fp32", f"{where}: backend and dtype")
    require(line["model"] == "tiny", f"{where}: model {line['model']}")
    require(isinstance(line["shape"], dict) and line["shape"] != {}, f"{where}: no shape")
    require(line["rows"] > 0 and line["copies"] > 0, f"{where}: rows and copies")
    parts = [line["weight_bytes"], line["cache_bytes"], line["activation_bytes"]]
    require(line["bytes"] == sum(parts) > 0 and min(parts) >= 0, f"{where}: bytes {parts}")
    # Of one rank of several a list may name no expert at all.
    require(line["kernel"] not in WITH_WEIGHTS or line["weight_bytes"] > 0 or line["ranks"] > 1,
            f"{where}: no weights")
    times = [line["min_us"], line["median_us"], line["max_us"]]
    require(times == sorted(times) and times[0] >= 0, f"{where}: times {times}")
    for key in ("gb_per_s", "tflop_per_s", "share_of_ceiling", "flops"):
        require(math.isfinite(line[key]) and line[key] >= 0, f"{where}: {key} is {line[key]}")
    check = line["check"]
    require(list(check) == ["max_error_over_bound", "compared"], f"{where}: check {check}")
    require(0 <= check["max_error_over_bound"] <= 1 and check["compared"] > 0,
            f"{where}: check {check}")


def check_coverage(lines: list[Line], kernels: list[str], rows: list[int]) -> None:
    require(lines[0]["kernel"] == CEILING and lines[0]["share_of_ceiling"] == 1,
            "the plain read does not come first")
    found = {line["kernel"] for line in lines[1:]}
    require(found == set(kernels), f"kernels are {sorted(found)}, expected {sorted(kernels)}")
    for kernel in found - OWN_ROWS:
        measured = {line["rows"] for line in lines if line["kernel"] == kernel}
        require(set(rows) <= measured, f"{kernel}: rows are {sorted(measured)}")
    cases = [(line["kernel"], json.dumps(line["shape"]), line["rows"]) for line in lines]
    require(len(set(cases)) == len(cases), "a case twice")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("results")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--kernels", default="")
    parser.add_argument("--rows", required=True)
    parser.add_argument("--prefix")
    parser.add_argument("--ranks", type=int, default=1)
    arguments = parser.parse_args()

    text = Path(arguments.results).read_text(encoding="utf-8")
    require(text.endswith("\n"), "does not end with a line")
    lines = [json.loads(line) for line in text.splitlines()]
    for number, line in enumerate(lines):
        where = f"line {number} ({line.get('kernel')})"
        check_line(line, where)
        require(line["ranks"] == arguments.ranks, f"{where}: ranks {line['ranks']}")
    kernels = KERNELS if arguments.all else arguments.kernels.split(",")
    check_coverage(lines, kernels, numbers(arguments.rows))
    if arguments.prefix:
        prefixes = {line["shape"]["prefix"] for line in lines if line["kernel"] == "tree_attention"}
        require(prefixes == set(numbers(arguments.prefix)), f"prefixes are {prefixes}")


if __name__ == "__main__":
    main()
