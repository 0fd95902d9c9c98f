"""The DFlash drafter (arXiv 2602.06036): a small non-causal decoder that fills a block at once.

Its context are hidden states of the target: the outputs of layers target_layer_ids are joined,
projected by fc and normed once; every drafter layer makes keys and values of them with the same
k_proj and v_proj as of its own block. Embedding and head are the target's.
"""

from __future__ import annotations

import numpy as np

from config_ref import DrafterConfig
from layers_ref import (linear, log_softmax, rms_norm, rope_tables, rotate_half_split, softmax,
                        swiglu, working_weights)
from model_ref import Forward, TargetModel


class Drafter:
    """weights: the drafter's own names (fc.weight, layers.0...), without a "drafter." prefix."""

    def __init__(self, config: DrafterConfig, weights: dict[str, np.ndarray],
                 target: TargetModel) -> None:
        self.config = config
        self.target = target
        self.dtype = target.dtype
        self.weights = working_weights(weights, self.dtype)

    def new_context(self) -> DrafterContext:
        return DrafterContext(self)

    def taps(self, forward: Forward) -> np.ndarray:
        """[rows, num_taps * hidden]: the tapped layer outputs of a target pass, side by side."""
        return np.concatenate([forward.layer_outputs[index]
                               for index in self.config.target_layer_ids], axis=1)

    def keys_and_values(self, layer: str, x: np.ndarray,
                        positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """x [rows, hidden] -> keys (normed by head, then rotated), values, both [rows, KV, dim]."""
        config, attn = self.config, layer + "self_attn."
        shape = (x.shape[0], config.num_key_value_heads, config.head_dim)
        keys = linear(x, self.weights[attn + "k_proj.weight"]).reshape(shape)
        keys = rms_norm(keys, self.weights[attn + "k_norm.weight"], config.rms_norm_eps)
        values = linear(x, self.weights[attn + "v_proj.weight"]).reshape(shape)
        return rotate_half_split(keys, *self.rope(positions)), values

    def rope(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return rope_tables(self.config.rope, self.config.head_dim, positions, self.dtype)

    def attention(self, layer: str, x: np.ndarray, positions: np.ndarray, context_keys: np.ndarray,
                  context_values: np.ndarray) -> np.ndarray:
        """x [B, hidden], normed block; every row sees the whole context and the whole block."""
        config, attn = self.config, layer + "self_attn."
        queries = linear(x, self.weights[attn + "q_proj.weight"])
        queries = queries.reshape(x.shape[0], config.num_attention_heads, config.head_dim)
        queries = rms_norm(queries, self.weights[attn + "q_norm.weight"], config.rms_norm_eps)
        queries = rotate_half_split(queries, *self.rope(positions))
        block_keys, block_values = self.keys_and_values(layer, x, positions)
        keys = np.concatenate([context_keys, block_keys])
        values = np.concatenate([context_values, block_values])
        # Grouped-query attention: neighbouring query heads share a key-value head.
        heads_per_kv = config.num_attention_heads // config.num_key_value_heads
        keys = np.repeat(keys, heads_per_kv, axis=1).transpose(1, 2, 0)      # [H, dim, keys]
        values = np.repeat(values, heads_per_kv, axis=1).transpose(1, 0, 2)  # [H, keys, dim]
        scores = np.matmul(queries.transpose(1, 0, 2), keys)
        scores = scores * self.dtype.type(config.head_dim ** -0.5)
        heads = np.matmul(softmax(scores), values).transpose(1, 0, 2)
        return linear(heads.reshape(x.shape[0], -1), self.weights[attn + "o_proj.weight"])

    def draft(self, root_token_id: int, context: DrafterContext) -> np.ndarray:
        """Log-probabilities [block_size - 1, vocab] float32 of the tokens after the root.

        The block is the root token and masks; slot i predicts the token at its own position
        start + i, where start is the length of the context. Slot 0's logits are not used.
        """
        config = self.config
        block = [root_token_id] + [config.mask_token_id] * (config.block_size - 1)
        positions = context.length() + np.arange(config.block_size)
        hidden = self.target.embed(np.asarray(block))
        for layer_index in range(config.num_hidden_layers):
            layer = f"layers.{layer_index}."
            x = rms_norm(hidden, self.weights[layer + "input_layernorm.weight"],
                         config.rms_norm_eps)
            hidden = hidden + self.attention(layer, x, positions, context.keys[layer_index],
                                             context.values[layer_index])
            x = rms_norm(hidden, self.weights[layer + "post_attention_layernorm.weight"],
                         config.rms_norm_eps)
            hidden = hidden + swiglu(x, self.weights[layer + "mlp.gate_proj.weight"],
                                     self.weights[layer + "mlp.up_proj.weight"],
                                     self.weights[layer + "mlp.down_proj.weight"])
        final = rms_norm(hidden[1:], self.weights["norm.weight"], config.rms_norm_eps)
        return log_softmax(self.target.lm_head(final).astype(np.float32))


class DrafterContext:
    """Keys and values of the committed tokens, by drafter layer: each [length, KV, head_dim]."""

    def __init__(self, drafter: Drafter) -> None:
        config = drafter.config
        empty = np.zeros((0, config.num_key_value_heads, config.head_dim), drafter.dtype)
        self.drafter = drafter
        self.keys = [empty for _ in range(config.num_hidden_layers)]
        self.values = [empty for _ in range(config.num_hidden_layers)]

    def length(self) -> int:
        return self.keys[0].shape[0]

    def extend(self, taps: np.ndarray) -> None:
        """taps [rows, num_taps * hidden] of the next committed tokens.

        The projected context does not pass input_layernorm and is the same for every layer.
        """
        drafter, config = self.drafter, self.drafter.config
        projected = rms_norm(linear(taps, drafter.weights["fc.weight"]),
                             drafter.weights["hidden_norm.weight"], config.rms_norm_eps)
        positions = self.length() + np.arange(taps.shape[0])
        for layer_index in range(config.num_hidden_layers):
            keys, values = drafter.keys_and_values(f"layers.{layer_index}.", projected, positions)
            self.keys[layer_index] = np.concatenate([self.keys[layer_index], keys])
            self.values[layer_index] = np.concatenate([self.values[layer_index], values])
