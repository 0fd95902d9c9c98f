"""Writes what the tests of good runs need: the prompts of each bundle's goldens as
NAME.jsonl, and eos.kdtr, a model_tiny whose end token is one that its goldens produce.

    python3 make_inputs.py TEST_DATA OUTPUT
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

from kdtr import read_kdtr, write_kdtr


def main() -> None:
    data, out = (Path(argument) for argument in sys.argv[1:])
    for path in sorted(data.glob("*.kdtr")):
        cases = read_kdtr(path).header["goldens"]["original"]["cases"]
        lines = [json.dumps({"prompt_ids": case["prompt_ids"]}) for case in cases]
        (out / f"{path.stem}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")

    bundle = read_kdtr(data / "model_tiny.kdtr")
    header = copy.deepcopy(bundle.header)
    cases = header["goldens"]["original"]["cases"]
    end_token = cases[2]["greedy_ids"][6]
    header["target"]["config"]["eos_token_id"] = [end_token, 1]
    for case in cases:
        ids = case["greedy_ids"]
        ends = [index for index, token in enumerate(ids) if token in (end_token, 1)]
        case["greedy_ids"] = ids[:ends[0] + 1] if ends else ids
    write_kdtr(out / "eos.kdtr", header, bundle.tensors)


if __name__ == "__main__":
    main()
