"""Checks the JSON lines of kdtree generate: the schema always, more by arguments.

    python3 check_results.py RESULTS [--expect KEY=VALUE ...] [--prompts FILE] [--same-as RESULTS]
        [--goldens BUNDLE:WEIGHTS] [--top-logits K] [--steps MODE:BUDGET]

--expect compares with a key of every line or, with a point, of its metrics (metrics.mode=tree).
--same-as: equal in everything but the metrics. Tolerates nothing: the engine promises equal bits.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

Line = dict[str, Any]
KEYS = ["index", "prompt_ids", "output_ids", "acceptance_lengths", "near_ties", "near_tie_margins",
        "stop_reason"]
STAGES = ["prefill", "draft", "tree_build", "verify", "accept", "commit"]
METRIC_TYPES = {
    "time_to_first_token_ms": float, "tokens_per_second": float, "total_ms": float,
    "stage_ms": dict, "stage_p50_ms": dict, "step_p50_ms": float, "step_p99_ms": float,
    "num_steps": int, "acceptance_length": float, "per_depth_acceptance": list,
    "mode": str, "batch_size": int, "tree_nodes": int, "weights": str, "dtype": str, "backend": str, "communicator": str, "exchange": str,
    "world_size": int, "moe_ep": int, "moe_tp": int, "attention_tp": int, "attention_dp": int,
    "threads": int, "host": str, "load": dict, "device": dict,
    "version": str, "commit": str, "compiler": str}
LOAD_KEYS = ["bytes_read", "checksum_bytes", "own_bytes", "seconds", "gb_per_s"]
STEP_KEYS = ["root", "draft_top_log_probs", "token_ids", "depths", "parents", "accepted_nodes",
             "bonus_token"]


def require(condition: bool, text: str) -> None:
    if not condition:
        raise SystemExit(f"check_results: {text}")


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_id_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(entry) is int and entry >= 0 for entry in value)


def check_pairs(pairs: Any, where: str) -> None:
    """[[token, value], ...], descending, no token twice."""
    require(isinstance(pairs, list), f"{where}: no list")
    for pair in pairs:
        require(isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is int
                and is_number(pair[1]), f"{where}: {pair} is no [token, number]")
    values = [value for _, value in pairs]
    require(values == sorted(values, reverse=True), f"{where}: not descending")
    require(len({token for token, _ in pairs}) == len(pairs), f"{where}: a token twice")


def check_metrics(line: Line, where: str) -> None:
    metrics = line["metrics"]
    require(list(metrics) == list(METRIC_TYPES), f"{where}: metrics are {list(metrics)}")
    for key, kind in METRIC_TYPES.items():
        value = metrics[key]
        fits = is_number(value) and value >= 0 if kind is float else type(value) is kind
        require(fits, f"{where}: metrics.{key} is {value!r}")
    stages = metrics["stage_ms"]
    require(list(stages) == STAGES and all(is_number(time) and time >= 0
                                           for time in stages.values()), f"{where}: {stages}")
    medians = metrics["stage_p50_ms"]
    require(list(medians) == STAGES[1:] and all(is_number(medians[stage]) and
                                                0 <= medians[stage] <= stages[stage] + 1e-9
                                                for stage in medians), f"{where}: {medians}")
    require(metrics["step_p50_ms"] <= metrics["step_p99_ms"], f"{where}: percentiles")
    require(isinstance(metrics["device"].get("name"), str), f"{where}: {metrics['device']}")
    load = metrics["load"]
    require(list(load) == LOAD_KEYS and all(is_number(value) and value >= 0
                                            for value in load.values()), f"{where}: {load}")
    require(load["checksum_bytes"] <= load["bytes_read"] <= 1.05 * load["own_bytes"],
            f"{where}: more was read than the ranks hold: {load}")
    require(math.isclose(load["gb_per_s"] * load["seconds"], load["bytes_read"] / 1e9,
                         rel_tol=1e-6), f"{where}: {load}")
    require(metrics["time_to_first_token_ms"] <= metrics["total_ms"], f"{where}: times disagree")

    ties = line["near_ties"]
    margins = line["near_tie_margins"]
    require(len(margins) == len(ties) and all(0 <= margin < 1 for margin in margins),
            f"{where}: near_tie_margins {margins} of {len(ties)} near-ties")
    lengths = line["acceptance_lengths"]
    require(metrics["num_steps"] == len(lengths), f"{where}: num_steps")
    mean = sum(lengths) / len(lengths) if lengths else 0
    require(math.isclose(metrics["acceptance_length"], mean, abs_tol=1e-9), f"{where}: mean")
    shares = metrics["per_depth_acceptance"]
    expected = [sum(length > depth for length in lengths) / len(lengths)
                for depth in range(1, len(shares) + 1)] if lengths else []
    require(len(shares) == len(expected) and
            all(math.isclose(*pair, abs_tol=1e-9) for pair in zip(shares, expected)),
            f"{where}: per_depth_acceptance is {shares}, expected {expected}")
    require(metrics["mode"] != "plain" or shares == [], f"{where}: plain mode accepts drafts")


def check_line(line: Line, index: int, arguments: argparse.Namespace) -> None:
    where = f"line {index}"
    keys = KEYS + ["top_logits"] * (arguments.top_logits > 0) + ["steps"] * bool(arguments.steps)
    require(list(line) == keys + ["metrics"], f"{where}: keys are {list(line)}")
    require(line["index"] == index, f"{where}: index is {line['index']}")
    for key in ("prompt_ids", "output_ids", "acceptance_lengths"):
        require(is_id_list(line[key]), f"{where}: {key} is {line[key]}")
    require(line["prompt_ids"] != [] and line["output_ids"] != [], f"{where}: no tokens")
    require(line["stop_reason"] in ("eos", "length", "context"), f"{where}: {line['stop_reason']}")
    ties = line["near_ties"]
    require(is_id_list(ties) and ties == sorted(set(ties)) and
            all(index < len(line["output_ids"]) for index in ties), f"{where}: near_ties {ties}")
    lengths = line["acceptance_lengths"]
    require(all(length >= 1 for length in lengths), f"{where}: acceptance lengths {lengths}")
    known = 1 + sum(lengths)
    require(known >= len(line["output_ids"]), f"{where}: more outputs than {known} known tokens")
    require(not lengths or known - lengths[-1] < len(line["output_ids"]),
            f"{where}: a step after the last token was known")
    if arguments.top_logits > 0:
        check_pairs(line["top_logits"], f"{where}: top_logits")
        require(len(line["top_logits"]) == arguments.top_logits, f"{where}: count of top_logits")
        require(line["top_logits"][0][0] == line["output_ids"][0], f"{where}: not the best first")
    check_metrics(line, where)


def check_step(step: Line, mode: str, budget: int, where: str) -> list[int]:
    """Returns the tokens that the step made known."""
    require(list(step) == STEP_KEYS, f"{where}: keys are {list(step)}")
    tokens, depths, parents = step["token_ids"], step["depths"], step["parents"]
    require(is_id_list(tokens) and is_id_list(depths) and len(tokens) == len(depths),
            f"{where}: token_ids and depths")
    require(len(parents) == len(tokens) + 1 and parents[0] == -1, f"{where}: parents {parents}")
    node_depths = [0] + depths
    for node in range(1, len(parents)):
        require(0 <= parents[node] < node, f"{where}: node {node} has parent {parents[node]}")
        require(node_depths[node] == node_depths[parents[node]] + 1, f"{where}: depth of {node}")
    children = [(parent, token) for parent, token in zip(parents[1:], tokens)]
    require(len(set(children)) == len(children), f"{where}: two children with one token")

    slots = step["draft_top_log_probs"]
    for number, slot in enumerate(slots):
        check_pairs(slot, f"{where}: slot {number}")
        require(len(slot) == 8 and slot[0][1] <= 0, f"{where}: slot {number} is {slot}")
    if mode == "plain":
        require(tokens == [] and slots == [], f"{where}: plain mode has a tree")
    elif mode == "chain":
        require(parents == list(range(-1, len(slots))), f"{where}: no chain: {parents}")
        require(tokens == [slot[0][0] for slot in slots], f"{where}: not the best of each slot")
    else:
        require(len(tokens) == budget and max(depths) <= len(slots),
                f"{where}: {len(tokens)} nodes, depth {max(depths)}")
        # The best first node is in every tree.
        require(tokens[0] == slots[0][0][0], f"{where}: first node {tokens[0]}")

    accepted = step["accepted_nodes"]
    for parent, node in zip([0] + accepted, accepted):
        require(0 < node < len(parents) and parents[node] == parent,
                f"{where}: {accepted} is no path from the root")
    return [tokens[node - 1] for node in accepted] + [step["bonus_token"]]


def check_steps(line: Line, mode: str, budget: int, where: str) -> None:
    steps = line["steps"]
    require([len(step["accepted_nodes"]) + 1 for step in steps] == line["acceptance_lengths"],
            f"{where}: acceptance lengths and steps disagree")
    known = [line["output_ids"][0]]
    for number, step in enumerate(steps):
        require(step["root"] == known[-1], f"{where}: step {number}: root {step['root']}")
        known += check_step(step, mode, budget, f"{where}: step {number}")
    outputs = line["output_ids"]
    require(known[:len(outputs)] == outputs, f"{where}: steps give {known}, outputs are {outputs}")


def check_goldens(lines: list[Line], bundle: str) -> None:
    from kdtr import read_kdtr  # here: numpy takes longer to import than all else
    path, weights = bundle.rsplit(":", 1)
    cases = read_kdtr(Path(path)).header["goldens"][weights]["cases"]
    require(len(lines) == len(cases), f"{len(lines)} lines, {len(cases)} golden cases")
    for line, case in zip(lines, cases):
        for key, golden_key in (("prompt_ids", "prompt_ids"), ("output_ids", "greedy_ids")):
            require(line[key] == case[golden_key],
                    f"line {line['index']}: {key} is not the golden one")


def without_metrics(lines: list[Line]) -> list[Line]:
    return [{key: value for key, value in line.items() if key != "metrics"} for line in lines]


def read_lines(path: str) -> list[Line]:
    text = Path(path).read_text(encoding="utf-8")
    require(text.endswith("\n"), f"{path}: does not end with a line")
    return [json.loads(line) for line in text.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("results")
    parser.add_argument("--expect", action="append", default=[])
    parser.add_argument("--prompts")
    parser.add_argument("--same-as")
    parser.add_argument("--goldens")
    parser.add_argument("--top-logits", type=int, default=0)
    parser.add_argument("--steps")
    arguments = parser.parse_args()

    lines = read_lines(arguments.results)
    require(lines != [], "no results")
    for index, line in enumerate(lines):
        check_line(line, index, arguments)
    for expectation in arguments.expect:
        key, value = expectation.split("=", 1)
        for line in lines:
            holder, last = (line["metrics"], key[8:]) if key.startswith("metrics.") else (line, key)
            require(str(holder[last]) == value, f"{key} is {holder[last]}, expected {value}")
    if arguments.prompts:
        prompts = [line["prompt_ids"] for line in read_lines(arguments.prompts)]
        require([line["prompt_ids"] for line in lines] == prompts, "not the prompts in their order")
    if arguments.same_as:
        require(without_metrics(lines) == without_metrics(read_lines(arguments.same_as)),
                f"other results than {arguments.same_as}")
    if arguments.goldens:
        check_goldens(lines, arguments.goldens)
    if arguments.steps:
        mode, budget = arguments.steps.split(":")
        for line in lines:
            check_steps(line, mode, int(budget), f"line {line['index']}")


if __name__ == "__main__":
    main()
