"""The target model (DeepSeek-V3 / Kimi-K2 decoder) written from its definition.

A forward pass takes any set of rows with their positions and an explicit visibility mask, so the
same code serves a prompt, one decoded token and a draft tree. It never changes the cache: it
returns the new latent rows, and the caller commits those that it keeps.

Sources: DeepSeek-V2 report (arXiv 2405.04434, section 2.1: multi-head latent attention, also the
absorbed form), DeepSeek-V3 report (arXiv 2412.19437, section 2.1: router), Kimi K2 configs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from config_ref import TargetConfig
from layers_ref import (attention_scale, linear, rms_norm, rope_tables, rotate_interleaved, route,
                        softmax, swiglu, working_weights)

# The norms inside attention are built without the config's eps and keep their own default.
INNER_NORM_EPS = 1e-6


@dataclass
class LatentRows:
    """One layer's cache rows: c_kv [rows, kv_lora_rank] normed, k_pe [rows, rope] rotated."""

    c_kv: np.ndarray
    k_pe: np.ndarray

    def joined(self, other: LatentRows) -> LatentRows:
        return LatentRows(np.concatenate([self.c_kv, other.c_kv]),
                          np.concatenate([self.k_pe, other.k_pe]))

    def selected(self, rows: list[int]) -> LatentRows:
        return LatentRows(self.c_kv[rows], self.k_pe[rows])


class LatentKvCache:
    """Committed latent rows of all layers, row i being the token at position i."""

    def __init__(self, config: TargetConfig, dtype: np.dtype) -> None:
        self.layers = [LatentRows(np.zeros((0, config.kv_lora_rank), dtype),
                                  np.zeros((0, config.qk_rope_head_dim), dtype))
                       for _ in range(config.num_hidden_layers)]

    def committed(self) -> int:
        return self.layers[0].c_kv.shape[0]

    def commit(self, new_rows: list[LatentRows], rows: list[int]) -> None:
        """Appends the given rows of a forward pass, in the given order."""
        self.layers = [old.joined(new.selected(rows))
                       for old, new in zip(self.layers, new_rows)]


@dataclass
class Forward:
    """Result of a forward pass over R rows.

    logits [R, vocab]; layer_outputs[L] [R, hidden], the residual stream after layer L (what a
    drafter taps); latents[L], the new cache rows of layer L; router_margins [R], the least margin
    of the router's choices over the layers (inf without a MoE layer).
    """

    logits: np.ndarray
    layer_outputs: list[np.ndarray]
    latents: list[LatentRows]
    router_margins: np.ndarray


class TargetModel:
    """weights: Hugging Face names without a prefix; dtype is that of all arithmetic."""

    def __init__(self, config: TargetConfig, weights: dict[str, np.ndarray],
                 dtype: type = np.float32) -> None:
        self.config = config
        self.dtype = np.dtype(dtype)
        self.weights = working_weights(weights, dtype)
        self.scale = self.dtype.type(attention_scale(
            config.rope, config.qk_nope_head_dim + config.qk_rope_head_dim))

    def new_cache(self) -> LatentKvCache:
        return LatentKvCache(self.config, self.dtype)

    # --- Attention ---------------------------------------------------------------------------

    def queries(self, layer: str, x: np.ndarray,
                positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """x [R, hidden], normed -> q_nope [R, H, nope], q_pe [R, H, rope] rotated.

        Rows of q_b_proj (or q_proj) are head by head, nope before rope.
        """
        config, attn = self.config, layer + "self_attn."
        if config.q_lora_rank:
            q_a = rms_norm(linear(x, self.weights[attn + "q_a_proj.weight"]),
                           self.weights[attn + "q_a_layernorm.weight"], INNER_NORM_EPS)
            q = linear(q_a, self.weights[attn + "q_b_proj.weight"])
        else:
            q = linear(x, self.weights[attn + "q_proj.weight"])
        q = q.reshape(x.shape[0], config.num_attention_heads, -1)
        q_nope, q_pe = np.split(q, [config.qk_nope_head_dim], axis=-1)
        return q_nope, rotate_interleaved(q_pe, *self.rope(positions))

    def latents(self, layer: str, x: np.ndarray, positions: np.ndarray) -> LatentRows:
        """x [R, hidden], normed -> the rows to cache; k_pe is one head, rotated and not normed."""
        config, attn = self.config, layer + "self_attn."
        compressed = linear(x, self.weights[attn + "kv_a_proj_with_mqa.weight"])
        c_kv, k_pe = np.split(compressed, [config.kv_lora_rank], axis=-1)
        c_kv = rms_norm(c_kv, self.weights[attn + "kv_a_layernorm.weight"], INNER_NORM_EPS)
        return LatentRows(c_kv, rotate_interleaved(k_pe[:, None, :], *self.rope(positions))[:, 0])

    def rope(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return rope_tables(self.config.rope, self.config.qk_rope_head_dim, positions, self.dtype)

    def up_projections(self, layer: str) -> tuple[np.ndarray, np.ndarray]:
        """kv_b_proj by heads: W_UK [H, nope, kv_lora_rank] and W_UV [H, v, kv_lora_rank]."""
        config = self.config
        kv_b = self.weights[layer + "self_attn.kv_b_proj.weight"]
        kv_b = kv_b.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
        return kv_b[:, :config.qk_nope_head_dim], kv_b[:, config.qk_nope_head_dim:]

    def probabilities(self, scores: np.ndarray, visible: np.ndarray) -> np.ndarray:
        """scores [H, R, keys], visible [R, keys] bool -> softmax over the visible keys."""
        return softmax(np.where(visible[None], scores * self.scale, self.dtype.type(-np.inf)))

    def attend_expanded(self, layer: str, q_nope: np.ndarray, q_pe: np.ndarray, keys: LatentRows,
                        visible: np.ndarray) -> np.ndarray:
        """Multi-head attention with K and V written out for every key -> [R, H, v]."""
        w_uk, w_uv = self.up_projections(layer)
        k_nope = np.einsum("kc,hnc->hkn", keys.c_kv, w_uk)
        value = np.einsum("kc,hvc->hkv", keys.c_kv, w_uv)
        scores = (np.einsum("rhn,hkn->hrk", q_nope, k_nope)
                  + np.einsum("rhp,kp->hrk", q_pe, keys.k_pe))
        return np.einsum("hrk,hkv->rhv", self.probabilities(scores, visible), value)

    def attend_absorbed(self, layer: str, q_nope: np.ndarray, q_pe: np.ndarray, keys: LatentRows,
                        visible: np.ndarray) -> np.ndarray:
        """The same with W_UK moved to the query and W_UV behind the sum -> [R, H, v].

        q . (W_UK c) = (W_UK^T q) . c, so every head reads the one latent row of a key.
        """
        w_uk, w_uv = self.up_projections(layer)
        q_latent = np.matmul(q_nope.transpose(1, 0, 2), w_uk)  # [H, R, kv_lora_rank]
        scores = (np.matmul(q_latent, keys.c_kv.T)
                  + np.matmul(q_pe.transpose(1, 0, 2), keys.k_pe.T))
        o_latent = np.matmul(self.probabilities(scores, visible), keys.c_kv)
        return np.matmul(o_latent, w_uv.transpose(0, 2, 1)).transpose(1, 0, 2)

    def attention(self, layer: str, x: np.ndarray, positions: np.ndarray, past: LatentRows,
                  visible: np.ndarray, absorbed: bool) -> tuple[np.ndarray, LatentRows]:
        """x [R, hidden], normed; visible [R, committed + R] -> [R, hidden] and the new rows."""
        q_nope, q_pe = self.queries(layer, x, positions)
        new_rows = self.latents(layer, x, positions)
        attend = self.attend_absorbed if absorbed else self.attend_expanded
        heads = attend(layer, q_nope, q_pe, past.joined(new_rows), visible)
        output = linear(heads.reshape(x.shape[0], -1),
                        self.weights[layer + "self_attn.o_proj.weight"])
        return output, new_rows

    # --- Feed-forward ------------------------------------------------------------------------

    def mlp(self, name: str, x: np.ndarray) -> np.ndarray:
        """name ends with a dot; x [R, hidden] -> [R, hidden]."""
        return swiglu(x, self.weights[name + "gate_proj.weight"],
                      self.weights[name + "up_proj.weight"],
                      self.weights[name + "down_proj.weight"])

    def moe(self, layer: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Routed experts, weighted, plus the shared experts (one MLP of their joint width).

        x [R, hidden] -> [R, hidden] and the router's margins [R].
        """
        config = self.config
        routing = route(config, x, self.weights[layer + "mlp.gate.weight"],
                        self.weights.get(layer + "mlp.gate.e_score_correction_bias"))
        output = np.zeros_like(x)
        for expert in np.unique(routing.indices):
            rows, slots = np.nonzero(routing.indices == expert)
            expert_output = self.mlp(f"{layer}mlp.experts.{expert}.", x[rows])
            output[rows] += expert_output * routing.weights[rows, slots][:, None]
        if config.n_shared_experts:
            output += self.mlp(layer + "mlp.shared_experts.", x)
        return output, routing.margins

    # --- The whole model ---------------------------------------------------------------------

    def embed(self, token_ids: np.ndarray) -> np.ndarray:
        return self.weights["model.embed_tokens.weight"][token_ids]

    def lm_head(self, hidden: np.ndarray) -> np.ndarray:
        # With tie_word_embeddings a checkpoint may leave the head out.
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        return linear(hidden, head)

    def forward(self, token_ids: list[int], positions: list[int], visible_new: np.ndarray,
                cache: LatentKvCache, absorbed: bool = True) -> Forward:
        """Runs R rows; each sees all committed rows and the new rows of visible_new [R, R]."""
        config = self.config
        position_array = np.asarray(positions)
        visible = np.concatenate(
            [np.ones((len(token_ids), cache.committed()), dtype=bool), visible_new], axis=1)
        hidden = self.embed(np.asarray(token_ids))
        layer_outputs, latents = [], []
        router_margins = np.full(len(token_ids), np.inf)
        for layer_index in range(config.num_hidden_layers):
            layer = f"model.layers.{layer_index}."
            x = rms_norm(hidden, self.weights[layer + "input_layernorm.weight"],
                         config.rms_norm_eps)
            attended, new_rows = self.attention(layer, x, position_array,
                                                cache.layers[layer_index], visible, absorbed)
            hidden = hidden + attended
            x = rms_norm(hidden, self.weights[layer + "post_attention_layernorm.weight"],
                         config.rms_norm_eps)
            if config.is_moe_layer(layer_index):
                output, margins = self.moe(layer, x)
                router_margins = np.minimum(router_margins, margins)
            else:
                output = self.mlp(layer + "mlp.", x)
            hidden = hidden + output
            layer_outputs.append(hidden)
            latents.append(new_rows)
        final = rms_norm(hidden, self.weights["model.norm.weight"], config.rms_norm_eps)
        return Forward(self.lm_head(final), layer_outputs, latents, router_margins)

    def forward_causal(self, token_ids: list[int], cache: LatentKvCache,
                       absorbed: bool = True) -> Forward:
        """Runs consecutive tokens after the committed ones; the cache is not changed."""
        num_rows = len(token_ids)
        start = cache.committed()
        return self.forward(token_ids, list(range(start, start + num_rows)),
                            np.tril(np.ones((num_rows, num_rows), dtype=bool)), cache, absorbed)


def attention_form_difference(model: TargetModel, token_ids: list[int]) -> float:
    """Largest |difference| of any logit between expanded and absorbed attention."""
    expanded = model.forward_causal(token_ids, model.new_cache(), absorbed=False)
    absorbed = model.forward_causal(token_ids, model.new_cache(), absorbed=True)
    return float(np.abs(expanded.logits - absorbed.logits).max())
