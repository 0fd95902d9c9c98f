"""Makes the text that the nano model is trained on, from packages of Debian 12.

    python3 nano_data.py --output build/nano/corpus.xz [--packages DIR]

Needs a machine with network, `apt-get` and `dpkg-deb` (no root). With --packages the .deb files are
taken from DIR, and only what lacks there is downloaded into it. The result is one xz file of JSON
lines: the first states the sources ({"sources": [...], "seed": n}), every other is a document
{"split": "train" | "heldout", "source": package, "text": ASCII text}. Documents are shuffled; the
split hangs on a document's text and the seed alone.

| package | what is taken | licence of the text |
| --- | --- | --- |
| dict-gcide | dictionary entries | GPL-2+ |
| dict-wn | WordNet 3.0 glosses | WordNet 3.0 (MIT-like, with its notice) |
| manpages, manpages-dev | prose of the manual pages | GPL-2+, BSD, MIT-like, by page |
| perl-doc | prose of the perl manual | GPL-1+ or Artistic |
| debian-policy, developers-reference, debian-reference-en | the text edition | GPL-2+ |

The versions are those that apt finds; the first line of the file records them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import random
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import nano_clean

# Package and cleaner of its files; the patterns are relative to the root of the package.
SOURCES = {
    "dict-gcide": ("usr/share/dictd/gcide.dict.dz", nano_clean.gcide_entries),
    "dict-wn": ("usr/share/dictd/wn.dict.dz", nano_clean.wordnet_entries),
    "manpages": ("usr/share/man/man?/*.gz", nano_clean.manual_page),
    "manpages-dev": ("usr/share/man/man?/*.gz", nano_clean.manual_page),
    "perl-doc": ("usr/share/perl/*/**/*.pod", nano_clean.pod),
    "debian-policy": ("usr/share/doc/debian-policy/policy.txt.gz", nano_clean.plain_text),
    "developers-reference": ("usr/share/developers-reference/developers-reference.txt.gz",
                             nano_clean.plain_text),
    "debian-reference-en": ("usr/share/debian-reference/debian-reference.en.txt.gz",
                            nano_clean.plain_text),
}
DOCUMENT_CHARACTERS = 3000  # a document ends with the paragraph that passes this
HELDOUT_SHARE = 0.01
SEED = 1


def find_package(folder: Path, package: str) -> Path:
    """The .deb of `package` in `folder`, downloaded if it is not there."""
    found = sorted(folder.glob(f"{package}_*.deb"))
    if not found:
        subprocess.run(["apt-get", "download", package], cwd=folder, check=True)
        found = sorted(folder.glob(f"{package}_*.deb"))
    if len(found) != 1:
        raise SystemExit(f"{folder}: {len(found)} files {package}_*.deb, expected one")
    return found[0]


def version_of(deb: Path) -> str:
    return subprocess.run(["dpkg-deb", "--field", str(deb), "Version"], check=True,
                          capture_output=True, text=True).stdout.strip()


def documents(paragraphs: Iterable[str]) -> Iterator[str]:
    """Joins paragraphs, a blank line between them, to documents of about equal size."""
    kept: list[str] = []
    size = 0
    for paragraph in paragraphs:
        kept.append(paragraph)
        size += len(paragraph) + 2
        if size >= DOCUMENT_CHARACTERS:
            yield "\n\n".join(kept)
            kept, size = [], 0
    if size >= DOCUMENT_CHARACTERS // 10:
        yield "\n\n".join(kept)


def package_documents(deb: Path, package: str) -> Iterator[str]:
    """Cleaned documents of one package; a paragraph seen before in it is left out."""
    pattern, cleaner = SOURCES[package]
    seen: set[bytes] = set()

    def fresh(paragraphs: Iterable[str]) -> Iterator[str]:
        for paragraph in paragraphs:
            digest = hashlib.blake2b(paragraph.encode("ascii"), digest_size=8).digest()
            if digest not in seen:
                seen.add(digest)
                yield paragraph

    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["dpkg-deb", "--extract", str(deb), folder], check=True)
        files = [path for path in sorted(Path(folder).glob(pattern)) if path.is_file()]
        if not files:
            raise SystemExit(f"{deb}: no file {pattern}")
        for path in files:
            yield from documents(fresh(cleaner(nano_clean.read_text(path))))


def is_heldout(text: str) -> bool:
    digest = hashlib.blake2b(f"{SEED}:{text}".encode("ascii"), digest_size=4).digest()
    return int.from_bytes(digest, "little") < HELDOUT_SHARE * 2**32


def write_corpus(path: Path, folder: Path) -> None:
    sources, lines = [], []
    for package in SOURCES:
        deb = find_package(folder, package)
        texts = list(package_documents(deb, package))
        characters = sum(map(len, texts))
        sources.append({"package": package, "version": version_of(deb), "documents": len(texts),
                        "characters": characters})
        print(f"{package} {sources[-1]['version']}: {len(texts)} documents, {characters} bytes",
              flush=True)
        lines += [json.dumps({"split": "heldout" if is_heldout(text) else "train",
                              "source": package, "text": text}) for text in texts]
    random.Random(SEED).shuffle(lines)
    head = json.dumps({"sources": sources, "seed": SEED})
    path.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(path, "wt", preset=6, encoding="ascii") as file:
        file.write("\n".join([head] + lines) + "\n")
    print(f"{path}: {path.stat().st_size} bytes, {len(lines)} documents", flush=True)


def read_corpus(path: Path) -> tuple[dict, list[str], list[str]]:
    """The head of the file, the texts to train on, the texts held out."""
    with lzma.open(path, "rt", encoding="ascii") as file:
        head = json.loads(next(file))
        texts: dict[str, list[str]] = {"train": [], "heldout": []}
        for line in file:
            document = json.loads(line)
            texts[document["split"]].append(document["text"])
    return head, texts["train"], texts["heldout"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the .xz file to write")
    parser.add_argument("--packages", type=Path, help="folder of .deb files (default: a new one)")
    arguments = parser.parse_args()
    if arguments.packages:
        arguments.packages.mkdir(parents=True, exist_ok=True)
        write_corpus(arguments.output, arguments.packages)
        return
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(arguments.output, Path(folder))


if __name__ == "__main__":
    main()
