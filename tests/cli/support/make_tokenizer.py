"""Writes a tokenizer for a model of 512 rows: the 256 bytes, then Kimi K2's 256 added tokens.

    python3 make_tokenizer.py FOLDER
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{base64.b64encode(bytes([byte])).decode()} {byte}" for byte in range(256)]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n", encoding="ascii")
    names = {256: "[BOS]", 257: "[EOS]", 258: "<|im_end|>", 259: "<|im_user|>",
             260: "<|im_middle|>", 261: "<|im_assistant|>", 262: "<think>", 263: "</think>",
             264: "<|im_system|>"}
    decoder = {str(token): {"content": name, "special": True} for token, name in names.items()}
    config = {"added_tokens_decoder": decoder, "add_bos_token": False, "bos_token": "[BOS]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


if __name__ == "__main__":
    main()
