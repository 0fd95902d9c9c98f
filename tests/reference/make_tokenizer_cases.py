#!/usr/bin/env python3
"""Writes tests/data/tokenizer: two small vocabularies, trained on made-up text, and cases of ids.

    make_tokenizer_cases.py [--output FOLDER] [--seed N]

Needs the packages `tokenizers` and `tiktoken`; the tests read what is committed.
"""

import argparse
import base64
import json
import random
from pathlib import Path

import tokenizer_cases as cases

# DeepSeek-V3's pre-tokenizer: each pattern splits what the one before it left.
DEEPSEEK_PATTERNS = [
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
    "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*"
    "|\\s*[\r\n]+"
    "|\\s+(?!\\S)"
    "|\\s+",
]
BAR, BLANK = "\uff5c", "\u2581"
DEEPSEEK_ADDED = [  # text, special, normalized
    (f"<{BAR}begin{BLANK}of{BLANK}sentence{BAR}>", True, False),
    (f"<{BAR}end{BLANK}of{BLANK}sentence{BAR}>", True, False),
    (f"<{BAR}{BLANK}pad{BLANK}{BAR}>", True, False),
    (f"<{BAR}User{BAR}>", False, True),
    (f"<{BAR}Assistant{BAR}>", False, True),
    ("<|EOT|>", True, True),
    (f"<{BAR}tool{BLANK}sep{BAR}>", False, True),
]
# Offset behind the ranks, text, special: as Kimi K2's tokenizer_config.json names them.
KIMI_ADDED = [
    (0, "[BOS]", True), (1, "[EOS]", True), (2, "<|im_end|>", True), (3, "<|im_user|>", True),
    (4, "<|im_assistant|>", True), (9, "[EOT]", True), (10, "<|im_system|>", True),
    (11, "<|tool_calls_section_begin|>", False), (13, "<|tool_call_begin|>", False),
    (17, "<|im_middle|>", True), (22, "<think>", False), (23, "</think>", False),
    (254, "[UNK]", True), (255, "[PAD]", True),
]
NUM_TRAINED = 1600


def made_up_text(rng: random.Random) -> list[str]:
    """Lines of invented words, Chinese runs, numbers, code and the fragments of the cases."""
    syllables = ["ka", "to", "ri", "mo", "en", "the", "is", "an", "ing", "er", "qu", "st", "ul",
                 "ve"]
    words = ["".join(rng.choices(syllables, k=rng.randrange(1, 4))) for _ in range(400)]
    words += [word.capitalize() for word in words[:60]] + [word.upper() for word in words[:20]]
    chinese = [chr(0x4E00 + rng.randrange(600)) for _ in range(120)]
    chinese += "\u4f60\u597d\u4e16\u754c\u6771\u4eac"
    chinese = ["".join(rng.choices(chinese, k=rng.randrange(1, 4))) for _ in range(200)]
    ends = [".", ",", "!", ";\n", " {\n    ", "}\n", " = ", "'s ", "\n\n", "  ", " ", " ", " ", " "]
    lines = []
    for _ in range(3000):
        line = []
        for _ in range(rng.randrange(4, 16)):
            kind = rng.random()
            pool = words if kind < 0.7 else chinese if kind < 0.85 else cases.FRAGMENTS
            line.append(pool[min(int(rng.expovariate(8 / len(pool))), len(pool) - 1)])
            line.append(rng.choice(ends))
        line.append(str(rng.randrange(100000)))
        lines.append("".join(line))
    return lines


def split_step(pattern: str, behavior: str = "Isolated", kind: str = "Regex") -> dict:
    return {"type": "Split", "pattern": {kind: pattern}, "behavior": behavior, "invert": False}


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
              "use_regex": False}


def sequence(*steps: dict) -> dict:
    return {"type": "Sequence", "pretokenizers": [*steps, BYTE_LEVEL]}


def train(patterns: list[str], lines: list[str]) -> tuple[dict, list[list[str]]]:
    """Vocabulary and merges; ids are those of the 256 bytes, then one a merge."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns] +
        [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    trainer = trainers.BpeTrainer(vocab_size=NUM_TRAINED, show_progress=False, special_tokens=[],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(lines, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], model["merges"]


def added_token(index: int, text: str, special: bool, **flags: bool) -> dict:
    return {"id": index, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": not special, "special": special, **flags}


def deepseek_like(lines: list[str]) -> dict:
    trained, merges = train(DEEPSEEK_PATTERNS, lines)
    vocab = {text: index for index, (text, _, _) in enumerate(DEEPSEEK_ADDED[:3])}
    vocab.update({token: index + 3 for token, index in trained.items()})
    added = []
    for text, special, normalized in DEEPSEEK_ADDED:
        index = vocab.get(text, len(vocab) + max(len(added) - 3, 0))
        added.append(added_token(index, text, special, normalized=normalized))
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": []},
        "pre_tokenizer": sequence(*[split_step(pattern) for pattern in DEEPSEEK_PATTERNS]),
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                    "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False,
                  "byte_fallback": False, "vocab": vocab,
                  "merges": [" ".join(pair) for pair in merges]},
    }


def bytes_of(spelling: str) -> bytes:
    """A token's bytes from its byte-level spelling."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    table = {chr(value): value for value in printable}
    table.update({chr(0x100 + index): value for index, value in enumerate(others)})
    return bytes(table[character] for character in spelling)


def write_kimi_like(folder: Path, lines: list[str]) -> None:
    vocab, _ = train([cases.KIMI_PATTERN], lines)
    ranks = sorted((rank, bytes_of(token)) for token, rank in vocab.items())
    (folder / "tiktoken.model").write_text(
        "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in ranks))
    named = {str(len(ranks) + offset): {"content": text, "lstrip": False, "normalized": False,
                                        "rstrip": False, "single_word": False, "special": special}
             for offset, text, special in KIMI_ADDED}
    config = {"added_tokens_decoder": named, "bos_token": "[BOS]", "eos_token": "[EOS]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def variants(base: dict, rng: random.Random) -> list[dict]:
    """Patches of the base that use the rest of what is supported, each with cases."""
    size = max(base["model"]["vocab"].values()) + 1
    patches = {
        "split_removed": {"pre_tokenizer": sequence(split_step(r"\s+", "Removed"))},
        "split_with_previous": {
            "pre_tokenizer": sequence(split_step(" ", "MergedWithPrevious", "String"))},
        "split_with_next": {"pre_tokenizer": sequence(split_step(r"[\s.]", "MergedWithNext"))},
        "split_contiguous": {
            "pre_tokenizer": sequence(split_step("(", "Contiguous", "String"),
                                      split_step(r"\p{L}", "Contiguous"))},
        "split_inverted": {
            "pre_tokenizer": sequence({**split_step(r"[\p{L}\p{N}]+", "Removed"), "invert": True})},
        "split_empty_matches": {"pre_tokenizer": sequence(split_step(r"\d*"))},
        "split_empty_string": {"pre_tokenizer": sequence(split_step("", kind="String"))},
        "digits": {"pre_tokenizer": sequence({"type": "Digits", "individual_digits": False})},
        "digits_each": {"pre_tokenizer": sequence({"type": "Digits", "individual_digits": True})},
        "byte_level_pattern": {"pre_tokenizer": {**BYTE_LEVEL, "use_regex": True}},
        "no_split": {"pre_tokenizer": BYTE_LEVEL},
        # A token that no merges lead to; the added ones move behind it.
        "ignore_merges": {
            "model": {"ignore_merges": True, "vocab": {"kazoo": size}},
            "added_tokens": [{**token, "id": token["id"] + (token["id"] >= size)}
                             for token in base["added_tokens"]]},
        "added_strip": {"added_tokens": [
            added_token(size, "<left>", True, lstrip=True),
            added_token(size + 1, "<right>", True, rstrip=True),
            added_token(size + 2, "<both>", False, lstrip=True, rstrip=True),
            added_token(size + 3, "<le", True),
            added_token(size + 4, "<left><right>", False),
            added_token(size + 5, "x\u3000x", False),
        ]},
    }
    made = []
    for name, patch in patches.items():
        oracle = cases.HuggingFaceOracle(cases.merge_patch(base, patch))
        texts = [cases.random_text(rng, oracle.added) for _ in range(24)] + ["", " ", "kazoo kazoo"]
        if name == "added_strip":
            texts += ["".join(rng.choice([*oracle.added, " ", "\u3000", "\n", "x"])
                              for _ in range(8)) for _ in range(60)]
        flags = [True, False] if name in ("added_strip", "ignore_merges") else [True]
        made.append({"name": name, "patch": patch, "cases": [
            cases.encode_case(oracle, text, special) for text in texts for special in flags]})
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path(__file__).resolve().parent.parent / "data" / "tokenizer"
    parser.add_argument("--output", type=Path, default=default)
    parser.add_argument("--seed", type=int, default=20)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    lines = made_up_text(rng)

    deepseek = arguments.output / "deepseek_like"
    deepseek.mkdir(parents=True, exist_ok=True)
    base = deepseek_like(lines)
    (deepseek / "tokenizer.json").write_text(
        json.dumps(base, ensure_ascii=False, indent=None, separators=(",", ":")) + "\n",
        encoding="utf-8")
    oracle = cases.HuggingFaceOracle(base)
    cases.write_cases(deepseek / "cases.jsonl", cases.all_cases(oracle, 300, arguments.seed) +
                      cases.long_cases(oracle))
    cases.write_cases(deepseek / "variants.jsonl", variants(base, rng))

    kimi = arguments.output / "kimi_like"
    kimi.mkdir(parents=True, exist_ok=True)
    write_kimi_like(kimi, lines)
    oracle = cases.TiktokenOracle(kimi)
    cases.write_cases(kimi / "cases.jsonl", cases.all_cases(oracle, 300, arguments.seed) +
                      cases.long_cases(oracle))


if __name__ == "__main__":
    main()
