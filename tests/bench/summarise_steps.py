"""One JSON line a run from the JSON lines of kdtree generate: what a step takes and gives.

    python3 summarise_steps.py MODEL RESULTS... >steps.jsonl

Times are medians over the sequences of a run of each sequence's median over its steps, so that the
first steps, which are not replayed yet, do not count. tokens_per_second counts the output tokens of
all sequences over the time from admission of a batch to its end, prompts included: with a batch as
large as the number of prompts that is the run, with smaller ones the sum over the batches.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

SAME = ["mode", "batch_size", "tree_nodes", "weights", "dtype", "backend", "communicator",
        "exchange", "world_size", "threads", "host", "device", "version", "commit", "compiler"]


def summarise(model: str, path: Path) -> dict[str, Any]:
    results = [json.loads(line) for line in path.read_text().splitlines()]
    metrics = [result["metrics"] for result in results]
    batch = metrics[0]["batch_size"]
    tokens = sum(len(result["output_ids"]) for result in results)
    times = [entry["total_ms"] for entry in metrics]
    # Sequences of one batch run side by side.
    total_ms = sum(max(times[first:first + batch]) for first in range(0, len(times), batch))
    stages = {stage: median(entry["stage_p50_ms"][stage] for entry in metrics)
              for stage in metrics[0]["stage_p50_ms"]}
    line = {"run": path.stem, "model": model, "prompts": len(results),
            "prompt_tokens": sum(len(result["prompt_ids"]) for result in results),
            "output_tokens": tokens,
            "near_ties": sum(len(result["near_ties"]) for result in results),
            "acceptance_length": sum(entry["acceptance_length"] for entry in metrics) / len(metrics),
            "step_p50_ms": median(entry["step_p50_ms"] for entry in metrics),
            "step_p99_ms": median(entry["step_p99_ms"] for entry in metrics),
            "stage_p50_ms": stages,
            "time_to_first_token_ms": median(entry["time_to_first_token_ms"] for entry in metrics),
            "tokens_per_second": 1000 * tokens / total_ms}
    line.update({key: metrics[0][key] for key in SAME})
    return line


def main() -> None:
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    for name in sys.argv[2:]:
        print(json.dumps(summarise(sys.argv[1], Path(name))))


if __name__ == "__main__":
    main()
