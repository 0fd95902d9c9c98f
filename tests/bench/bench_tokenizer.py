#!/usr/bin/env python3
"""Compares the engine's encoding speed with that of `tokenizers` or `tiktoken`, on one core.

    bench_tokenizer.py TOKENIZER [--program PROGRAM] [--megabytes N] [--repeats N] [--seed N]

TOKENIZER is a tokenizer.json (compared with `tokenizers`) or a directory with tiktoken.model and
tokenizer_config.json (compared with `tiktoken`); PROGRAM is kdtree_encode_texts (default: the one
of preset cpu). Texts: documents and code of this machine, made-up Chinese, and all of them mixed.

First the ids of all methods are compared: a difference ends the run with exit status 1. Then the
methods take turns on the same core, in an order that changes from turn to turn. A JSON line a text
goes to stdout: medians in seconds of processor time, and of each other method the ratio of its time
to the engine's, turn by turn (above 1: the engine takes less). The packages' time ends with their
own object, before its ids become a list of Python (`tiktoken` gives nothing else).
"""

import os

# Before the packages start their threads.
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"

import argparse
import array
import itertools
import json
import random
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests/reference"))

import tokenizer_cases as cases
import tokenizer_corpus

SEPARATOR = "\0"  # between documents of a file
NUM_WORDS = 20_000

Texts = list[str]


def chinese_words(tokens: list[str], rng: random.Random) -> list[str]:
    """The Chinese words of a vocabulary; of one that has few, common characters in random order."""
    words = [token for token in tokens if token and all("\u4e00" <= c <= "\u9fa5" for c in token)]
    if len(words) >= NUM_WORDS // 4:
        rng.shuffle(words)
        return words[:NUM_WORDS]
    # Level 1 of GB 2312: its 3755 commonest characters.
    common = [bytes((high, low)).decode("gb2312") for high in range(0xB0, 0xD7)
              for low in range(0xA1, 0xFF)]
    return ["".join(rng.choices(common, k=rng.choice((1, 2, 2, 2, 3, 4))))
            for _ in range(NUM_WORDS)]


def chinese(num_bytes: int, tokens: list[str], rng: random.Random) -> Texts:
    """Sentences of words whose frequencies fall like those of a language (Zipf)."""
    words = chinese_words(tokens, rng)
    drawn = iter(rng.choices(words, weights=[1 / (rank + 3) for rank in range(len(words))],
                             k=num_bytes // 3))
    text, length = [], 0
    while length < num_bytes // 3:
        clause = "".join(next(drawn) for _ in range(rng.randrange(3, 12)))
        clause += rng.choice("\uff0c\uff0c\uff0c\u3002\u3002\uff1b\uff1f") + rng.choice(
            ["", "", "", "", "", "\n"])
        text.append(clause)
        length += len(clause)
    return list(tokenizer_corpus.chunks("".join(text)))


def make_texts(num_bytes: int, tokens: list[str], seed: int) -> dict[str, Texts]:
    rng = random.Random(seed)
    stdlib = Path(sysconfig.get_path("stdlib"))
    texts = {
        "documents": list(tokenizer_corpus.read_folder(Path("/usr/share/doc"), num_bytes, rng)),
        "code": list(tokenizer_corpus.read_folder(stdlib, num_bytes, rng)),
        "chinese": chinese(num_bytes, tokens, rng),
    }
    scripts = list(tokenizer_corpus.made_up(num_bytes // 12, rng))
    mixed = [part for text in texts.values() for part in text[:len(text) // 3]] + scripts
    rng.shuffle(mixed)
    return {**texts, "mixed": mixed}


class Package(NamedTuple):
    label: str  # name and version
    ways: dict[str, Callable[[Texts], list]]  # to encode documents
    ids_of: Callable  # what a way gives for a document, as ids
    tokens: list[str]  # of the vocabulary; may be empty


class Engine:
    """kdtree_encode_texts as a process beside this one; its files are in `folder`."""

    def __init__(self, program: Path, tokenizer: Path, folder: Path):
        self.folder = folder
        self._process = subprocess.Popen([program, tokenizer], stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, text=True)

    def encode(self, path: Path) -> float:
        """Seconds of processor time; the ids are in PATH.ids then."""
        self._process.stdin.write(f"{path}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            sys.exit(f"kdtree_encode_texts ended with {self._process.wait()}")
        return int(answer) / 1e9

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def open_package(path: Path) -> Package:
    if path.is_dir():
        import tiktoken
        # Documents are too short for the cuts of long texts that Kimi's own code makes.
        encoding = cases.TiktokenOracle(path).encoding
        ways = {
            "encode": lambda texts: [encoding.encode(text, allowed_special="all")
                                     for text in texts],
            "encode_ordinary": lambda texts: [encoding.encode_ordinary(text) for text in texts],
        }
        return Package(f"tiktoken {tiktoken.__version__}", ways, lambda ids: ids, [])
    import tokenizers
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    ways = {
        "encode": lambda texts: [tokenizer.encode(text, add_special_tokens=False)
                                 for text in texts],
        "encode_batch": lambda texts: tokenizer.encode_batch(texts, add_special_tokens=False),
        "encode_batch_fast": lambda texts: tokenizer.encode_batch_fast(texts,
                                                                       add_special_tokens=False),
    }
    tokens = [tokenizer.decode([token]) for token in tokenizer.get_vocab().values()]
    return Package(f"tokenizers {tokenizers.__version__}", ways, lambda made: made.ids, tokens)


def timed(way: Callable[[Texts], list], texts: Texts) -> float:
    start = time.process_time()
    way(texts)
    return time.process_time() - start


def compare_ids(name: str, texts: Texts, path: Path, package: Package) -> int:
    """The number of ids; ends the program if the methods disagree."""
    engine = array.array("i", Path(f"{path}.ids").read_bytes())
    for way, encode in package.ways.items():
        ids = array.array("i", itertools.chain.from_iterable(map(package.ids_of, encode(texts))))
        if engine != ids:
            sys.exit(f"{name}: the ids of the engine ({len(engine)}) and of {way} ({len(ids)}) "
                     "differ: nothing is measured")
    return len(engine)


def measure(name: str, texts: Texts, package: Package, engine: Engine, repeats: int) -> dict:
    path = engine.folder / f"{name}.txt"
    content = SEPARATOR.join(texts).encode()
    path.write_bytes(content)
    engine.encode(path)
    num_ids = compare_ids(name, texts, path, package)
    runs = {"engine": lambda: engine.encode(path),
            **{way: (lambda encode=encode: timed(encode, texts))
               for way, encode in package.ways.items()}}
    seconds: dict[str, list[float]] = {way: [] for way in runs}
    for turn in range(repeats):
        order = list(runs)
        order = order[turn % len(order):] + order[:turn % len(order)]
        for way in order:
            seconds[way].append(runs[way]())
    ratios = {way: [theirs / ours for theirs, ours in zip(seconds[way], seconds["engine"])]
              for way in package.ways}
    return {"text": name, "bytes": len(content), "documents": len(texts), "ids": num_ids,
            "package": package.label, "repeats": repeats,
            "median_s": {way: round(statistics.median(times), 4)
                         for way, times in seconds.items()},
            "engine_mb_per_s": round(len(content) / statistics.median(seconds["engine"]) / 1e6, 2),
            "time_over_engine": {way: {"median": round(statistics.median(list_), 3),
                                       "min": round(min(list_), 3), "max": round(max(list_), 3)}
                                 for way, list_ in ratios.items()}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--program", type=Path,
                        default=ROOT / "build/cpu/tests/kdtree_encode_texts")
    parser.add_argument("--megabytes", type=float, default=2, help="of each text")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # the engine's process inherits it
    package = open_package(arguments.tokenizer)
    texts = make_texts(int(arguments.megabytes * 1e6), package.tokens, arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(arguments.program, arguments.tokenizer, Path(folder))
        for name, documents in texts.items():
            line = measure(name, documents, package, engine, arguments.repeats)
            print(json.dumps(line), flush=True)
        engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
