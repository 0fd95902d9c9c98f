#!/usr/bin/env python3
"""Compares how fast the engine loads a checkpoint with how fast its files can be read.

    bench_load.py [--size-gb N] [--shard-gb N] [--ranks N] [--repeats N] [--streams N]
                  [--folder FOLDER] [--program PROGRAM] [-- ARGUMENT...]

Writes a checkpoint of Kimi K2.6's tensors (k2_checkpoint.py) into a new folder in FOLDER (default:
$TMPDIR), measures and removes it. In every repeat each of these reads the same files, first with
the page cache emptied of them before each, then all with it filled:

  plain_N  16 MiB at a time into memory that is thrown away, in one thread and in `streams` ones,
           each with a contiguous part of the files
  engine   kdtree generate on `ranks` ranks (PROGRAM, default: the one of preset cpu; ARGUMENTs
           follow its own): `metrics.load` of its results

stdout gets JSON lines: what was written, a line a run, and a summary for each state of the cache.
`resident` is the share of the files that the page cache held before a run. `over_plain` compares
speeds for the same files, repeat by repeat: a plain read's seconds over the engine's (those of its
slowest rank). Rates are 10^9 bytes a second; what several ranks read counts once for each.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import k2_checkpoint

ROOT = Path(__file__).resolve().parent.parent.parent
READ_BYTES = 16 << 20
MAP_BYTES = 1 << 30  # looked at in one piece
# More than this of the files in the cache is no cold start.
MAX_COLD_SHARE = 0.01

libc = ctypes.CDLL(None, use_errno=True)
libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


def resident_bytes(path: Path) -> int:
    """What the page cache holds of a file."""
    total = 0
    size = path.stat().st_size
    with path.open("rb") as file:
        for begin in range(0, size, MAP_BYTES):
            length = min(MAP_BYTES, size - begin)
            # A private copy: only then may Python have its address. Nothing is written.
            with mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=begin) as view:
                pages = -(-length // mmap.PAGESIZE)
                states = ctypes.create_string_buffer(pages)
                place = ctypes.c_char.from_buffer(view)
                result = libc.mincore(ctypes.addressof(place), length, states)
                del place
                if result != 0:
                    raise OSError(ctypes.get_errno(), "mincore", str(path))
                total += sum(state & 1 for state in states.raw) * mmap.PAGESIZE
    return total


def resident_share(files: list[Path]) -> float:
    return (sum(resident_bytes(file) for file in files)
            / sum(file.stat().st_size for file in files))


def evict(files: list[Path]) -> str:
    """Empties the page cache of the files; how that was done."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    if resident_share(files) <= MAX_COLD_SHARE:
        return "fadvise"
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1", encoding="ascii")
    except OSError as error:
        return f"fadvise, drop_caches refused ({error.strerror})"
    return "fadvise, drop_caches"


def read_part(files: list[Path], begin: int, end: int) -> None:
    """Bytes [begin, end) of the files, laid one behind the other."""
    buffer = memoryview(bytearray(READ_BYTES))
    start = 0
    for file in files:
        size = file.stat().st_size
        first, last = max(begin - start, 0), min(end - start, size)
        start += size
        if first >= last:
            continue
        descriptor = os.open(file, os.O_RDONLY)
        while first < last:
            count = os.preadv(descriptor, [buffer[:min(READ_BYTES, last - first)]], first)
            if count == 0:
                sys.exit(f"{file}: ends at byte {first}")
            first += count
        os.close(descriptor)


def plain_read(files: list[Path], streams: int) -> dict[str, Any]:
    total = sum(file.stat().st_size for file in files)
    parts = [total * index // streams for index in range(streams + 1)]
    threads = [threading.Thread(target=read_part, args=(files, begin, end))
               for begin, end in zip(parts, parts[1:])]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    return {"bytes_read": total, "seconds": round(seconds, 4),
            "gb_per_s": round(total / seconds / 1e9, 3)}


def engine_load(command: list[str], checkpoint: Path) -> dict[str, Any]:
    command = [*command, "--model", str(checkpoint), "--prompt-ids", "1,2,3", "--max-new-tokens",
               "1", "--output-format", "json"]
    # Containers often forbid reading a neighbour's memory, of which Open MPI complains at length.
    environment = {"OMPI_MCA_btl_vader_single_copy_mechanism": "none", **os.environ}
    result = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True,
                            env=environment)
    if result.returncode != 0:
        sys.exit(f"the engine ended with {result.returncode}: {' '.join(command)}")
    metrics = json.loads(result.stdout.splitlines()[0])["metrics"]
    load = metrics["load"]
    return {**{key: load[key] for key in ("bytes_read", "own_bytes")},
            "seconds": round(load["seconds"], 4), "gb_per_s": round(load["gb_per_s"], 3),
            "over_own_share": round(load["bytes_read"] / load["own_bytes"], 5)}


def mpirun(ranks: int) -> list[str]:
    command = ["mpirun", "-n", str(ranks)]
    version = subprocess.run(["mpirun", "--version"], check=True, stdout=subprocess.PIPE, text=True)
    if "Open MPI" in version.stdout:
        command += ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    return command


def measure(name: str, files: list[Path], cold: bool, run: Any) -> dict[str, Any]:
    state: dict[str, Any] = {"cache": "cold" if cold else "warm"}
    if cold:
        state["evicted_by"] = evict(files)
    state["resident"] = round(resident_share(files), 4)
    line = {"what": name, **state, **run()}
    print(json.dumps(line), flush=True)
    return line


def summary(cache: str, lines: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    seconds = {name: [line["seconds"] for line in list_] for name, list_ in lines.items()}
    ratios = {name: [plain / ours for ours, plain in zip(seconds["engine"], list_)]
              for name, list_ in seconds.items() if name != "engine"}
    return {"what": "summary", "cache": cache,
            "median_s": {name: round(statistics.median(list_), 4)
                         for name, list_ in seconds.items()},
            "over_plain": {name: {"median": round(statistics.median(list_), 3),
                                  "min": round(min(list_), 3), "max": round(max(list_), 3)}
                           for name, list_ in ratios.items()},
            "most_resident": max(line["resident"] for list_ in lines.values() for line in list_),
            "least_resident": min(line["resident"] for list_ in lines.values() for line in list_),
            "over_own_share": max(line["over_own_share"] for line in lines["engine"])}


def study(folder: Path, arguments: argparse.Namespace) -> None:
    made = k2_checkpoint.write_checkpoint(folder, int(arguments.size_gb * 1e9),
                                          int(arguments.shard_gb * 1e9), arguments.seed)
    print(json.dumps(made), flush=True)
    files = sorted(folder.glob("*.safetensors"))
    command = [*mpirun(arguments.ranks), str(arguments.program), "generate", *arguments.engine]
    runs = {f"plain_{streams}": (lambda streams=streams: plain_read(files, streams))
            for streams in sorted({1, arguments.streams})}
    runs["engine"] = lambda: engine_load(command, folder)
    for cache in ("cold", "warm"):
        lines: dict[str, list[dict[str, Any]]] = {name: [] for name in runs}
        if cache == "warm":
            plain_read(files, arguments.streams)
        for turn in range(arguments.repeats):
            order = list(runs)
            order = order[turn % len(order):] + order[:turn % len(order)]
            for name in order:
                lines[name].append(measure(name, files, cache == "cold", runs[name]))
        print(json.dumps(summary(cache, lines)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size-gb", type=float, default=20)
    parser.add_argument("--shard-gb", type=float, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--streams", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--program", type=Path, default=ROOT / "build/cpu/launch/kdtree")
    parser.add_argument("engine", nargs="*", metavar="ARGUMENT")
    arguments = parser.parse_args()
    # Also what `timeout` ends removes its files.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="kdtree-load-") as folder:
        study(Path(folder), arguments)


if __name__ == "__main__":
    main()
