#!/usr/bin/env python3
"""Trains the nano model: a DeepSeek-V3 target with INT4 experts, and its DFlash drafter.

    python3 train_nano.py --corpus build/nano/corpus.xz --output DIR [--minutes 8] [--resume]

Needs PyTorch 2.1 or newer and numpy, no network; a GPU unless --smoke. The corpus is that of
nano_data.py. Phases: the vocabulary and the token stream; the target (bf16 autocast, FP32 weights);
the target with INT4 experts in the loop; the drafter on text; greedy continuations of the INT4
target; the drafter on these; measurements. What is left of --minutes after the vocabulary, less a
reserve, is split over the phases by SHARES of nano_run.py; a phase's learning rate follows its
clock, so it always ends low.

DIR gets seven files or so: metrics.json, prompts.jsonl, perplexity_windows.jsonl, goldens.json and
the parts of nano.tar.gz (`cat nano.tar.gz.* | tar xz`: bf16, int4 and drafter, each a Hugging Face
directory). --work (default: DIR with `.work` behind it) holds these directories and the checkpoint
that --resume continues from.

nano_export.py states the sizes.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import nano_export
import nano_metrics
from config_ref import DrafterConfig, TargetConfig
from nano_data import read_corpus
from nano_drafter import Drafter, agreement, block_labels, draft_loss, random_anchors
from nano_model import Target
from nano_run import LEARNING_RATES, SHARES, SMOKE, STARTED, Run, Sizes, say, train_phase
from nano_tokenizer import Tokenizer, read_tokenizer, train_ranks

RESERVE_S = 65.0  # continuations, measurements, files
BALANCE_SPEED = 1e-3
NUM_RANKS = 2048
PART_BYTES = 15_000_000
VOCABULARY_TEXTS = 6000


# --- The target ------------------------------------------------------------------------------


def text_batch(run: Run, batch: int, length: int, generator: torch.Generator) -> Tensor:
    """[batch, length] windows of the training stream, at random places."""
    starts = torch.randint(len(run.train) - length, (batch, 1), generator=generator)
    places = (starts + torch.arange(length)).to(run.device, non_blocking=True)
    return run.train[places].long()


def train_target(run: Run, phase: str) -> None:
    """Next-token loss; phase int4 uses quantised experts in three steps of four.

    The fourth keeps the bf16 weights good by themselves. Longer windows in the end: of the same
    number of tokens.
    """
    sizes, number = run.sizes, list(SHARES).index(phase)
    forward: Callable[[Tensor], Tensor] = run.target
    if run.arguments.compile:
        forward = torch.compile(run.target)

    def loss_of(step: int, progress: float) -> Tensor:
        length = sizes.long_length if phase == "int4" or progress > 0.8 else sizes.length
        batch = max(1, sizes.batch * sizes.length // length)
        ids = text_batch(run, batch, length + 1, run.generator(number, step))
        run.target.set_quantized(phase == "int4" and step % 4 != 3)
        with run.autocast():
            logits = forward(ids[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

    def after_step(progress: float) -> None:
        for moe in run.target.moe_layers():
            moe.gate.balance(BALANCE_SPEED * LEARNING_RATES[phase] / 3e-3 * (1 - 0.9 * progress))

    train_phase(run, phase, run.target, loss_of, after_step)
    run.target.set_quantized(False)


# --- The drafter -----------------------------------------------------------------------------


def frozen_target(run: Run, quantized: bool) -> Target:
    """The target as it is written: bf16 weights, routed experts INT4 if `quantized`."""
    target = copy.deepcopy(run.target).eval().requires_grad_(False)
    nano_export.round_to_bf16(target)
    if quantized:
        nano_export.round_experts_to_int4(target)
    return target


def train_drafter(run: Run, phase: str, target: Target,
                  batch_of: Callable[[torch.Generator], tuple[Tensor, Tensor]]) -> None:
    """batch_of -> ids [B, S] and anchors [B, A]; the labels are the ids themselves."""
    drafter, number = run.drafter, list(SHARES).index(phase)

    def loss_of(step: int, progress: float) -> Tensor:
        ids, anchors = batch_of(run.generator(number, step))
        with run.autocast():
            with torch.no_grad():
                taps = target.hidden(ids, taps=drafter.config.target_layer_ids)[1]
            logits = drafter(target, ids, taps, anchors)
        return draft_loss(logits, block_labels(ids, anchors, drafter.config.block_size))

    train_phase(run, phase, drafter, loss_of, lambda progress: None)


def continuations(run: Run, target: Target, stream: Tensor, batches: int,
                  seed: int) -> list[tuple[Tensor, int]]:
    """Greedy continuations of prompts out of `stream`: ids [sequences, length] and the first
    position that the target wrote. Prompts are 1/8 and 3/8 of the length by turns."""
    sizes, results, started = run.sizes, [], time.monotonic()
    dtype = torch.bfloat16 if run.device.type == "cuda" else torch.float32
    for index in range(batches):
        if index > 1 and time.monotonic() - started > sizes.generate_s:
            break
        prompt = sizes.continuation * (1 + 2 * (index % 2)) // 8
        starts = torch.randint(len(stream) - prompt, (sizes.generated, 1),
                               generator=run.generator(seed, index))
        prompts = stream[(starts + torch.arange(prompt)).to(stream.device)].long().to(run.device)
        with run.autocast():
            ids = target.generate(prompts, sizes.continuation - prompt, dtype)[0]
        results.append((ids, prompt))
    say(f"continuations: {len(results)} x {sizes.generated} sequences of {sizes.continuation}")
    return results


def train_both_drafter_phases(run: Run, target: Target) -> None:
    sizes, size = run.sizes, run.drafter.config.block_size

    def text(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        ids = text_batch(run, sizes.drafter_batch, sizes.continuation, generator)
        return ids, random_anchors(ids, 1, sizes.anchors, size, generator)

    train_drafter(run, "drafter_text", target, text)
    if "drafter" in run.done:
        return
    written = continuations(run, target, run.train, sizes.generated_batches, 101)

    def greedy(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        index = int(torch.randint(len(written), (), generator=generator))
        ids, prompt = written[index]
        rows = torch.randint(len(ids), (sizes.drafter_batch,), generator=generator)
        ids = ids[rows.to(run.device)]
        return ids, random_anchors(ids, prompt, sizes.anchors, size, generator)

    train_drafter(run, "drafter", target, greedy)


# --- Start and end ---------------------------------------------------------------------------


def prepare_streams(arguments: argparse.Namespace) -> tuple[Tokenizer, Any, Any, list[str], Any]:
    """Vocabulary, training and held-out streams, held-out texts, sources; kept in --work."""
    head, train_texts, heldout_texts = read_corpus(arguments.corpus)
    if arguments.smoke:
        train_texts, heldout_texts = train_texts[:150], heldout_texts[:25]
    folder = arguments.work
    if arguments.resume and (folder / "streams.npz").exists():
        streams = np.load(folder / "streams.npz")
        return (read_tokenizer(folder), streams["train"], streams["heldout"], heldout_texts,
                head["sources"])
    num_ranks = 512 if arguments.smoke else NUM_RANKS
    tokenizer = Tokenizer(train_ranks(train_texts[:VOCABULARY_TEXTS], num_ranks))
    say(f"vocabulary: {tokenizer.vocab_size} tokens")
    processes = 1 if arguments.smoke else max(1, min(16, len(os.sched_getaffinity(0))))
    train = tokenizer.encode_streams(train_texts, processes)
    heldout = tokenizer.encode_stream(heldout_texts)
    tokenizer.write(folder)
    np.savez(folder / "streams.npz", train=train, heldout=heldout)
    say(f"streams: {len(train)} tokens to train on, {len(heldout)} held out")
    return tokenizer, train, heldout, heldout_texts, head["sources"]


def start(arguments: argparse.Namespace) -> Run:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not arguments.smoke:
        raise SystemExit("no GPU: only --smoke runs on a CPU")
    arguments.work.mkdir(parents=True, exist_ok=True)
    arguments.output.mkdir(parents=True, exist_ok=True)
    tokenizer, train, heldout, heldout_texts, sources = prepare_streams(arguments)
    torch.manual_seed(arguments.seed)
    target_json = nano_export.target_config(tokenizer, arguments.smoke)
    drafter_json = nano_export.drafter_config(target_json, tokenizer)
    length = target_json["max_position_embeddings"]
    run = Run(arguments=arguments, device=device, sizes=SMOKE if arguments.smoke else Sizes(),
              tokenizer=tokenizer, train=torch.from_numpy(train.astype(np.int32)).to(device),
              heldout=heldout, heldout_texts=heldout_texts,
              target=Target(TargetConfig.from_dict(target_json), length).to(device),
              drafter=Drafter(DrafterConfig.from_dict(drafter_json), length).to(device),
              configs={"target": target_json, "drafter": drafter_json, "sources": sources})
    left = 60 * arguments.minutes - RESERVE_S - (time.monotonic() - STARTED)
    run.seconds = {phase: share * max(left, 20.0) for phase, share in SHARES.items()}
    if arguments.resume and run.checkpoint_path().exists():
        run.load()
        say(f"resumed: phases done {run.done}, steps {run.steps}")
    say("seconds: " + ", ".join(f"{phase} {value:.0f}" for phase, value in run.seconds.items()))
    return run


def measure(run: Run, bf16: Target, int4: Target) -> dict[str, Any]:
    """Writes prompts, windows and goldens; returns the figures."""
    window = 64 if run.arguments.smoke else nano_metrics.WINDOW
    windows = nano_metrics.heldout_windows(run.heldout, window)
    prompts = nano_metrics.heldout_prompts(run.heldout_texts, run.tokenizer)
    nano_metrics.write_prompts(run.arguments.output, prompts, windows)
    perplexities = {name: nano_metrics.perplexity(target, windows, run.device)
                    for name, target in (("fp32", run.target), ("bf16", bf16), ("int4", int4))}
    say(f"perplexity: {perplexities}")
    goldens = {name: nano_metrics.goldens(target, prompts[:8], run.tokenizer, run.device)
               for name, target in (("bf16", bf16), ("int4", int4))}
    (run.arguments.output / "goldens.json").write_text(json.dumps(goldens, indent=1) + "\n",
                                                       encoding="utf-8")
    nano_export.write_goldens(run.arguments.work / "bf16", "original", goldens["bf16"])
    nano_export.write_goldens(run.arguments.work / "int4", "quantized", goldens["int4"])
    heldout = torch.from_numpy(run.heldout.astype(np.int32))
    written = continuations(run, int4, heldout, 2, 202)

    def batches() -> Iterator[tuple[Tensor, int]]:
        for ids, prompt in written:
            for part in ids[:512].split(64):
                yield part, prompt

    with run.autocast():
        drafting = agreement(run.drafter, int4, batches(), run.arguments.seed)
    say(f"drafter: {drafting}")
    return {"perplexity": perplexities, "window_tokens": window, "num_windows": len(windows),
            "expert_load": nano_metrics.expert_load(int4, windows, run.device),
            "drafter": drafting}


def write_parts(work: Path, output: Path) -> None:
    """nano.tar.gz of the three directories, cut into parts of PART_BYTES."""
    archive = work / "nano.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=6) as tar:
        for name in ("bf16", "int4", "drafter"):
            tar.add(work / name, arcname=f"nano/{name}")
    content = archive.read_bytes()
    archive.unlink()
    for index, at in enumerate(range(0, len(content), PART_BYTES)):
        (output / f"nano.tar.gz.{index:02}").write_bytes(content[at:at + PART_BYTES])


def finish(run: Run, int4: Target) -> None:
    work, output = run.arguments.work, run.arguments.output
    nano_export.round_to_bf16(run.drafter)
    # INT4 is made of the weights already rounded to bf16, here and in frozen_target.
    bf16 = frozen_target(run, quantized=False)
    nano_export.write_target(work, run.configs["target"], bf16, run.tokenizer)
    nano_export.write_drafter(work, run.configs["drafter"], run.drafter)
    sizes = {name: nano_export.directory_bytes(work / name) for name in ("bf16", "int4", "drafter")}
    say(f"bytes: {sizes}")
    metrics = {"smoke": run.arguments.smoke, "seed": run.arguments.seed,
               "torch": torch.__version__, "sources": run.configs["sources"],
               "train_tokens": len(run.train), "heldout_tokens": len(run.heldout),
               "vocab_size": run.tokenizer.vocab_size, "directory_bytes": sizes,
               "steps": run.steps, "phase_seconds": run.elapsed, **measure(run, bf16, int4),
               "losses": run.losses, "seconds": time.monotonic() - STARTED}
    (output / "metrics.json").write_text(json.dumps(metrics) + "\n", encoding="utf-8")
    write_parts(work, output)  # with the goldens that measure() has added
    say(f"done: {output}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="the file of nano_data.py")
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    parser.add_argument("--work", type=Path, help="folder of directories and checkpoint")
    parser.add_argument("--minutes", type=float, default=8.0, help="for everything (default 8)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    parser.add_argument("--compile", action="store_true", help="torch.compile of the target")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, 12 steps a phase")
    arguments = parser.parse_args()
    if arguments.work is None:
        arguments.work = arguments.output.with_name(arguments.output.name + ".work")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if arguments.smoke:
        torch.set_num_threads(1)
    run = start(arguments)
    train_target(run, "target")
    train_target(run, "int4")
    int4 = frozen_target(run, quantized=True)
    train_both_drafter_phases(run, int4)
    finish(run, int4)


if __name__ == "__main__":
    main()
