#!/usr/bin/env python3
"""Writes or compares tests/data/chat: conversations as jinja2 renders a model's chat template.

    check_chat_template.py deepseek-v3|kimi-k2|kimi-k2.6 [TEMPLATE] [--write]

TEMPLATE is a published chat_template.jinja, or a tokenizer_config.json that holds the template. For
Kimi the default is templates/*.jinja: reconstructions from public descriptions, not the published
files. Needs `jinja2`; the unit tests read what is committed.
"""

import argparse
import json
import random
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
FIXTURES = HERE.parent / "data/chat"
TEXTS = ["Hi", "", "a\nb", " blank ", "你好", "<think>x</think>y", "{{ x }}", "\U0001f600", "<|EOT|>"]
DEEPSEEK_BOS = "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
# Keys out of alphabetical order, and what JSON may write in two ways.
TOOLS = [
    {"type": "function",
     "function": {"name": "weather", "description": "Wetter f\u00fcr \"Orte\"\n",
                  "parameters": {"type": "object", "required": ["city"],
                                 "properties": {"city": {"type": "string"},
                                                "at": {"type": "number", "default": 1.5}}}}},
    {"type": "function", "function": {"name": "\u4f60</a>&'", "strict": True, "default": None}},
]


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


def kimi_conversation(rng: random.Random) -> dict:
    """Messages as above, with reasoning, names, ids of calls and, at times, declared tools."""
    messages = conversation(rng)
    for message in messages:
        if message["role"] == "assistant" and rng.random() < 0.7:
            message["reasoning_content"] = rng.choice(TEXTS)
        if message.get("tool_calls") and rng.random() < 0.5:
            message["content"] = rng.choice(TEXTS)
        if message["role"] == "tool":
            message["tool_call_id"] = f"f:{rng.randrange(3)}"
        if rng.random() < 0.2:
            message["name"] = rng.choice(["Ada", "\u674e\u96f7"])
    chat = {"messages": messages}
    if rng.random() < 0.4:
        chat["tools"] = rng.sample(TOOLS, rng.randrange(1, 3))
    return chat


def deepseek_chats(_name: str) -> list[dict]:
    rng = random.Random(7)
    return [{"messages": conversation(rng)} for _ in range(120)]


def kimi_chats(name: str) -> list[dict]:
    rng = random.Random(8)
    chats = [kimi_conversation(rng) for _ in range(50)]
    if name == "kimi-k2":
        return chats
    return [{**chat, "thinking": thinking} for chat in chats for thinking in (True, False)]


# Fixture, template unless one is named, and what is rendered.
MODELS = {
    "deepseek-v3": ("deepseek_v3.jsonl", None, deepseek_chats),
    "kimi-k2": ("kimi_k2.jsonl", HERE / "templates/kimi_k2.jinja", kimi_chats),
    "kimi-k2.6": ("kimi_k26.jsonl", HERE / "templates/kimi_k26.jinja", kimi_chats),
}


def open_template(path: Path):
    import jinja2
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        text = json.loads(text)["chat_template"]
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    # As transformers has it: jinja2's own filter escapes for HTML.
    environment.filters["tojson"] = lambda value, separators=None, **_: json.dumps(
        value, ensure_ascii=False, separators=separators)
    return environment.from_string(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("template", type=Path, nargs="?")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    name, default, make_chats = MODELS[arguments.model]
    path = arguments.template or default
    if path is None:
        parser.error(f"{arguments.model} needs TEMPLATE: no template of it is kept here")
    template = open_template(path)
    lines = []
    for chat in make_chats(arguments.model):
        text = template.render(**chat, bos_token=DEEPSEEK_BOS, add_generation_prompt=True)
        lines.append(json.dumps({**chat, "text": text}))
    fixture = FIXTURES / name
    if arguments.write:
        fixture.write_text("\n".join(lines) + "\n", encoding="ascii")
    committed = fixture.read_text(encoding="ascii").splitlines()
    differing = [i for i, pair in enumerate(zip(lines, committed)) if pair[0] != pair[1]]
    same = lines == committed
    print(f"{arguments.model}: {len(lines)} conversations: "
          f"{'equal' if same else 'the fixture DIFFERS'}")
    if differing:
        print(f"line {differing[0] + 1} of {fixture.name} is\n{committed[differing[0]]}\n"
              f"the template gives\n{lines[differing[0]]}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
