"""Checks the JSON lines of kdtree bench acceptance: valid, complete, consistent. No time is judged.

    python3 check_acceptance.py RESULTS --cells plain,chain,tree:4 [--generate CELL=RESULTS]
        [--same-counts RESULTS] [--expect KEY=VALUE ...]

--generate: what kdtree generate --dump-steps gave for the same prompts and cell.
--same-counts: another run's lines, equal in everything that is counted.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

KEYS = ["mode", "tree_budget", "acceptance_length", "per_depth_acceptance",
        "per_depth_given_parent", "nodes_by_branch_rank", "accepted_by_branch_rank",
        "nodes_per_step", "num_prompts", "num_steps", "num_tokens", "tokens_per_step", "seconds",
        "prefill_seconds", "tokens_per_second", "decode_tokens_per_second", "ratio_to_plain",
        "decode_ratio_to_plain", "identical_output", "num_different",
        "num_different_at_near_ties", "near_ties", "stage_mean_ms", "experts", "max_new_tokens",
        "batch_size", "model", "weights", "dtype", "backend", "communicator", "exchange",
        "world_size", "moe_ep", "moe_tp", "attention_tp", "attention_dp", "threads", "host", "load",
        "device", "version", "commit", "compiler"]
EXPERT_KEYS = ["n_routed_experts", "num_experts_per_tok", "mean", "expected_uniform",
               "over_one_row", "layers"]
STAGES = ["draft", "tree_build", "verify", "accept", "commit"]
COMPARED = ["ratio_to_plain", "decode_ratio_to_plain", "identical_output", "num_different",
            "num_different_at_near_ties"]
COUNTED = ["mode", "tree_budget", "acceptance_length", "per_depth_acceptance",
           "per_depth_given_parent", "nodes_by_branch_rank", "accepted_by_branch_rank",
           "nodes_per_step", "num_prompts", "num_steps", "num_tokens", "experts"]

Line = dict[str, Any]


def require(condition: bool, text: str) -> None:
    if not condition:
        raise SystemExit(f"check_acceptance: {text}")


def close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)


def cell_name(line: Line) -> str:
    return line["mode"] + (f":{line['tree_budget']}" if line["tree_budget"] is not None else "")


def check_depths(line: Line, where: str) -> None:
    shares, given = line["per_depth_acceptance"], line["per_depth_given_parent"]
    require(len(shares) == len(given), f"{where}: depths {shares}, {given}")
    above = 1.0
    for share, conditional in zip(shares, given):
        require((conditional is None) == (above == 0), f"{where}: {conditional} behind {above}")
        require(conditional is None or close(share, above * conditional),
                f"{where}: {share} is not {above} * {conditional}")
        above = share
    require(close(line["acceptance_length"], 1 + sum(shares)), f"{where}: acceptance length")


def check_branches(line: Line, where: str) -> None:
    nodes, accepted = line["nodes_by_branch_rank"], line["accepted_by_branch_rank"]
    steps = line["num_steps"]
    require(len(nodes) == len(accepted)
            and all(0 <= a <= n for a, n in zip(accepted, nodes)), f"{where}: {accepted}, {nodes}")
    require(nodes == sorted(nodes, reverse=True), f"{where}: a rank without the one before it")
    require(close(line["nodes_per_step"], 1 + sum(nodes) / steps), f"{where}: nodes a step")
    require(close(line["acceptance_length"], 1 + sum(accepted) / steps), f"{where}: accepted nodes")
    most = {"plain": 1, "chain": 1 + len(line["per_depth_acceptance"])}
    require(line["nodes_per_step"] <= most.get(line["mode"], 1 + (line["tree_budget"] or 0)),
            f"{where}: {line['nodes_per_step']} nodes a step")


def check_experts(line: Line, where: str) -> None:
    experts = line["experts"]
    require(list(experts) == EXPERT_KEYS, f"{where}: experts are {list(experts)}")
    layers, k = experts["layers"], experts["num_experts_per_tok"]
    require(len(layers) > 0, f"{where}: no MoE layer")
    for layer in layers:
        require(list(layer) == ["layer", "mean", "min", "max"], f"{where}: {layer}")
        require(k <= layer["min"] <= layer["mean"] <= layer["max"] <= experts["n_routed_experts"],
                f"{where}: {layer}")
    mean = sum(layer["mean"] for layer in layers) / len(layers)
    require(close(experts["mean"], mean), f"{where}: mean of layers")
    require(close(experts["over_one_row"], mean / k), f"{where}: ratio to one row")
    # A concave function of the nodes of a step: of their mean it is the largest.
    all_experts = experts["n_routed_experts"]
    bound = all_experts * (1 - (1 - k / all_experts) ** line["nodes_per_step"])
    require(k <= experts["expected_uniform"] * (1 + 1e-9)
            and experts["expected_uniform"] <= bound * (1 + 1e-9), f"{where}: expectation")
    if line["mode"] == "plain":
        require(close(mean, k) and close(experts["expected_uniform"], k),
                f"{where}: one row touches {mean} experts, {experts['expected_uniform']} expected")


def check_line(line: Line, where: str, with_plain: bool) -> None:
    require(list(line) == KEYS, f"{where}: keys are {list(line)}")
    check_depths(line, where)
    check_branches(line, where)
    check_experts(line, where)
    require(list(line["stage_mean_ms"]) == STAGES, f"{where}: stages {line['stage_mean_ms']}")
    tokens, steps, prompts = line["num_tokens"], line["num_steps"], line["num_prompts"]
    require(prompts <= tokens <= prompts * line["max_new_tokens"], f"{where}: {tokens} tokens")
    require(close(line["tokens_per_step"], (tokens - prompts) / steps), f"{where}: tokens a step")
    require(0 < line["prefill_seconds"] < line["seconds"], f"{where}: seconds")
    require(close(line["tokens_per_second"], tokens / line["seconds"]), f"{where}: tokens/s")
    require(close(line["decode_tokens_per_second"],
                  (tokens - prompts) / (line["seconds"] - line["prefill_seconds"])),
            f"{where}: decoded tokens/s")
    for key in COMPARED:
        require((line[key] is not None) == with_plain, f"{where}: {key} is {line[key]}")
    if with_plain:
        require(line["identical_output"] is True and line["num_different"] == 0
                and line["num_different_at_near_ties"] == 0, f"{where}: another output than plain")


def check_generated(line: Line, path: str) -> None:
    """The counts of a cell from the steps that kdtree generate showed."""
    results = [json.loads(text) for text in Path(path).read_text(encoding="utf-8").splitlines()]
    steps = [step for result in results for step in result["steps"]]
    lengths = [length for result in results for length in result["acceptance_lengths"]]
    require(line["num_steps"] == len(steps) == len(lengths), "generate: steps")
    require(close(line["acceptance_length"], sum(lengths) / len(lengths)), "generate: lengths")
    require(line["num_tokens"] == sum(len(result["output_ids"]) for result in results),
            "generate: tokens")
    nodes: dict[int, int] = {}
    accepted: dict[int, int] = {}
    for step in steps:
        for node in range(1, len(step["parents"])):
            rank = step["parents"][1:node].count(step["parents"][node])
            nodes[rank] = nodes.get(rank, 0) + 1
            accepted[rank] = accepted.get(rank, 0) + (node in step["accepted_nodes"])
    for key, counts in (("nodes_by_branch_rank", nodes), ("accepted_by_branch_rank", accepted)):
        require(line[key] == [counts[rank] for rank in sorted(counts)], f"generate: {key}")
    for depth, share in enumerate(line["per_depth_acceptance"], start=1):
        reached = sum(len(step["accepted_nodes"]) >= depth for step in steps)
        require(close(share, reached / len(steps)), f"generate: depth {depth}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("results")
    parser.add_argument("--cells", required=True)
    parser.add_argument("--generate", action="append", default=[])
    parser.add_argument("--same-counts")
    parser.add_argument("--expect", action="append", default=[])
    arguments = parser.parse_args()

    text = Path(arguments.results).read_text(encoding="utf-8")
    require(text.endswith("\n"), "does not end with a line")
    lines = [json.loads(line) for line in text.splitlines()]
    cells = [cell_name(line) for line in lines]
    require(cells == arguments.cells.split(","), f"cells are {cells}")
    for line in lines:
        check_line(line, cell_name(line), "plain" in cells)
        for expected in arguments.expect:
            key, value = expected.split("=", 1)
            require(str(line[key]) == value, f"{key} is {line[key]}, expected {value}")
    for generated in arguments.generate:
        cell, path = generated.rsplit("=", 1)
        check_generated(lines[cells.index(cell)], path)
    if arguments.same_counts:
        others = [json.loads(line)
                  for line in Path(arguments.same_counts).read_text(encoding="utf-8").splitlines()]
        for line, other in zip(lines, others, strict=True):
            for key in COUNTED:
                require(line[key] == other[key], f"{cell_name(line)}: {key} differs")


if __name__ == "__main__":
    main()
