"""What is measured of the trained nano model, and the files that others can check it with."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nano_export import write_json_lines
from nano_model import Target
from nano_tokenizer import EOS, Tokenizer

WINDOW = 512  # tokens of a window; windows do not overlap, a window's first token is not scored
NUM_WINDOWS = 128
NUM_PROMPTS = 24
PROMPT_CHARACTERS = 120
GOLDEN_TOKENS = 64


def heldout_windows(stream: np.ndarray, window: int) -> Tensor:
    """[windows, window]: the start of the held-out stream, cut without gaps."""
    num = min(NUM_WINDOWS, len(stream) // window)
    return torch.from_numpy(stream[:num * window].astype(np.int64)).view(num, window)


@torch.no_grad()
def perplexity(target: Target, windows: Tensor, device: torch.device) -> float:
    """exp of the mean cross entropy of tokens 2 to the last of every window, in float32."""
    target.eval()
    total = 0.0
    for batch in windows.split(16):
        ids = batch.to(device)
        logits = target(ids[:, :-1]).float()
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
        total += float(loss.double())
    return math.exp(total / (windows.shape[0] * (windows.shape[1] - 1)))


@torch.no_grad()
def expert_load(target: Target, windows: Tensor, device: torch.device) -> list[list[float]]:
    """By MoE layer: every expert's share of the choices, times the number of experts (1: even)."""
    routers = [moe.gate for moe in target.moe_layers()]
    for router in routers:
        router.load.zero_()
    target.train()
    for batch in windows.split(16):
        target(batch.to(device))
    target.eval()
    shares = [(router.load / router.load.mean()).tolist() for router in routers]
    for router in routers:
        router.load.zero_()
    return [[round(share, 3) for share in layer] for layer in shares]


def heldout_prompts(texts: list[str], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Starts of held-out documents, cut at the end of a word."""
    prompts = []
    for text in texts[:NUM_PROMPTS]:
        start = text[:PROMPT_CHARACTERS].rsplit(" ", 1)[0]
        prompts.append({"prompt_ids": tokenizer.encode(start), "text": start})
    return prompts


def goldens(target: Target, prompts: list[dict[str, Any]], tokenizer: Tokenizer,
            device: torch.device) -> list[dict[str, Any]]:
    """Greedy ids in float32, up to [EOS], which is the last of them where it comes.

    least_margin: the least gap between the best two logits. A difference of an engine at a gap
    below its own rounding is no defect.
    """
    results, ends = [], {tokenizer.added(offset) for offset in (EOS, EOS + 1)}
    for prompt in prompts:
        ids = torch.tensor([prompt["prompt_ids"]], device=device)
        output, margins = target.generate(ids, GOLDEN_TOKENS)
        output_ids = output[0, ids.shape[1]:].tolist()
        count = next((at + 1 for at, token in enumerate(output_ids) if token in ends),
                     len(output_ids))
        results.append({"prompt_ids": prompt["prompt_ids"], "output_ids": output_ids[:count],
                        "least_margin": float(margins[0, :count].min()),
                        "text": tokenizer.decode(output_ids[:count])})
    return results


def write_prompts(folder: Path, prompts: list[dict[str, Any]], windows: Tensor) -> None:
    write_json_lines(folder / "prompts.jsonl", prompts)
    write_json_lines(folder / "perplexity_windows.jsonl",
                     [{"prompt_ids": window.tolist()} for window in windows])
