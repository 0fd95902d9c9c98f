"""INT4 of the routed experts in training, as quantize_w4a16 of number_formats.py stores it.

A group is 32 neighbours of a row. Scale absmax / 7.5 rounded to bf16, codes -8 to 7, halves to
even: the values here equal those of the written checkpoint bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP_SIZE = 32


def dequantized(weight: Tensor) -> Tensor:
    """weight [..., in] float32 -> what its INT4 copy stands for, float32, same shape."""
    groups = weight.float().unflatten(-1, (-1, GROUP_SIZE))
    scale = (groups.abs().amax(-1, keepdim=True) / 7.5).bfloat16().float()
    divisor = torch.where(scale == 0, torch.ones_like(scale), scale)
    codes = torch.round(groups / divisor).clamp(-8, 7)
    return (codes * scale).flatten(-2)


def fake_quantize(weight: Tensor) -> Tensor:
    """dequantized(weight), with the gradient of the identity (straight-through)."""
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return dequantized(weight)
    return weight + (dequantized(weight.detach()) - weight.detach())
