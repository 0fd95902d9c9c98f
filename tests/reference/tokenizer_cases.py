"""Texts that are hard on tokenizers, and the ids that the public packages give them.

Needs the packages `tokenizers` and `tiktoken`, which the tests themselves do not: their outputs are
committed.
"""

import base64
import json
import random
import unicodedata
from pathlib import Path

# Kimi K2's split pattern: alternatives in their order.
KIMI_PATTERN = "|".join([
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
])
KIMI_NUM_ADDED = 256
KIMI_MAX_CHARACTERS = 400_000
KIMI_MAX_RUN = 25_000

FRAGMENTS = [
    "the", "The", "THE", "hello", "world", "HTTPServer", "camelCase", "snake_case", "don't",
    "I'LL", "we've", "'s", "'S", "it\u2019s", "caf\u00e9", "cafe\u0301", "na\u00efve",
    "stra\u00dfe", "\u017f", "'\u017f", "\u0130stanbul", "\u01c5", "\u02b0", "\u4f60\u597d",
    "\u4e16\u754c", "\u6771\u4eac\u30bf\u30ef\u30fc", "\u3072\u3089\u304c\u306a", "\u30a2",
    "\u3005", "\u3007", "\ud55c\uad6d\uc5b4", "\u0645\u0631\u062d\u0628\u0627",
    "\u05e9\u05dc\u05d5\u05dd", "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "\u0928\u092e\u0938\u094d\u0924\u0947", "\u041f\u0440\u0438\u0432\u0435\u0442",
    "\u0395\u03bb\u03bb\u03ac\u03b4\u03b1", "\U0001f600", "\U0001f469\u200d\U0001f4bb",
    "\U0001f1e9\U0001f1ea", "\U00020000", "\ue000", "\u200b", "\ufeff", "\u00ad", "0", "12",
    "1234567", "3.14159", "\u0663\u0664\u0665", "\u00bd", "\u2167", "\u2460", "x2", "2x", " ",
    "  ", "   ", "\t", "\n", "\r\n", "\n\n", " \n", "\n ", "\u00a0", "\u3000", "\u2003", "\u2028",
    "\u0085", "\u180e", "\x1c", "\x00", "\x7f", "!", "?!", "...", "\u2026", "\uff0c", "\u3002",
    "\uff5c", "\u2581", "(", ")", "{}", "[0]", "</p>", "<", "<|", "|>", "==", "->", "//",
    "#include", "$x", "\u20ac", "\u00b0", "+", "^", "`", "~", "_", "\\", "\"", "'", "a" * 9,
    "ab" * 7, "=" * 12, "-" * 5,
]


def random_character(rng: random.Random) -> str:
    """Any character of Unicode 3.2, or U+FFFD: regex libraries know versions that differ, and what
    is a letter to one is unassigned to another."""
    character = chr(rng.randrange(rng.choice([0x80, 0x250, 0x3000, 0x10000, 0x30000, 0x110000])))
    return "\ufffd" if unicodedata.ucd_3_2_0.category(character) in ("Cs", "Cn") else character


def random_text(rng: random.Random, added: list[str]) -> str:
    """A text of fragments, random characters and, at times, added tokens whole or damaged."""
    pieces = []
    for _ in range(rng.choice([1, 2, 3, 5, 8, 13, 21])):
        kind = rng.random()
        if kind < 0.62:
            pieces.append(rng.choice(FRAGMENTS))
        elif kind < 0.74:
            pieces.append(" " + rng.choice(FRAGMENTS))
        elif kind < 0.84:
            pieces.append(random_character(rng))
        elif kind < 0.96 or not added:
            letters = rng.choice(["abcdefghij", "ABCdef '", "\u4e00\u4e01\u4e03\u4e07",
                                  "0123456789 ", " \n\r\t"])
            pieces.append("".join(rng.choice(letters) for _ in range(rng.randrange(1, 12))))
        else:
            token = rng.choice(added)
            pieces.append(token if rng.random() < 0.7 else token[:rng.randrange(1, len(token))])
    return "".join(pieces)


def cut_like_kimi(text: str) -> list[str]:
    """Parts that Kimi's tokenizer encodes one by one."""
    parts = []
    for start in range(0, len(text), KIMI_MAX_CHARACTERS):
        block = text[start:start + KIMI_MAX_CHARACTERS]
        begin, run, in_space = 0, 0, block[0].isspace()
        for i, character in enumerate(block):
            run = run + 1 if character.isspace() == in_space else 1
            in_space = character.isspace()
            if run > KIMI_MAX_RUN:
                parts.append(block[begin:i])
                begin, run = i, 1
        parts.append(block[begin:])
    return parts


class HuggingFaceOracle:
    """What `tokenizers` says to the content of a tokenizer.json."""

    def __init__(self, content: dict):
        from tokenizers import Tokenizer
        self.added = [token["content"] for token in content.get("added_tokens", [])]
        self._whole = Tokenizer.from_str(json.dumps(content))
        # The package itself still finds tokens that are not special; without the list it cannot.
        self._plain = Tokenizer.from_str(json.dumps({**content, "added_tokens": []}))
        self.ids = sorted(self._whole.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str, parse_special: bool) -> list[int]:
        tokenizer = self._whole if parse_special else self._plain
        return tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self._whole.decode(ids, skip_special_tokens=False)


class TiktokenOracle:
    """What `tiktoken` says to Kimi's pattern, the ranks and the added tokens of a directory."""

    def __init__(self, folder: Path):
        import tiktoken
        ranks = {}
        for line in (folder / "tiktoken.model").read_bytes().splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token)] = int(rank)
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        named = config["added_tokens_decoder"]
        specials = {}
        for rank in range(len(ranks), len(ranks) + KIMI_NUM_ADDED):
            entry = named.get(str(rank))
            specials[entry["content"] if entry else f"<|reserved_token_{rank}|>"] = rank
        self.added = [entry["content"] for entry in named.values()]
        self.encoding = tiktoken.Encoding(name="kimi", pat_str=KIMI_PATTERN,
                                          mergeable_ranks=ranks, special_tokens=specials)
        self.ids = list(range(len(ranks) + KIMI_NUM_ADDED))

    def encode(self, text: str, parse_special: bool) -> list[int]:
        ids = []
        for part in cut_like_kimi(text):
            ids += (self.encoding.encode(part, allowed_special="all") if parse_special
                    else self.encoding.encode_ordinary(part))
        return ids

    def decode(self, ids: list[int]) -> str:
        return self.encoding.decode(ids, errors="replace")


def open_oracle(path: Path):
    """For a tokenizer.json or a directory with tiktoken.model and tokenizer_config.json."""
    if path.is_dir():
        return TiktokenOracle(path)
    return HuggingFaceOracle(json.loads(path.read_text(encoding="utf-8")))


def digest(ids: list[int]) -> str:
    """FNV-1a over whole ids, 64 bits; JSON numbers would lose some."""
    value = 0xCBF29CE484222325
    for token in ids:
        value = (value ^ token) * 0x100000001B3 % 2**64
    return f"{value:016x}"


def encode_case(oracle, text: str, parse_special: bool) -> dict:
    return {"text": text, "special": parse_special, "ids": oracle.encode(text, parse_special)}


def long_case(oracle, parts: list[tuple[str, int]], parse_special: bool) -> dict:
    """A text of repeated strings, with its ids as a digest."""
    ids = oracle.encode("".join(text * count for text, count in parts), parse_special)
    return {"parts": parts, "special": parse_special, "num_ids": len(ids), "digest": digest(ids)}


def decode_case(oracle, rng: random.Random) -> dict:
    ids = [rng.choice(oracle.ids) for _ in range(rng.randrange(1, 12))]
    return {"decode": ids, "text": oracle.decode(ids)}


def long_cases(oracle) -> list[dict]:
    added = oracle.added[0]
    return [long_case(oracle, parts, special) for parts, special in [
        ([("a", 24_990), (" b", 3), ("\u00e9", 60_000)], False),
        ([(" ", 25_001), ("x", 1)], False),
        ([(" ", 30_000), ("\n", 30_000), ("x", 25_000), ("y", 2)], False),
        ([("\u4f60\u597d\u4e16\u754c", 20_000)], False),
        ([("the cat, 12 ", 34_000), (added, 2), ("12345", 11_000)], True),
        ([("ab" * 50 + " ", 4_000), (added, 1)], True),
        ([("\x1c", 25_000), ("\x1c", 2)], False),
        ([("'", 26_000), ("<", 26_000)], True),
    ]]


def all_cases(oracle, count: int, seed: int) -> list[dict]:
    """Every fragment, `count` random texts both ways, and a quarter as many random decodings."""
    rng = random.Random(seed)
    texts = ["", *FRAGMENTS, *oracle.added[:40]]
    cases = [encode_case(oracle, text, True) for text in texts]
    for _ in range(count):
        text = random_text(rng, oracle.added)
        cases.append(encode_case(oracle, text, rng.random() < 0.5))
    return cases + [decode_case(oracle, rng) for _ in range(count // 4)]


def write_cases(path: Path, cases: list[dict]) -> None:
    lines = [json.dumps(case, separators=(",", ":")) for case in cases]
    path.write_text("\n".join(lines) + "\n", encoding="ascii")


def merge_patch(value, patch):
    """RFC 7396."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(value) if isinstance(value, dict) else {}
    for key, change in patch.items():
        if change is None:
            merged.pop(key, None)
        else:
            merged[key] = merge_patch(merged.get(key), change)
    return merged
