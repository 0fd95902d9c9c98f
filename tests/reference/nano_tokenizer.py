"""A byte-level BPE vocabulary in Kimi's files, trained and used with nothing but Python.

The files are `tiktoken.model` (a line a token: base64, blank, rank) and `tokenizer_config.json`
with Kimi K2's control tokens behind the ranks, which the engine's src/text reads. All text here is
ASCII, for which Kimi's split pattern can be said with Python's `re`.
"""

from __future__ import annotations

import base64
import heapq
import json
import multiprocessing
import re
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

NUM_ADDED = 256  # Kimi K2 has so many ids behind its ranks
# Offsets from the number of ranks; the other names are <|reserved_token_ID|>.
ADDED = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>",
         6: "<|start_header_id|>", 7: "<|end_header_id|>", 9: "[EOT]", 10: "<|im_system|>",
         17: "<|im_middle|>", 254: "[UNK]", 255: "[PAD]"}
BOS, EOS, IM_END, UNKNOWN, PAD = 0, 1, 2, 254, 255

# Kimi's alternatives in their order, for ASCII: words that end in lower case, words in upper case,
# up to three digits, punctuation, line ends, blanks before a word, other blanks.
PATTERN = re.compile(
    r"[^\r\nA-Za-z0-9]?[A-Z]*[a-z]+(?:'(?i:s|t|re|ve|m|ll|d))?"
    r"|[^\r\nA-Za-z0-9]?[A-Z]+[a-z]*(?:'(?i:s|t|re|ve|m|ll|d))?"
    r"|[0-9]{1,3}"
    r"| ?[^\sA-Za-z0-9]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+")


def count_pieces(texts: list[str]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(PATTERN.findall(text))
    return counts


# --- Training --------------------------------------------------------------------------------


class Merger:
    """Words as lists of ids, and of every pair of neighbours its count and the words it is in."""

    def __init__(self, counts: Counter[str]) -> None:
        self.words = [list(piece.encode("ascii")) for piece in counts]
        self.word_counts = list(counts.values())
        self.pair_counts: Counter[tuple[int, int]] = Counter()
        self.pair_words: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        for index in range(len(self.words)):
            self.count_word(index, 1)
        self.heap = [(-count, pair) for pair, count in self.pair_counts.items()]
        heapq.heapify(self.heap)

    def count_word(self, index: int, sign: int) -> set[tuple[int, int]]:
        word, count = self.words[index], sign * self.word_counts[index]
        for pair in zip(word, word[1:]):
            self.pair_counts[pair] += count
            if sign > 0:
                self.pair_words[pair].add(index)
        return set(zip(word, word[1:]))

    def best_pair(self) -> tuple[int, int]:
        """The most frequent pair, the lower ids among equals; entries of old counts are skipped."""
        while True:
            count, pair = heapq.heappop(self.heap)
            if -count == self.pair_counts[pair] and count < 0:
                return pair

    def merge(self, pair: tuple[int, int], new_id: int) -> None:
        changed: set[tuple[int, int]] = set()
        for index in self.pair_words.pop(pair):
            word = self.words[index]
            if pair not in zip(word, word[1:]):
                continue  # an earlier merge took it
            changed |= self.count_word(index, -1)
            self.words[index] = replaced(word, pair, new_id)
            changed |= self.count_word(index, 1)
        for other in changed:
            if self.pair_counts[other] > 0:
                heapq.heappush(self.heap, (-self.pair_counts[other], other))


def replaced(word: list[int], pair: tuple[int, int], new_id: int) -> list[int]:
    result, at = [], 0
    while at < len(word):
        if at + 1 < len(word) and (word[at], word[at + 1]) == pair:
            result.append(new_id)
            at += 2
        else:
            result.append(word[at])
            at += 1
    return result


def train_ranks(texts: list[str], num_ranks: int) -> list[bytes]:
    """The tokens by rank: the 256 bytes in order, then merges of the most frequent pair.

    Pieces seen once are left out: they are many and decide nothing.
    """
    counts = Counter({piece: count for piece, count in count_pieces(texts).items() if count > 1})
    merger = Merger(counts)
    tokens = [bytes([byte]) for byte in range(256)]
    while len(tokens) < num_ranks:
        pair = merger.best_pair()
        tokens.append(tokens[pair[0]] + tokens[pair[1]])
        merger.merge(pair, len(tokens) - 1)
    # Two ways of merging may give one string; its second rank would never be used.
    if len(set(tokens)) != len(tokens):
        raise SystemExit("the vocabulary has a token twice; train it with another num_ranks")
    return tokens


# --- Use -------------------------------------------------------------------------------------


class Tokenizer:
    """tokens: bytes by rank; the added tokens follow them."""

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = tokens
        self.ranks = {token: rank for rank, token in enumerate(tokens)}
        self.vocab_size = len(tokens) + NUM_ADDED
        self.cache: dict[str, list[int]] = {}

    def added(self, offset: int) -> int:
        return len(self.tokens) + offset

    def encode_piece(self, piece: str) -> list[int]:
        """The whole piece, or neighbours merged whose joint bytes have the lowest rank."""
        content = piece.encode("ascii")
        if content in self.ranks:
            return [self.ranks[content]]
        parts = [bytes([byte]) for byte in content]
        while len(parts) > 1:
            candidates = [(self.ranks.get(a + b, len(self.ranks)), at)
                          for at, (a, b) in enumerate(zip(parts, parts[1:]))]
            rank, at = min(candidates)
            if rank == len(self.ranks):
                break
            parts[at:at + 2] = [parts[at] + parts[at + 1]]
        return [self.ranks[part] for part in parts]

    def encode(self, text: str) -> list[int]:
        if not text.isascii():
            raise ValueError("text beyond ASCII, which the pattern here does not cover")
        ids: list[int] = []
        for piece in PATTERN.findall(text):
            known = self.cache.get(piece)
            if known is None:
                known = self.cache[piece] = self.encode_piece(piece)
            ids += known
        return ids

    def decode(self, ids: list[int]) -> str:
        parts = [self.tokens[i] if i < len(self.tokens) else b"<%d>" % i for i in ids]
        return b"".join(parts).decode("utf-8", errors="replace")

    def encode_stream(self, texts: list[str]) -> np.ndarray:
        """The ids of all texts, [EOS] after each, as one uint16 array."""
        eos = self.added(EOS)
        return np.array([i for text in texts for i in (*self.encode(text), eos)], dtype=np.uint16)

    def encode_streams(self, texts: list[str], processes: int) -> np.ndarray:
        """encode_stream by several processes."""
        if processes < 2:
            return self.encode_stream(texts)
        share = -(-len(texts) // (4 * processes))
        parts = [texts[at:at + share] for at in range(0, len(texts), share)]
        with multiprocessing.get_context("fork").Pool(processes) as pool:
            return np.concatenate(pool.map(self.encode_stream, parts))

    def write(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        lines = [f"{base64.b64encode(token).decode()} {rank}\n"
                 for rank, token in enumerate(self.tokens)]
        (directory / "tiktoken.model").write_text("".join(lines), encoding="ascii")
        decoder = {str(self.added(offset)): {"content": name, "special": True}
                   for offset, name in ADDED.items()}
        config = {"added_tokens_decoder": decoder, "bos_token": ADDED[BOS],
                  "eos_token": ADDED[EOS], "pad_token": ADDED[PAD], "unk_token": ADDED[UNKNOWN],
                  "tokenizer_class": "TikTokenTokenizer"}
        (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n",
                                                         encoding="ascii")


def read_tokenizer(directory: Path) -> Tokenizer:
    lines = (directory / "tiktoken.model").read_text(encoding="ascii").splitlines()
    return Tokenizer([base64.b64decode(line.split(" ")[0]) for line in lines])
