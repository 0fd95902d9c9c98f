"""The DFlash drafter in PyTorch: many blocks of a sequence in one pass, with a block mask.

Written from the same definition as dflash_ref.py. A block at anchor a is the token at position a
and masks; its context are the tapped outputs of the target at positions below a; slot i predicts
the token at a + i.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config_ref import DrafterConfig
from nano_model import Mlp, RmsNorm, Target, linear, rope_table

# Slot i weighs exp(-(i - 1) / LOSS_DECAY): late slots count only if the early ones are right.
LOSS_DECAY = 4.0


def rotate_half_split(x: Tensor, table: Tensor) -> Tensor:
    """x [B, heads, S, dim], table [B or 1, 1, S, dim/2, 2]; pairs are (i, i + dim/2)."""
    cos, sin = table[..., 0], table[..., 1]
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.to(x.dtype)


class DrafterAttention(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        hidden, dim = config.hidden_size, config.head_dim
        self.q_proj = linear(hidden, config.num_attention_heads * dim)
        self.k_proj = linear(hidden, config.num_key_value_heads * dim)
        self.v_proj = linear(hidden, config.num_key_value_heads * dim)
        self.o_proj = linear(config.num_attention_heads * dim, hidden)
        self.q_norm = RmsNorm(dim, config.rms_norm_eps)
        self.k_norm = RmsNorm(dim, config.rms_norm_eps)

    def by_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

    def forward(self, x: Tensor, context: Tensor, tables: tuple[Tensor, Tensor],
                mask: Tensor) -> Tensor:
        """x [B, Q, H] normed blocks, context [B, S, H], mask [B, 1, Q, S + Q] bool.

        tables: of the blocks' positions [B, 1, Q, dim/2, 2] and of the context's.
        """
        q = rotate_half_split(self.q_norm(self.by_heads(self.q_proj(x))), tables[0])
        both = torch.cat([context.to(x.dtype), x], dim=1)
        table = torch.cat([tables[1].expand(x.shape[0], -1, -1, -1, -1), tables[0]], dim=2)
        k = rotate_half_split(self.k_norm(self.by_heads(self.k_proj(both))), table)
        v = self.by_heads(self.v_proj(both))
        repeats = self.config.num_attention_heads // self.config.num_key_value_heads
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(heads.transpose(1, 2).flatten(-2))


class DrafterBlock(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DrafterAttention(config)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, context: Tensor, tables: tuple[Tensor, Tensor],
                mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, tables, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """Its embedding and head are the target's and are not trained."""

    def __init__(self, config: DrafterConfig, max_length: int) -> None:
        super().__init__()
        self.config = config
        self.fc = linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size)
        self.hidden_norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterBlock(config)
                                    for _ in range(config.num_hidden_layers))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        table = rope_table(config.rope, config.head_dim, max_length, torch.device("cpu"))
        self.register_buffer("table", table, persistent=False)

    def forward(self, target: Target, ids: Tensor, taps: Tensor, anchors: Tensor) -> Tensor:
        """ids [B, S], taps [B, S, taps * H], anchors [B, A], 1 at least and S - block_size at most

        -> logits [B, A, block_size - 1, vocab] of the slots behind the anchors.
        """
        config, (batch, length), num = self.config, ids.shape, anchors.shape[1]
        slots = torch.arange(config.block_size, device=ids.device)
        positions = (anchors[..., None] + slots).flatten(1)  # [B, A * block_size]
        block = torch.full((batch, num, config.block_size), config.mask_token_id,
                           device=ids.device)
        block[..., 0] = ids.gather(1, anchors)
        context = self.hidden_norm(self.fc(taps))
        tables = (self.table[positions].unsqueeze(1), self.table[:length][None, None])
        mask = self.mask(anchors, length)
        x = target.model.embed_tokens(block.flatten(1))
        for layer in self.layers:
            x = layer(x, context, tables, mask)
        x = x.unflatten(1, (num, config.block_size))[:, :, 1:]
        return target.lm_head(self.norm(x))

    def mask(self, anchors: Tensor, length: int) -> Tensor:
        """[B, 1, A * block, S + A * block]: context below the anchor, and the block itself."""
        size = self.config.block_size
        of_row = anchors.repeat_interleave(size, dim=1)
        context = torch.arange(length, device=anchors.device) < of_row[..., None]
        block_of = torch.arange(of_row.shape[1], device=anchors.device) // size
        own = (block_of[:, None] == block_of[None]).expand(anchors.shape[0], -1, -1)
        return torch.cat([context, own], dim=-1).unsqueeze(1)


def block_labels(ids: Tensor, anchors: Tensor, block_size: int) -> Tensor:
    """[B, A, block_size - 1]: the tokens that the slots behind the anchors should predict."""
    places = anchors[..., None] + torch.arange(1, block_size, device=ids.device)
    return ids.gather(1, places.flatten(1)).view(places.shape)


def draft_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy, slots weighed by their position."""
    loss = F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), reduction="none")
    slots = torch.arange(labels.shape[-1], device=labels.device)
    weights = torch.exp(-slots / LOSS_DECAY).expand_as(labels).flatten()
    return (loss * weights).sum() / weights.sum()


def random_anchors(ids: Tensor, first: int, num: int, block_size: int,
                   generator: torch.Generator) -> Tensor:
    """[B, num] anchors from `first` to the last that leaves room for a block."""
    return torch.randint(max(first, 1), ids.shape[1] - block_size + 1, (ids.shape[0], num),
                         generator=generator).to(ids.device)


@torch.no_grad()
def agreement(drafter: Drafter, target: Target, batches: Iterator[tuple[Tensor, int]],
              seed: int) -> dict[str, object]:
    """batches: ids [B, S] and the first anchor -> how often the drafter's best token is the text's.

    per_depth[i] is the share of blocks whose slot i + 1 is right; chain_length an estimate of the
    tokens a step of chain decoding commits (the right ones in a row, and the target's own).
    """
    generator = torch.Generator().manual_seed(seed)
    size, depth_hits, lengths, blocks = drafter.config.block_size, 0.0, 0.0, 0
    for ids, first in batches:
        anchors = random_anchors(ids, first, 16, size, generator)
        taps = target.hidden(ids, taps=drafter.config.target_layer_ids)[1]
        right = (drafter(target, ids, taps, anchors).argmax(-1) ==
                 block_labels(ids, anchors, size)).double()
        depth_hits = depth_hits + right.sum((0, 1))
        lengths += float(right.cumprod(-1).sum())
        blocks += anchors.numel()
    per_depth = [round(float(hits) / blocks, 4) for hits in torch.as_tensor(depth_hits)]
    return {"blocks": blocks, "per_depth": per_depth, "chain_length": 1 + lengths / blocks}
