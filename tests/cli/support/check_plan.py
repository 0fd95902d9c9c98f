#!/usr/bin/env python3
"""Checks the JSON of kdtree plan: the entries of every rank, their sum, and whether they fit."""

import argparse
import json
import sys

ENTRIES = ["routed_experts", "shared_experts", "dense_layers", "attention", "router",
           "embedding_and_head", "norms", "drafter_weights", "latent_cache", "drafter_cache",
           "target_workspace", "drafter_workspace", "vocabulary_workspace", "step_state", "engine",
           "device_reserve"]


def check(condition: bool, text: str) -> None:
    if not condition:
        sys.exit(f"check_plan: {text}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--fits", choices=["true", "false", "null"], required=True)
    parser.add_argument("--entry", nargs=2, action="append", default=[],
                        metavar=("NAME", "BYTES"), help="of every rank")
    parser.add_argument("--filled", type=float, help="share of the memory that is taken, about")
    parser.add_argument("--drafts", action="store_true", help="there is a drafter")
    options = parser.parse_args()
    with open(options.file, encoding="utf-8") as stream:
        plan = json.load(stream)
    ranks = plan["bytes_of_rank"]
    check(len(ranks) == options.ranks == plan["ranks"], f"{len(ranks)} ranks")
    for number, rank in enumerate(ranks):
        check(list(rank) == ENTRIES + ["total"], f"rank {number} has entries {list(rank)}")
        check(sum(rank[name] for name in ENTRIES) == rank["total"], f"rank {number}: the total")
        check((rank["drafter_weights"] > 0) == options.drafts, f"rank {number}: the drafter")
        for name, value in options.entry:
            check(rank[name] == int(value), f"rank {number}: {name} is {rank[name]}, not {value}")
    peak = max(rank["total"] for rank in ranks)
    check(plan["peak_bytes"] == peak, "peak_bytes")
    check(json.dumps(plan["fits"]) == options.fits, f"fits is {plan['fits']}")
    if plan["memory_bytes"] is not None:
        check(plan["fits"] == (peak <= plan["memory_bytes"]), "fits and memory_bytes")
    if options.filled is not None:
        share = peak / plan["memory_bytes"]
        check(options.filled - 0.001 < share <= options.filled, f"{share} of the memory is taken")


if __name__ == "__main__":
    main()
