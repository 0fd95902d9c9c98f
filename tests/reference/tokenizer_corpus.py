"""Longer texts for tokenizers: documents and code of this machine, and made-up text in many scripts.

What is read differs from machine to machine; the oracle gives the ids, so any text will do.
"""

import random
import sysconfig
import unicodedata
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# Folders, and the share of the whole that is read of each.
FOLDERS = [(ROOT, 0.4), (Path("/usr/share/doc"), 0.2), (Path(sysconfig.get_path("stdlib")), 0.4)]
SUFFIXES = {"", ".md", ".txt", ".py", ".cpp", ".h", ".cu", ".cuh", ".sh", ".c", ".html", ".rst",
            ".toml", ".cmake", ".jsonl"}
SKIPPED_FOLDERS = {"build", ".git"}
MAX_FILE_BYTES = 200_000
CHUNK_CHARACTERS = 20_000  # a difference is shown with the whole text of its case

# First and last code point of letters of a script, and how its words are set apart.
SCRIPTS = [
    (0x61, 0x7A, " "), (0xC0, 0x17E, " "), (0x391, 0x3C9, " "), (0x410, 0x44F, " "),
    (0x531, 0x587, " "), (0x5D0, 0x5EA, " "), (0x621, 0x652, " "), (0x905, 0x94D, " "),
    (0x985, 0x9CD, " "), (0xE01, 0xE4E, ""), (0x10D0, 0x10F6, " "), (0x1200, 0x1357, "\u1361"),
    (0x1780, 0x17D3, "\u200b"), (0x3041, 0x3094, ""), (0x30A1, 0x30FE, "\u30fb"),
    (0x4E00, 0x9FA5, ""), (0xAC00, 0xD7A3, " "), (0x1F600, 0x1F64F, " "), (0x20000, 0x2A6D6, ""),
]


def known(character: str) -> bool:
    """Whether every regex library classes a character alike: it is old enough, or no text at all."""
    return ord(character) < 0x80 or unicodedata.ucd_3_2_0.category(character) not in ("Cn", "Cs")


def chunks(text: str) -> Iterator[str]:
    for start in range(0, len(text), CHUNK_CHARACTERS):
        yield text[start:start + CHUNK_CHARACTERS]


def read_folder(folder: Path, num_bytes: int, rng: random.Random) -> Iterator[str]:
    """Texts of files chosen at random, `num_bytes` in all, or less if the folder holds less."""
    files = sorted(path for path in folder.rglob("*")
                   if path.suffix in SUFFIXES and not path.is_symlink() and path.is_file()
                   and not SKIPPED_FOLDERS & set(path.relative_to(folder).parts[:-1]))
    rng.shuffle(files)
    for path in files:
        if num_bytes <= 0:
            return
        try:
            content = path.read_bytes()[:MAX_FILE_BYTES]
        except OSError:
            continue
        if b"\0" in content:
            continue
        num_bytes -= len(content)
        text = content.decode("utf-8", errors="replace")
        yield from chunks("".join(c if known(c) else "\ufffd" for c in text))


def made_up(num_characters: int, rng: random.Random) -> Iterator[str]:
    """Paragraphs of made-up words, most in one script, with numbers and punctuation."""
    text = []
    length = 0
    while length < num_characters:
        first, last, gap = rng.choice(SCRIPTS)
        words = []
        for _ in range(rng.randrange(5, 60)):
            word = "".join(chr(rng.randrange(first, last + 1)) for _ in range(rng.randrange(1, 9)))
            word = "".join(filter(known, word))
            kind = rng.random()
            if kind < 0.1:
                word = str(rng.randrange(10**rng.randrange(1, 8)))
            elif kind < 0.2:
                word += rng.choice([",", ".", "!", "?", ":", "\u3001", "\u3002", "\uff01", "\u060c"])
            elif kind < 0.3:
                word = word.capitalize()
            words.append(word)
        paragraph = gap.join(words) + rng.choice(["\n", "\n\n", "\r\n", " \n"])
        text.append(paragraph)
        length += len(paragraph)
    yield from chunks("".join(text))


def corpus(num_bytes: int, seed: int) -> Iterator[str]:
    """About `num_bytes` of text of the folders, and a quarter as many made-up characters."""
    rng = random.Random(seed)
    for folder, share in FOLDERS:
        yield from read_folder(folder, int(share * num_bytes), rng)
    yield from made_up(num_bytes // 4, rng)
