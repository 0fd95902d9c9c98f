"""The nano target in PyTorch: DeepSeek-V3's decoder, to be trained and to generate in batches.

Written from the same definitions as model_ref.py; test_nano.py holds the two together. Parameter
names are those of the checkpoint, but for routed experts: gate and up [E, I, H], down [E, H, I] of
a layer are one tensor each. All experts see all tokens, with weight 0 where the router did not
choose them: at this size three large products cost less than sorting tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config_ref import TargetConfig
from layers_ref import attention_scale, rope_amplitude, rope_inverse_frequencies
from nano_quantize import fake_quantize

INNER_NORM_EPS = 1e-6


def rope_table(rope: Any, dim: int, length: int, device: torch.device) -> Tensor:
    """[length, dim/2, 2] float32: cosine and sine of positions 0 to length - 1."""
    inverse = torch.from_numpy(rope_inverse_frequencies(rope, dim))
    angles = torch.arange(length, dtype=torch.float64)[:, None] * inverse[None]
    table = torch.stack([angles.cos(), angles.sin()], dim=-1) * rope_amplitude(rope)
    return table.float().to(device)


def rotate_interleaved(x: Tensor, table: Tensor) -> Tensor:
    """x [B, S, heads, dim], table [S, dim/2, 2] or [B, S, dim/2, 2]; pairs are (2i, 2i + 1)."""
    cos, sin = table[..., 0].unsqueeze(-2), table[..., 1].unsqueeze(-2)
    pairs = x.float().unflatten(-1, (-1, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    rotated = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    return rotated.flatten(-2).to(x.dtype)


class RmsNorm(nn.Module):
    """In float32, back to the input's type."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight
        return wide.to(x.dtype)


def linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    return layer


class Mlp(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = linear(hidden, width)
        self.up_proj = linear(hidden, width)
        self.down_proj = linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """weight [E, H]; e_score_correction_bias [E] steers the choice and is no parameter.

    load [E] counts the choices made in training since the last balance().
    """

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        nn.init.normal_(self.weight, std=config.hidden_size**-0.5)
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))
        self.register_buffer("load", torch.zeros(config.n_routed_experts))

    def forward(self, x: Tensor) -> Tensor:
        """x [T, H] -> weights [T, E] float32, 0 for experts that were not chosen."""
        config = self.config
        with torch.autocast(x.device.type, enabled=False):
            scores = torch.sigmoid(F.linear(x.float(), self.weight))
        choice = (scores + self.e_score_correction_bias).topk(config.num_experts_per_tok).indices
        mask = torch.zeros_like(scores).scatter_(1, choice, 1.0)
        if self.training:
            self.load += mask.detach().sum(0)
        chosen = scores * mask
        chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
        return chosen * config.routed_scaling_factor

    @torch.no_grad()
    def balance(self, speed: float) -> None:
        """DeepSeek-V3's rule without a loss: the bias of a busy expert goes down by `speed`."""
        self.e_score_correction_bias += speed * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


class Moe(nn.Module):
    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        experts, hidden = config.n_routed_experts, config.hidden_size
        width = config.moe_intermediate_size
        self.gate = Router(config)
        self.experts_gate = nn.Parameter(torch.randn(experts, width, hidden) * hidden**-0.5)
        self.experts_up = nn.Parameter(torch.randn(experts, width, hidden) * hidden**-0.5)
        self.experts_down = nn.Parameter(torch.randn(experts, hidden, width) * width**-0.5)
        self.shared_experts = Mlp(hidden, config.n_shared_experts * width)
        self.quantized = False  # whether routed experts are used as INT4 would store them

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        weights = self.gate(rows)
        gate, up, down = self.experts_gate, self.experts_up, self.experts_down
        if self.quantized:
            gate, up, down = fake_quantize(gate), fake_quantize(up), fake_quantize(down)
        inner = F.silu(F.linear(rows, gate.flatten(0, 1))) * F.linear(rows, up.flatten(0, 1))
        inner = inner.unflatten(-1, (gate.shape[0], -1)) * weights.to(inner.dtype)[..., None]
        routed = F.linear(inner.flatten(-2), down.permute(1, 0, 2).flatten(1))
        return routed.view(x.shape) + self.shared_experts(x)


@dataclass
class LatentCache:
    """One layer's rows of a batch: c_kv [B, length, kv_lora_rank], k_pe [B, length, rope]."""

    c_kv: Tensor
    k_pe: Tensor


class Attention(nn.Module):
    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.config = config
        heads, hidden = config.num_attention_heads, config.hidden_size
        nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.q_a_proj = linear(hidden, config.q_lora_rank)
        self.q_a_layernorm = RmsNorm(config.q_lora_rank, INNER_NORM_EPS)
        self.q_b_proj = linear(config.q_lora_rank, heads * (nope + rope))
        self.kv_a_proj_with_mqa = linear(hidden, config.kv_lora_rank + rope)
        self.kv_a_layernorm = RmsNorm(config.kv_lora_rank, INNER_NORM_EPS)
        self.kv_b_proj = linear(config.kv_lora_rank, heads * (nope + config.v_head_dim))
        self.o_proj = linear(heads * config.v_head_dim, hidden)
        self.scale = attention_scale(config.rope, nope + rope)

    def projections(self, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [B, S, H] -> q_nope [B, S, heads, nope], q_pe rotated, c_kv [B, S, rank], k_pe."""
        config = self.config
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.unflatten(-1, (config.num_attention_heads, -1))
        q_nope, q_pe = q.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
        c_kv, k_pe = self.kv_a_proj_with_mqa(x).split(
            [config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
        k_pe = rotate_interleaved(k_pe.unsqueeze(2), table).squeeze(2)
        return q_nope, rotate_interleaved(q_pe, table), self.kv_a_layernorm(c_kv), k_pe

    def forward(self, x: Tensor, table: Tensor, cache: LatentCache | None = None) -> Tensor:
        """Causal attention of whole sequences; `cache` takes their rows, from row 0 on."""
        config = self.config
        q_nope, q_pe, c_kv, k_pe = self.projections(x, table)
        if cache is not None:
            cache.c_kv[:, :x.shape[1]] = c_kv
            cache.k_pe[:, :x.shape[1]] = k_pe
        kv = self.kv_b_proj(c_kv).unflatten(-1, (config.num_attention_heads, -1))
        k_nope, value = kv.split([config.qk_nope_head_dim, config.v_head_dim], dim=-1)
        q = torch.cat([q_nope, q_pe], dim=-1).transpose(1, 2)
        k_pe = k_pe.unsqueeze(2).expand(-1, -1, config.num_attention_heads, -1)
        k = torch.cat([k_nope, k_pe], dim=-1).transpose(1, 2)
        # Padded to the width of the keys, which the fused kernels ask for.
        value = F.pad(value, (0, q.shape[-1] - config.v_head_dim)).transpose(1, 2)
        heads = F.scaled_dot_product_attention(q, k, value, is_causal=True, scale=self.scale)
        heads = heads[..., :config.v_head_dim].transpose(1, 2).flatten(-2)
        return self.o_proj(heads)

    def decode(self, x: Tensor, table: Tensor, cache: LatentCache, position: int) -> Tensor:
        """One token a sequence, x [B, 1, H], at `position`, on the latent rows before it."""
        config = self.config
        q_nope, q_pe, c_kv, k_pe = self.projections(x, table)
        cache.c_kv[:, position:position + 1] = c_kv
        cache.k_pe[:, position:position + 1] = k_pe
        rows, pe = cache.c_kv[:, :position + 1], cache.k_pe[:, :position + 1]
        kv_b = self.kv_b_proj.weight.unflatten(0, (config.num_attention_heads, -1)).to(x.dtype)
        w_uk, w_uv = kv_b.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        q_latent = torch.einsum("bhn,hnc->bhc", q_nope[:, 0], w_uk)
        scores = q_latent @ rows.transpose(1, 2) + q_pe[:, 0] @ pe.transpose(1, 2)
        probabilities = (scores.float() * self.scale).softmax(-1).to(rows.dtype)
        heads = torch.einsum("bhc,hvc->bhv", probabilities @ rows, w_uv)
        return self.o_proj(heads.flatten(-2)).unsqueeze(1)


class Block(nn.Module):
    def __init__(self, config: TargetConfig, layer_index: int) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp: nn.Module = (Moe(config) if config.is_moe_layer(layer_index)
                               else Mlp(config.hidden_size, config.intermediate_size))

    def forward(self, x: Tensor, table: Tensor, cache: LatentCache | None,
                position: int | None) -> Tensor:
        normed = self.input_layernorm(x)
        if position is None or cache is None:
            x = x + self.self_attn(normed, table, cache)
        else:
            x = x + self.self_attn.decode(normed, table, cache, position)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    """What the checkpoint calls model.*"""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        self.layers = nn.ModuleList(Block(config, index)
                                    for index in range(config.num_hidden_layers))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)


class Target(nn.Module):
    """max_length: tokens of the longest sequence that it will see."""

    def __init__(self, config: TargetConfig, max_length: int) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        self.lm_head = linear(config.hidden_size, config.vocab_size)
        # What writes into the residual stream starts small, the less the deeper the stack.
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight", "experts_down")):
                    parameter *= (2 * config.num_hidden_layers)**-0.5
        table = rope_table(config.rope, config.qk_rope_head_dim, max_length, torch.device("cpu"))
        self.register_buffer("table", table, persistent=False)

    def moe_layers(self) -> list[Moe]:
        return [block.mlp for block in self.model.layers if isinstance(block.mlp, Moe)]

    def set_quantized(self, quantized: bool) -> None:
        for moe in self.moe_layers():
            moe.quantized = quantized

    def hidden(self, ids: Tensor, caches: list[LatentCache] | None = None,
               position: int | None = None, taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
        """ids [B, S] -> normed hidden [B, S, H] and the outputs of the layers `taps` joined.

        With `position` S is 1 and the rows before it are those of `caches`.
        """
        start = position or 0
        table = self.table[start:start + ids.shape[1]]
        x = self.model.embed_tokens(ids)
        outputs = []
        for index, block in enumerate(self.model.layers):
            x = block(x, table, caches[index] if caches else None, position)
            if index in taps:
                outputs.append(x)
        return self.model.norm(x), torch.cat(outputs, dim=-1) if outputs else x[..., :0]

    def forward(self, ids: Tensor) -> Tensor:
        """ids [B, S] -> logits [B, S, vocab]."""
        return self.lm_head(self.hidden(ids)[0])

    def new_caches(self, batch: int, length: int, dtype: torch.dtype) -> list[LatentCache]:
        config, device = self.config, self.table.device
        return [LatentCache(torch.zeros(batch, length, config.kv_lora_rank, dtype=dtype,
                                        device=device),
                            torch.zeros(batch, length, config.qk_rope_head_dim, dtype=dtype,
                                        device=device)) for _ in self.model.layers]

    @torch.no_grad()
    def generate(self, prompts: Tensor, num_new: int,
                 dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Greedy: prompts [B, P], all of one length -> ids [B, P + num_new], margins [B, num_new].

        A margin is the gap between the best two logits. Nothing stops at [EOS].
        """
        length = prompts.shape[1] + num_new
        caches = self.new_caches(prompts.shape[0], length, dtype)
        hidden = self.hidden(prompts, caches)[0][:, -1:]
        ids, margins = [prompts], []
        for position in range(prompts.shape[1], length):
            best = self.lm_head(hidden[:, -1]).float().topk(2)
            ids.append(best.indices[:, :1])
            margins.append(best.values[:, :1] - best.values[:, 1:])
            if position + 1 < length:
                hidden = self.hidden(ids[-1], caches, position)[0]
        return torch.cat(ids, dim=1), torch.cat(margins, dim=1)
