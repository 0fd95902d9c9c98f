"""Checks the JSON line of kdtree bench perplexity against the numpy reference.

    python3 check_perplexity.py RESULTS MODEL WINDOWS [--first-scored N] [--expect KEY=VALUE ...]

MODEL is a Hugging Face directory, WINDOWS JSON lines with prompt_ids. --first-scored: the index of
the first token that is scored in every window but the first of them (default 1).
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np

from checkpoint_ref import read_hf_directory
from config_ref import TargetConfig
from model_ref import TargetModel

KEYS = ["perplexity", "loss", "num_tokens", "num_windows", "seconds", "tokens_per_second", "text",
        "model", "weights", "dtype", "backend", "communicator", "exchange", "world_size",
        "moe_ep", "moe_tp", "attention_tp", "attention_dp", "threads", "host", "load", "device", "version", "commit", "compiler"]
# The reference computes in float64 what the engine does in float32.
RELATIVE_ERROR = 1e-5


def require(condition: bool, text: str) -> None:
    if not condition:
        raise SystemExit(f"check_perplexity: {text}")


def losses(model: TargetModel, ids: list[int], first_scored: int) -> list[float]:
    logits = model.forward_causal(ids[:-1], model.new_cache()).logits
    highest = logits.max(axis=1, keepdims=True)
    log_sums = highest[:, 0] + np.log(np.exp(logits - highest).sum(axis=1))
    return [float(log_sums[at - 1] - logits[at - 1, ids[at]])
            for at in range(first_scored, len(ids))]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("results")
    parser.add_argument("model", type=Path)
    parser.add_argument("windows", type=Path)
    parser.add_argument("--first-scored", type=int, default=1)
    parser.add_argument("--expect", action="append", default=[])
    arguments = parser.parse_args()

    lines = Path(arguments.results).read_text(encoding="utf-8").splitlines()
    require(len(lines) == 1, f"{len(lines)} lines")
    line = json.loads(lines[0])
    require(list(line) == KEYS, f"keys are {list(line)}")
    config, weights = read_hf_directory(arguments.model)
    model = TargetModel(TargetConfig.from_dict(config), weights, np.float64)
    expected: list[float] = []
    windows = [json.loads(text)["prompt_ids"]
               for text in arguments.windows.read_text(encoding="utf-8").splitlines()]
    for index, ids in enumerate(windows):
        expected += losses(model, ids, arguments.first_scored if index > 0 else 1)
    mean = sum(expected) / len(expected)
    require(line["num_windows"] == len(windows), f"{line['num_windows']} windows")
    require(line["num_tokens"] == len(expected), f"{line['num_tokens']} tokens, {len(expected)}")
    require(math.isclose(line["loss"], mean, rel_tol=RELATIVE_ERROR), f"{line['loss']}, {mean}")
    require(math.isclose(line["perplexity"], math.exp(mean), rel_tol=RELATIVE_ERROR),
            f"{line['perplexity']}, {math.exp(mean)}")
    for expectation in arguments.expect:
        key, value = expectation.split("=", 1)
        require(str(line[key]) == value, f"{key} is {line[key]}, expected {value}")


if __name__ == "__main__":
    main()
