"""Compares the outputs of several runs of the same prompts, JSON lines of kdtree generate.

    python3 explain_differences.py RESULTS RESULTS...

Every run is compared with the first. Where outputs differ, the first differing token must be a
near-tie of one of the two runs (key near_ties): rounding explains it, and what follows is another
text. Prints how many tokens were compared, how many differences were explained, and the largest of
their margins (key near_tie_margins): near 1 the bound is too tight. Exit code 1 for a difference
that is not explained.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def read(path: str) -> list[Line]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def first_difference(left: list[int], right: list[int]) -> int | None:
    for index, pair in enumerate(zip(left, right)):
        if pair[0] != pair[1]:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def margin_at(line: Line, index: int) -> float | None:
    """The margin of output token `index`; None where that was no near-tie."""
    return dict(zip(line["near_ties"], line["near_tie_margins"])).get(index)


def compare(name: str, first: list[Line], other: list[Line]) -> tuple[int, list[float]]:
    """The number of equal tokens, and the margin of each first difference."""
    if len(first) != len(other):
        raise SystemExit(f"{name}: {len(other)} results, expected {len(first)}")
    tokens = 0
    explained: list[float] = []
    for left, right in zip(first, other):
        if left["prompt_ids"] != right["prompt_ids"]:
            raise SystemExit(f"{name}: result {right['index']} is of another prompt")
        index = first_difference(left["output_ids"], right["output_ids"])
        if index is None:
            tokens += len(left["output_ids"])
            continue
        tokens += index
        margins = [margin for line in (left, right)
                   if (margin := margin_at(line, index)) is not None]
        if not margins:
            raise SystemExit(f"{name}: prompt {left['index']}: output token {index} is "
                             f"{right['output_ids'][index:index + 1]}, was "
                             f"{left['output_ids'][index:index + 1]}, and is no near-tie")
        explained.append(min(margins))
    return tokens, explained


def main() -> None:
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    first = read(sys.argv[1])
    total = sum(len(line["output_ids"]) for line in first)
    ties = sum(len(line["near_ties"]) for line in first)
    print(f"{sys.argv[1]}: {len(first)} prompts, {total} tokens, {ties} of them near-ties")
    for name in sys.argv[2:]:
        tokens, explained = compare(name, first, read(name))
        largest = f", margins up to {max(explained):.2f}" if explained else ""
        print(f"{name}: {tokens} tokens equal, {len(explained)} differences, each at a near-tie"
              f"{largest}")


if __name__ == "__main__":
    main()
