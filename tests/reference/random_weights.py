"""Random weights for the small bundles of the test data, shaped so that drafts can be accepted.

The tokens form a cycle, and their embeddings are points on it: going one token further turns every
pair of embedding coordinates by a fixed angle. lm_head leans towards the successor of the embedded
token, so the target often, not always, says the next token of the cycle. The heads of the
drafter's first layer look a fixed distance back and turn what they see forward, so its guesses are
good where the target follows the cycle. Everything else is plain noise.
"""

from __future__ import annotations

import numpy as np

from config_ref import DrafterConfig, TargetConfig
from layers_ref import rope_amplitude

SUCCESSOR_LEANING = 1.8
LOGIT_SCALE = 2.0
# Weight of the target's layers against the embedding in the residual stream.
LAYER_GAIN = 0.5
# One embedding coordinate is the same for all tokens; attention by distance needs a constant.
CONSTANT_COORDINATE = 3.0
MASK_EMBEDDING_SCALE = 0.2
# Rotary pairs that tell distances apart: the quickest ones.
NUM_DISTANCE_PAIRS = 3
DISTANCE_SHARPNESS = 4.0
COPY_GAIN = 4.0


class TokenCycle:
    """A random order of the tokens and their embeddings along it."""

    def __init__(self, vocab_size: int, hidden_size: int, rng: np.random.Generator) -> None:
        self.order = rng.permutation(vocab_size)
        num_pairs = hidden_size // 2
        turns = rng.integers(1, vocab_size, size=num_pairs)
        turns[0] = 0  # the constant coordinate
        self.angles = 2 * np.pi * turns / vocab_size
        phases = rng.uniform(0, 2 * np.pi, size=num_pairs)
        phases[0] = 0
        angles = np.arange(vocab_size)[:, None] * self.angles + phases
        points = np.sqrt(2) * np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
        points[:, 0] = CONSTANT_COORDINATE
        self.embedding = np.empty((vocab_size, hidden_size), dtype=np.float32)
        self.embedding[self.order] = points

    def successor(self) -> np.ndarray:
        """[vocab]: the next token of each token."""
        successor = np.empty_like(self.order)
        successor[self.order] = np.roll(self.order, -1)
        return successor

    def turn(self, num_tokens: int) -> np.ndarray:
        """[hidden, hidden]: takes an embedding to that of the token num_tokens further."""
        cos = np.diag(np.cos(num_tokens * self.angles))
        sin = np.diag(np.sin(num_tokens * self.angles))
        return np.block([[cos, -sin], [sin, cos]]).astype(np.float32)


class WeightMaker:
    """Draws float32 weights from one generator; the order of the calls fixes the values."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.weights: dict[str, np.ndarray] = {}

    def normal(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(np.float32)

    def norm(self, name: str, size: int) -> None:
        self.weights[name] = 1 + np.float32(0.1) * self.normal(size)

    def matrix(self, name: str, out_features: int, in_features: int, gain: float = 1.0) -> None:
        scale = np.float32(gain / np.sqrt(in_features))
        self.weights[name] = self.normal(out_features, in_features) * scale

    def mlp(self, name: str, hidden_size: int, width: int, gain: float = 1.0) -> None:
        self.matrix(name + "gate_proj.weight", width, hidden_size, 1.5)
        self.matrix(name + "up_proj.weight", width, hidden_size, 1.5)
        self.matrix(name + "down_proj.weight", hidden_size, width, gain)


def make_target_weights(config: TargetConfig, cycle: TokenCycle,
                        rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Every weight of the target, by its Hugging Face name."""
    make = WeightMaker(rng)
    hidden = config.hidden_size
    heads = config.num_attention_heads
    qk_head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    embedding = cycle.embedding + np.float32(0.2) * make.normal(config.vocab_size, hidden)
    make.weights["model.embed_tokens.weight"] = embedding
    for layer_index in range(config.num_hidden_layers):
        layer = f"model.layers.{layer_index}."
        attn = layer + "self_attn."
        make.norm(layer + "input_layernorm.weight", hidden)
        if config.q_lora_rank:
            make.matrix(attn + "q_a_proj.weight", config.q_lora_rank, hidden)
            make.norm(attn + "q_a_layernorm.weight", config.q_lora_rank)
            make.matrix(attn + "q_b_proj.weight", heads * qk_head_dim, config.q_lora_rank, 1.3)
        else:
            make.matrix(attn + "q_proj.weight", heads * qk_head_dim, hidden, 1.3)
        make.matrix(attn + "kv_a_proj_with_mqa.weight",
                    config.kv_lora_rank + config.qk_rope_head_dim, hidden)
        make.norm(attn + "kv_a_layernorm.weight", config.kv_lora_rank)
        make.matrix(attn + "kv_b_proj.weight",
                    heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank)
        make.matrix(attn + "o_proj.weight", hidden, heads * config.v_head_dim, LAYER_GAIN)
        make.norm(layer + "post_attention_layernorm.weight", hidden)
        if not config.is_moe_layer(layer_index):
            make.mlp(layer + "mlp.", hidden, config.intermediate_size, LAYER_GAIN)
            continue
        make.matrix(layer + "mlp.gate.weight", config.n_routed_experts, hidden)
        make.weights[layer + "mlp.gate.e_score_correction_bias"] = (
            np.float32(0.1) * make.normal(config.n_routed_experts))
        for expert in range(config.n_routed_experts):
            make.mlp(f"{layer}mlp.experts.{expert}.", hidden, config.moe_intermediate_size,
                     LAYER_GAIN)
        make.mlp(layer + "mlp.shared_experts.", hidden,
                 config.n_shared_experts * config.moe_intermediate_size, LAYER_GAIN)
    make.norm("model.norm.weight", hidden)
    lm_head = make.normal(config.vocab_size, hidden)
    leaning = np.float32(SUCCESSOR_LEANING) * cycle.embedding
    leaning[:, 0] = 0
    lm_head[cycle.successor()] += leaning
    make.weights["lm_head.weight"] = lm_head * np.float32(LOGIT_SCALE / np.sqrt(hidden))
    # The last token is the drafter's mask, a mere placeholder: a small embedding leaves the room
    # to what attention brings in.
    embedding[-1, 1:] *= np.float32(MASK_EMBEDDING_SCALE)
    return make.weights


def distance_attention(config: DrafterConfig) -> tuple[np.ndarray, np.ndarray]:
    """Constant parts of queries [H, head_dim] and keys [KV, head_dim] before rotation.

    Query head h is its key head's vector turned back by h + 1 positions; the rotary embedding
    then makes their product largest for a key h + 1 positions back.
    """
    half = config.head_dim // 2
    pairs = np.arange(NUM_DISTANCE_PAIRS)
    angles = config.rope.rope_theta ** (-2.0 * pairs / config.head_dim)
    keys = np.zeros((config.num_key_value_heads, config.head_dim), dtype=np.float32)
    keys[:, pairs] = 1
    queries = np.zeros((config.num_attention_heads, config.head_dim), dtype=np.float32)
    for head in range(config.num_attention_heads):
        queries[head, pairs] = np.cos((head + 1) * angles)
        queries[head, half + pairs] = -np.sin((head + 1) * angles)
    return queries, keys


def make_copying_attention(make: WeightMaker, attn: str, config: DrafterConfig,
                           cycle: TokenCycle) -> None:
    """First layer: head h finds the token h + 1 back and returns the embedding h tokens on.

    Turned so, token t - h - 1 and every other token that a head may find predict token t.
    """
    hidden, head_dim = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    queries, keys = distance_attention(config)
    make.matrix(attn + "q_proj.weight", heads * head_dim, hidden, 0.2)
    make.matrix(attn + "k_proj.weight", kv_heads * head_dim, hidden, 0.2)
    make.weights[attn + "q_proj.weight"][:, 0] += queries.reshape(-1)
    make.weights[attn + "k_proj.weight"][:, 0] += keys.reshape(-1)
    value = make.normal(kv_heads, head_dim, hidden) / np.float32(np.sqrt(hidden))
    value[:, :, 0] = 0
    make.weights[attn + "v_proj.weight"] = value.reshape(kv_heads * head_dim, hidden)
    make.matrix(attn + "o_proj.weight", hidden, heads * head_dim, 0.1)
    for head in range(heads):
        columns = slice(head * head_dim, (head + 1) * head_dim)
        back = cycle.turn(head) @ value[head * kv_heads // heads].T
        make.weights[attn + "o_proj.weight"][:, columns] += np.float32(COPY_GAIN) * back
    make.norm(attn + "q_norm.weight", head_dim)
    # Sharp attention magnifies rounding, so YaRN's amplitude on queries and keys is taken out.
    sharpness = DISTANCE_SHARPNESS / rope_amplitude(config.rope) ** 2
    make.weights[attn + "q_norm.weight"] *= np.float32(sharpness)
    make.norm(attn + "k_norm.weight", head_dim)


def make_random_attention(make: WeightMaker, attn: str, config: DrafterConfig) -> None:
    """Later layers: noise that moves the guesses a little."""
    hidden, head_dim = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    make.matrix(attn + "q_proj.weight", heads * head_dim, hidden)
    make.matrix(attn + "k_proj.weight", kv_heads * head_dim, hidden)
    make.matrix(attn + "v_proj.weight", kv_heads * head_dim, hidden)
    make.matrix(attn + "o_proj.weight", hidden, heads * head_dim, 0.3)
    make.norm(attn + "q_norm.weight", head_dim)
    make.norm(attn + "k_norm.weight", head_dim)


def make_drafter_weights(config: DrafterConfig, cycle: TokenCycle,
                         rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Every weight of the drafter, by its own name (no "drafter." prefix)."""
    make = WeightMaker(rng)
    hidden = config.hidden_size
    num_taps = len(config.target_layer_ids)
    # Each tap passes straight on, with some noise.
    make.matrix("fc.weight", hidden, num_taps * hidden, 0.3)
    make.weights["fc.weight"] += np.tile(np.eye(hidden, dtype=np.float32) / num_taps, num_taps)
    make.norm("hidden_norm.weight", hidden)
    for layer_index in range(config.num_hidden_layers):
        layer = f"layers.{layer_index}."
        make.norm(layer + "input_layernorm.weight", hidden)
        if layer_index == 0:
            make_copying_attention(make, layer + "self_attn.", config, cycle)
        else:
            make_random_attention(make, layer + "self_attn.", config)
        make.norm(layer + "post_attention_layernorm.weight", hidden)
        make.mlp(layer + "mlp.", hidden, config.intermediate_size, 0.2)
    make.norm("norm.weight", hidden)
    return make.weights
