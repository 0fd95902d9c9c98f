"""A run of train_nano.py: what its phases share, its checkpoint, and one phase of training."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nano_drafter import Drafter
from nano_model import Target
from nano_tokenizer import Tokenizer

# Phases in their order, with their shares of the time.
SHARES = {"target": 0.56, "int4": 0.11, "drafter_text": 0.08, "drafter": 0.25}
LEARNING_RATES = {"target": 3e-3, "int4": 4e-4, "drafter_text": 2e-3, "drafter": 1.5e-3}
LAST_RATE = {"target": 0.13, "int4": 0.0, "drafter_text": 0.6, "drafter": 0.0}
SMOKE_STEPS = 12
CHECKPOINT_S = 60.0
STARTED = time.monotonic()  # of the program, less its imports


@dataclass
class Sizes:
    """Sequences and lengths of a batch; anchors of a sequence."""

    batch: int = 64
    length: int = 512
    long_length: int = 1024  # of the last part of phase target, and of phase int4
    drafter_batch: int = 64
    continuation: int = 256
    anchors: int = 24
    generated: int = 2048  # sequences generated together
    generated_batches: int = 12
    generate_s: float = 25.0


SMOKE = Sizes(batch=4, length=48, long_length=64, drafter_batch=4, continuation=48, anchors=4,
              generated=8, generated_batches=2)


@dataclass
class Run:
    """What the phases share. The clock of a phase is in `elapsed`, its curve in `losses`."""

    arguments: argparse.Namespace
    device: torch.device
    sizes: Sizes
    tokenizer: Tokenizer
    train: Tensor
    heldout: np.ndarray
    heldout_texts: list[str]
    target: Target
    drafter: Drafter
    configs: dict[str, Any]
    seconds: dict[str, float] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    elapsed: dict[str, float] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    losses: dict[str, list[list[float]]] = field(default_factory=dict)
    optimizer_state: dict[str, Any] | None = None

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16,
                              enabled=self.device.type == "cuda")

    def generator(self, *numbers: int) -> torch.Generator:
        """Of the seed and `numbers` alone, so that a resumed run draws what it would have drawn."""
        seed = self.arguments.seed
        for number in numbers:
            seed = seed * 1_000_003 + number
        return torch.Generator().manual_seed(seed % 2**63)

    def checkpoint_path(self) -> Path:
        return self.arguments.work / "checkpoint.pt"

    def save(self, optimizer: torch.optim.Optimizer | None) -> None:
        state = {"target": self.target.state_dict(), "drafter": self.drafter.state_dict(),
                 "optimizer": optimizer.state_dict() if optimizer else None,
                 "seconds": self.seconds, "done": self.done, "elapsed": self.elapsed,
                 "steps": self.steps, "losses": self.losses}
        temporary = self.checkpoint_path().with_suffix(".new")
        torch.save(state, temporary)
        temporary.replace(self.checkpoint_path())

    def load(self) -> None:
        state = torch.load(self.checkpoint_path(), map_location=self.device, weights_only=True)
        self.target.load_state_dict(state["target"])
        self.drafter.load_state_dict(state["drafter"])
        self.optimizer_state = state["optimizer"]
        self.seconds, self.done, self.elapsed = state["seconds"], state["done"], state["elapsed"]
        self.steps, self.losses = state["steps"], state["losses"]


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:6.1f} s] {text}", flush=True)


# --- One phase of training -------------------------------------------------------------------


def make_optimizer(module: nn.Module) -> torch.optim.AdamW:
    matrices = [p for p in module.parameters() if p.ndim > 1]
    others = [p for p in module.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95),
                             fused=matrices[0].device.type == "cuda")


def learning_rate(phase: str, progress: float) -> float:
    """Warm-up over 2 %, level to the half, then straight down to the phase's LAST_RATE."""
    last = LAST_RATE[phase]
    fall = 1.0 - (1.0 - last) * max(0.0, (progress - 0.5) / 0.5)
    return LEARNING_RATES[phase] * min(1.0, progress / 0.02 + 0.01) * fall


def train_phase(run: Run, phase: str, module: nn.Module,
                loss_of: Callable[[int, float], Tensor],
                after_step: Callable[[float], None]) -> None:
    """Steps until the phase's seconds are over (smoke: SMOKE_STEPS). loss_of(step, progress)."""
    if phase in run.done:
        return
    optimizer = make_optimizer(module)
    if run.optimizer_state is not None:
        optimizer.load_state_dict(run.optimizer_state)
        run.optimizer_state = None
    step, before = run.steps.get(phase, 0), run.elapsed.get(phase, 0.0)
    curve = run.losses.setdefault(phase, [])
    started = saved = time.monotonic()
    module.train()
    while True:
        elapsed = before + time.monotonic() - started
        progress = step / SMOKE_STEPS if run.arguments.smoke else elapsed / run.seconds[phase]
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(phase, progress)
        loss = loss_of(step, progress)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        after_step(progress)
        step += 1
        run.steps[phase], run.elapsed[phase] = step, elapsed
        # Reading the loss waits for the GPU, which keeps the clock honest too.
        if step % 20 == 0 or run.arguments.smoke:
            note_loss(curve, phase, step, elapsed, progress, float(loss.detach()))
        if time.monotonic() - saved > CHECKPOINT_S:
            run.save(optimizer)
            saved = time.monotonic()
    module.eval()
    run.done.append(phase)
    run.save(None)
    say(f"{phase}: {step} steps in {elapsed:.1f} s")


def note_loss(curve: list[list[float]], phase: str, step: int, elapsed: float, progress: float,
              loss: float) -> None:
    if not math.isfinite(loss):
        raise SystemExit(f"{phase}: step {step}: the loss is {loss}; --resume continues from the "
                         "last checkpoint")
    curve.append([step, round(elapsed, 2), round(loss, 4)])
    if step % 200 == 0 or step in (20, 100):
        say(f"{phase}: step {step}, {100 * progress:.0f} %, {1e3 * elapsed / step:.1f} ms a step, "
            f"loss {loss:.4f}")
