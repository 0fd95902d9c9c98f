"""Checks what api_trace.cpp wrote down of a decoding run: replayed steps neither allocate nor wait.

    python3 check_api_trace.py LEAST_STEPS TRACE...

Between two launches of recorded steps the host may mark the end of a step and wait for the end of
an earlier one, which runs beside the step that was just launched: a wait follows a launch, never
two of them. Everything else (copies, allocations, waits for a stream) is a fault. Between the last
step of one batch of sequences and the first of the next, prompts are processed: steps follow each
other directly where nothing but marks lies between their launches.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

LAUNCH, MARK, WAIT = "cudaGraphLaunch", "cudaEventRecord", "cudaEventSynchronize"
ADMISSION = "cudaStreamSynchronize"  # of prompts and of the list of sequences


def check(path: Path, least_steps: int) -> str:
    calls = path.read_text().split()
    launches = [index for index, call in enumerate(calls) if call == LAUNCH]
    if len(launches) < least_steps:
        raise SystemExit(f"{path}: {len(launches)} replayed steps, expected {least_steps} at least")
    steady = 0
    for begin, end in zip(launches, launches[1:]):
        between = Counter(calls[begin + 1:end])
        if ADMISSION in between or "cudaStreamBeginCapture" in between:
            continue  # the set of sequences changed, or another step was recorded
        if set(between) - {MARK, WAIT} or between[WAIT] > 1:
            raise SystemExit(f"{path}: between two steps the host called {dict(between)}")
        steady += 1
    if steady < least_steps - 2:
        raise SystemExit(f"{path}: only {steady} of {len(launches)} steps follow another directly")
    return f"{path.name}: {len(launches)} replayed steps, {steady} of them right behind another"


def main() -> None:
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    for name in sys.argv[2:]:
        print(check(Path(name), int(sys.argv[1])))


if __name__ == "__main__":
    main()
