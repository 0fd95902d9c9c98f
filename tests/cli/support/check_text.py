"""Checks that text equals decoding of ids, with the tokenizer of make_tokenizer.py.

    python3 check_text.py RESULTS [STREAMED]

RESULTS: JSON lines of kdtree generate. STREAMED: what the same run printed as text, one sequence.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ADDED = {256: b"[BOS]", 257: b"[EOS]", 258: b"<|im_end|>", 259: b"<|im_user|>",
         260: b"<|im_middle|>", 261: b"<|im_assistant|>", 262: b"<think>", 263: b"</think>"}
ENDS = (1, 257, 258)


def decode(ids: list[int], stop_reason: str) -> str:
    shown = ids[:-1] if stop_reason == "eos" else ids
    return b"".join(
        bytes([token]) if token < 256 else ADDED.get(token, b"<|reserved_token_%d|>" % token)
        for token in shown).decode("utf-8", errors="replace")


def main() -> None:
    lines = [json.loads(line) for line in Path(sys.argv[1]).read_text("utf-8").splitlines()]
    assert lines, "no results"
    for line in lines:
        ids = line["output_ids"]
        expected = decode(ids, line["stop_reason"])
        assert line["text"] == expected, f"{line['text']!r}, expected {expected!r}"
        if line["stop_reason"] == "eos":
            assert ids[-1] in ENDS, f"ends with {ids[-1]}"
    if len(sys.argv) > 2:
        streamed = Path(sys.argv[2]).read_bytes().decode("utf-8")
        assert streamed == lines[0]["text"] + "\n", f"streamed {streamed!r}"


if __name__ == "__main__":
    main()
