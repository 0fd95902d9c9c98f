#!/usr/bin/env python3
"""Writes or compares tests/data/chat: conversations as DeepSeek-V3's published template renders them.

    check_chat_template.py TOKENIZER_CONFIG [--write]

TOKENIZER_CONFIG is the tokenizer_config.json that DeepSeek-V3 is published with. Needs `jinja2`; the
unit tests read what is committed.
"""

import argparse
import json
import random
import sys
from pathlib import Path

FIXTURE = Path(__file__).resolve().parent.parent / "data/chat/deepseek_v3.jsonl"
TEXTS = ["Hi", "", "a\nb", " blank ", "你好", "<think>x</think>y", "{{ x }}", "\U0001f600", "<|EOT|>"]


def conversation(rng: random.Random) -> list[dict]:
    messages = []
    for _ in range(rng.randrange(1, 8)):
        role = rng.choice(["system", "user", "user", "assistant", "calls", "tool"])
        if role == "calls":
            calls = [{"id": f"f:{i}", "type": "function",
                      "function": {"name": "f", "arguments": '{"a": 1}'}}
                     for i in range(rng.randrange(1, 4))]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        else:
            messages.append({"role": role, "content": rng.choice(TEXTS)})
    return messages


def main() -> int:
    import jinja2
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    config = json.loads(arguments.config.read_text(encoding="utf-8"))
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(
        config["chat_template"])
    rng = random.Random(7)
    lines = []
    for _ in range(120):
        messages = conversation(rng)
        text = template.render(messages=messages, bos_token=config["bos_token"]["content"],
                               add_generation_prompt=True)
        lines.append(json.dumps({"messages": messages, "text": text}))
    content = "\n".join(lines) + "\n"
    if arguments.write:
        FIXTURE.write_text(content, encoding="ascii")
    same = FIXTURE.read_text(encoding="ascii") == content
    print(f"{len(lines)} conversations: {'equal' if same else 'the fixture DIFFERS'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
