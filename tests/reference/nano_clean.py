"""Plain ASCII paragraphs out of dictionaries, manual pages and documentation, for nano_data.py.

Every cleaner takes the text of one file and yields its prose, a paragraph a string without line
ends. What is not prose (code, tables, tables of contents) is dropped rather than mended.
"""

from __future__ import annotations

import gzip
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

PUNCTUATION = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"',
                             "\u2013": "-", "\u2014": "--", "\u2026": "...", "\u00a0": " "})
PROSE = re.compile(r"[A-Za-z ,.;'\"()-]")
SHORTEST = 30  # characters of a paragraph


def read_text(path: Path) -> str:
    """.gz and .dz (gzip with an index) are unpacked; what is not UTF-8 is read as Latin-1."""
    content = path.read_bytes()
    if path.suffix in (".gz", ".dz"):
        content = gzip.decompress(content)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return content.decode("latin-1")


def tidy(text: str) -> str | None:
    """One line of printable ASCII, accents removed; None for what is too short or no prose."""
    text = text.translate(PUNCTUATION)
    if not text.isascii():
        text = unicodedata.normalize("NFKD", text)
        text = "".join(c for c in text if not unicodedata.combining(c))
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r" ([,.;:])", r"\1", text)
    if len(text) < SHORTEST or not text.isascii() or not text.isprintable():
        return None
    return text if len(PROSE.findall(text)) >= 0.88 * len(text) else None


def kept(paragraphs: Iterator[str]) -> Iterator[str]:
    for paragraph in paragraphs:
        text = tidy(paragraph)
        if text is not None:
            yield text


# --- Dictionaries ----------------------------------------------------------------------------


def dict_entries(text: str) -> Iterator[tuple[str, list[str]]]:
    """A headword at the start of a line, and the indented or empty lines that follow it."""
    head, body = "", []  # type: str, list[str]
    for line in text.split("\n"):
        if line and not line[0].isspace():
            if head and body:
                yield head, body
            head, body = line.strip(), []
        else:
            body.append(line)
    if head and body:
        yield head, body


PARTS_OF_SPEECH = {"n": "noun", "v": "verb", "adj": "adjective", "adv": "adverb"}
SENSE = re.compile(r"\s+(n|v|adj|adv)?\s*(\d+)?: (.*)")


def wordnet_entries(text: str) -> Iterator[str]:
    """"word (noun): gloss."; synonyms share a gloss, the first of them keeps it."""
    seen: set[str] = set()
    for head, body in dict_entries(text):
        if head.startswith("00-database"):
            continue
        part = ""
        senses: list[str] = []
        for line in body:
            match = SENSE.fullmatch(line)
            if match:
                part = PARTS_OF_SPEECH.get(match[1] or "", part)
                senses.append(f"{head} ({part}): {match[3]}")
            elif senses:
                senses[-1] += " " + line.strip()
        fresh = []
        for sense in senses:
            # Synonyms and antonyms stand in brackets behind the gloss.
            sense = re.sub(r"\s*\[[^\]]*\]", "", sense).strip()
            gloss = sense.split("): ", 1)[-1]
            if gloss not in seen:
                seen.add(gloss)
                fresh.append(sense.rstrip(".") + ".")
        yield from kept(iter(fresh))


def gcide_entries(text: str) -> Iterator[str]:
    """"Word, n. meaning": without pronunciation, etymology and the marks of sources."""
    for head, body in dict_entries(text):
        if head.startswith("00-database"):
            continue
        entry = head + "\n" + "\n".join(body)
        entry = re.sub(r"\s*\\[^\\]*\\", "", entry)
        for _ in range(2):  # brackets may hold brackets
            entry = re.sub(r"\s*\[[^\[\]]*\]", "", entry)
        entry = re.sub(r"[{}]", "", entry)
        entry = re.sub(r" --[A-Z][\w.' ]*(?=\n|$)", "", entry)  # whom a quotation is from
        yield from kept(paragraph for paragraph in re.split(r"\n\s*\n", entry)
                        if not paragraph.lstrip().startswith("Note:"))


# --- Manual pages ----------------------------------------------------------------------------

FONT_MACROS = {".B", ".I", ".BR", ".RB", ".BI", ".IB", ".IR", ".RI", ".SM", ".SB"}
BREAKS = {".PP", ".P", ".LP", ".TP", ".IP", ".HP", ".RS", ".RE", ".sp", ".br"}
WANTED = re.compile(r"DESCRIPTION|NOTES|OPTIONS|BUGS|RETURN VALUE|NAME|ERRORS|CAVEATS")


def roff_words(line: str) -> list[str]:
    return [a or b for a, b in re.findall(r'"([^"]*)"|(\S+)', line)]


def roff_inline(text: str) -> str:
    """Escapes of troff as characters."""
    text = re.sub(r"\\f(\[[^\]]*\]|\(..|.)", "", text)
    text = re.sub(r"\\s[-+]?\d", "", text)
    for escape, plain in (("\\-", "-"), ("\\(aq", "'"), ("\\(dq", '"'), ("\\(em", "--"),
                          ("\\&", ""), ("\\ ", " "), ("\\~", " "), ("\\e", "\\"), ("\\|", ""),
                          ("\\%", ""), ("\\c", ""), ("\\:", ""), ("\\'", "'"), ("\\/", "")):
        text = text.replace(escape, plain)
    return text


def manual_page(text: str) -> Iterator[str]:
    """Filled paragraphs of the wanted sections; a paragraph with an unknown escape is dropped."""
    yield from kept(p for p in manual_paragraphs(text) if "\\" not in p)


def manual_paragraphs(text: str) -> Iterator[str]:
    wanted, verbatim = False, False
    words: list[str] = []
    for line in text.split("\n"):
        macro = line.split(" ", 1)[0] if line.startswith(".") else ""
        rest = line[len(macro):].strip()
        if macro in (".SH", ".SS") or macro in BREAKS or macro in (".nf", ".EX", ".TS"):
            yield " ".join(words)
            words = []
        if macro == ".SH":
            wanted = WANTED.fullmatch(rest.strip('"')) is not None
        elif macro in (".nf", ".EX", ".TS"):
            verbatim = True
        elif macro in (".fi", ".EE", ".TE"):
            verbatim = False
        elif not wanted or verbatim:
            continue
        elif macro in FONT_MACROS:
            glue = "" if len(macro) == 3 else " "  # two fonts take turns without a blank
            words.append(roff_inline(glue.join(roff_words(rest))))
        elif not macro and not line.startswith("'"):
            words.append(roff_inline(line))
    yield " ".join(words)


# --- Documentation ---------------------------------------------------------------------------


def pod(text: str) -> Iterator[str]:
    """Ordinary paragraphs of perl's documentation: no commands, no indented code."""
    def paragraphs() -> Iterator[str]:
        for paragraph in re.split(r"\n\s*\n", text):
            if not paragraph or paragraph[0] in "= \t":
                continue
            paragraph = paragraph.replace("E<gt>", ">").replace("E<lt>", "<")
            paragraph = re.sub(r"[XZ]<[^<>]*>", "", paragraph)
            for _ in range(3):  # codes may hold codes
                paragraph = re.sub(r"L<([^<>|]*)\|[^<>]*>", r"\1", paragraph)
                paragraph = re.sub(r"[BCFILS]<([^<>]*)>", r"\1", paragraph)
            yield paragraph

    yield from kept(paragraphs())


def plain_text(text: str) -> Iterator[str]:
    """Paragraphs of a text edition; footnote marks, rules and tables of contents are dropped."""
    def paragraphs() -> Iterator[str]:
        for paragraph in re.split(r"\n\s*\n", text):
            if re.search(r"\.{4}|[|+*=_-]{4}|\. \. \.", paragraph):
                continue
            yield re.sub(r"\[\d+\]|[_*`]", "", paragraph.lstrip(" *-"))

    yield from kept(paragraphs())
