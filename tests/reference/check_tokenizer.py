#!/usr/bin/env python3
"""Holds the engine's tokenizer against the public packages, with a vocabulary of one's own.

    check_tokenizer.py TOKENIZER [--tests PROGRAM] [--count N] [--corpus-bytes N] [--seed N]

TOKENIZER is a tokenizer.json, or a directory with tiktoken.model and tokenizer_config.json;
PROGRAM is kdtree_unit_tests (default: $KDTREE_UNIT_TESTS, else the one of preset cpu). Compares
`count` random texts, and documents, code and made-up text of about `corpus-bytes`. Needs the
packages `tokenizers` and `tiktoken`. Exit status 1 if an id or a text differs.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import tokenizer_cases as cases
import tokenizer_corpus

ROOT = Path(__file__).resolve().parent.parent.parent
MAX_SHOWN = 20_000  # characters of what the test says
# A conversation of four turns as SpecForge's test references have it, with each model's ids.
BAR, BLANK = "\uff5c", "\u2581"
DEEPSEEK_V3_GOLDEN = (
    f"<{BAR}begin{BLANK}of{BLANK}sentence{BAR}>You are a helpful assistant."
    f"<{BAR}User{BAR}>Who are you?"
    f"<{BAR}Assistant{BAR}>My name is Qwen2.<{BAR}end{BLANK}of{BLANK}sentence{BAR}>"
    f"<{BAR}User{BAR}>How old are you?"
    f"<{BAR}Assistant{BAR}>11 years old.<{BAR}end{BLANK}of{BLANK}sentence{BAR}>",
    [0, 3476, 477, 260, 11502, 22896, 16, 128803, 18387, 477, 440, 33, 128804, 6759, 2329, 344,
     1646, 19566, 20, 16, 1, 128803, 4117, 3072, 477, 440, 33, 128804, 779, 1737, 3072, 16, 1])
KIMI_K2_GOLDEN = (
    "<|im_system|>system<|im_middle|>You are a helpful assistant.<|im_end|>"
    "<|im_user|>user<|im_middle|>Who are you?<|im_end|>"
    "<|im_assistant|>assistant<|im_middle|>My name is Qwen2.<|im_end|>"
    "<|im_user|>user<|im_middle|>How old are you?<|im_end|>"
    "<|im_assistant|>assistant<|im_middle|>11 years old.<|im_end|>",
    [163594, 14062, 163601, 3900, 554, 261, 13205, 26626, 13, 163586, 163587, 2482, 163601, 24328,
     554, 398, 30, 163586, 163588, 69702, 163601, 6725, 1530, 387, 1999, 33249, 17, 13, 163586,
     163587, 2482, 163601, 6034, 3410, 554, 398, 30, 163586, 163588, 69702, 163601, 1228, 2285,
     3410, 13, 163586])
# Number of ids of the published vocabularies, and their golden.
GOLDENS = {128815: DEEPSEEK_V3_GOLDEN, 163840: KIMI_K2_GOLDEN}
TEST = "TextPublished.EqualsThePackage"


def run_test(program: Path, folder: str) -> bool:
    """Whether the unit test ran and passed; a filter that matches nothing also ends with 0."""
    result = subprocess.run([program, f"--gtest_filter={TEST}"], check=False, text=True,
                            env={**os.environ, "KDTREE_TOKENIZER_CASES": folder},
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace")
    passed = result.returncode == 0 and f"[       OK ] {TEST}" in result.stdout
    if not passed:
        print(result.stdout[:MAX_SHOWN], end="\n")
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = os.environ.get("KDTREE_UNIT_TESTS", ROOT / "build/cpu/tests/kdtree_unit_tests")
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--tests", type=Path, default=default)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--corpus-bytes", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()

    oracle = cases.open_oracle(arguments.tokenizer)
    lines = cases.all_cases(oracle, arguments.count, arguments.seed) + cases.long_cases(oracle)
    num_characters = 0
    for text in tokenizer_corpus.corpus(arguments.corpus_bytes, arguments.seed):
        num_characters += len(text)
        lines.append(cases.encode_case(oracle, text, False))
    golden = GOLDENS.get(max(oracle.ids) + 1)
    if golden:
        lines.append({"text": golden[0], "special": True, "ids": golden[1]})
    with tempfile.TemporaryDirectory() as folder:
        if arguments.tokenizer.is_dir():
            for name in ("tiktoken.model", "tokenizer_config.json"):
                shutil.copyfile(arguments.tokenizer / name, Path(folder) / name)
        else:
            shutil.copyfile(arguments.tokenizer, Path(folder) / "tokenizer.json")
        cases.write_cases(Path(folder) / "cases.jsonl", lines)
        passed = run_test(arguments.tests, folder)
    num_ids = sum(len(case.get("ids", ())) for case in lines)
    print(f"{arguments.tokenizer}: {len(lines)} cases, {arguments.count} of them random texts, "
          f"{num_characters} characters of longer texts{', a golden' if golden else ''}, {num_ids} "
          f"ids: {'all equal' if passed else 'DIFFERENT, or the test did not run'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
