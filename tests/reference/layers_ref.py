"""Building blocks that target and drafter share: norms, rotary embedding, MLP, router.

Every function works in the dtype of its inputs (float32 or float64). Matrices are [out, in].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from config_ref import RopeConfig, TargetConfig


def working_weights(weights: dict[str, np.ndarray], dtype: type) -> dict[str, np.ndarray]:
    """The weights in the dtype of the arithmetic.

    Column-major, because Debian's plain BLAS multiplies by a transposed column-major matrix about
    twice as quickly; shapes and values are untouched.
    """
    return {name: np.asarray(weight, dtype=dtype, order="F") for name, weight in weights.items()}


def linear(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x [rows, in], weight [out, in] -> [rows, out]."""
    return x @ weight.T


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x [..., size], weight [size]: x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    mean_square = np.mean(x * x, axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + x.dtype.type(eps)) * weight


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def sigmoid(x: np.ndarray) -> np.ndarray:
    # exp of a non-positive number in both branches: no overflow.
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + small), small / (1 + small)).astype(x.dtype)


def softmax(x: np.ndarray) -> np.ndarray:
    """Over the last axis; -inf entries become 0."""
    exponentials = np.exp(x - x.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    shifted = x - x.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def swiglu(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """x [rows, hidden], gate and up [width, hidden], down [hidden, width] -> [rows, hidden]."""
    return linear(silu(linear(x, gate)) * linear(x, up), down)


# --- Rotary position embedding ---------------------------------------------------------------


def yarn_mscale(factor: float, mscale: float) -> float:
    """Magnitude correction of YaRN (Peng et al. 2023, section 3.4): 0.1 * m * ln(s) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def yarn_range(rope: RopeConfig, dim: int) -> tuple[float, float]:
    """Indices (low, high) between which YaRN goes from the original to interpolated frequency.

    A pair that turns r times over the original context has the index
    dim * ln(original / (2 pi r)) / (2 ln theta); beta_fast and beta_slow are the two r.
    """
    def index_of(rotations: float) -> float:
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.rope_theta))

    low = float(max(math.floor(index_of(rope.beta_fast)), 0))
    high = float(min(math.ceil(index_of(rope.beta_slow)), dim - 1))
    return low, high + 0.001 if low == high else high


def rope_inverse_frequencies(rope: RopeConfig, dim: int) -> np.ndarray:
    """[dim/2] float64: theta^(-2i/dim), blended with 1/factor of it where YaRN is on."""
    index = np.arange(dim // 2, dtype=np.float64)
    original = rope.rope_theta ** (-2.0 * index / dim)
    if rope.factor is None:
        return original
    low, high = yarn_range(rope, dim)
    ramp = np.clip((index - low) / (high - low), 0.0, 1.0)
    return original * (1 - ramp) + original / rope.factor * ramp


def rope_amplitude(rope: RopeConfig) -> float:
    """The factor on cos and sin: attention_factor, else a ratio of mscales, else mscale(1)."""
    if rope.factor is None:
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return (yarn_mscale(rope.factor, rope.mscale)
                / yarn_mscale(rope.factor, rope.mscale_all_dim))
    return yarn_mscale(rope.factor, 1.0)


def attention_scale(rope: RopeConfig, qk_head_dim: int) -> float:
    """Softmax scale of the target: qk_head_dim^-0.5, times mscale(mscale_all_dim)^2 with YaRN."""
    scale = qk_head_dim ** -0.5
    if rope.factor is not None and rope.mscale_all_dim:
        scale *= yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2
    return scale


def rope_tables(rope: RopeConfig, dim: int, positions: np.ndarray,
                dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """positions [rows] -> cos, sin [rows, dim/2]; angles are taken in float64."""
    angles = positions.astype(np.float64)[:, None] * rope_inverse_frequencies(rope, dim)[None, :]
    amplitude = rope_amplitude(rope)
    return (np.cos(angles) * amplitude).astype(dtype), (np.sin(angles) * amplitude).astype(dtype)


def rotate_interleaved(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """x [rows, heads, dim]; the pair i is (x[2i], x[2i+1]), as DeepSeek's checkpoints have it."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = np.empty_like(x)
    rotated[..., 0::2] = even * cos - odd * sin
    rotated[..., 1::2] = even * sin + odd * cos
    return rotated


def rotate_half_split(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """x [rows, heads, dim]; the pair i is (x[i], x[i + dim/2]), as in the drafter."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    cos, sin = cos[:, None, :], sin[:, None, :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


# --- Router ----------------------------------------------------------------------------------


@dataclass
class Routing:
    """indices and weights [rows, num_experts_per_tok]; margins [rows].

    A margin is the least gap in score between what was taken and what was left, over groups and
    experts (inf where nothing was left): how much rounding the choice withstands.
    """

    indices: np.ndarray
    weights: np.ndarray
    margins: np.ndarray


def top_k_indices(scores: np.ndarray, k: int) -> np.ndarray:
    """scores [rows, n] -> [rows, k] indices, best first, equal scores by the lower index."""
    return np.argsort(-scores, axis=-1, kind="stable")[:, :k]


def top_k_margins(scores: np.ndarray, k: int) -> np.ndarray:
    """scores [rows, n] -> [rows]: the k-th best score minus the next one, inf if k == n."""
    if k >= scores.shape[1]:
        return np.full(scores.shape[0], np.inf)
    descending = -np.sort(-scores, axis=1)
    return (descending[:, k - 1] - descending[:, k]).astype(np.float64)


def best_groups(config: TargetConfig, grouped: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """grouped [rows, n_group, experts of a group] -> [rows, experts] bool and margins [rows].

    noaux_tc (DeepSeek-V3): a group counts the sum of its two best experts;
    group_limited_greedy (DeepSeek-V2): its best one.
    """
    num_counted = 2 if config.topk_method == "noaux_tc" else 1
    group_scores = np.sort(grouped, axis=-1)[:, :, -num_counted:].sum(axis=-1)
    kept = np.zeros(group_scores.shape, dtype=bool)
    np.put_along_axis(kept, top_k_indices(group_scores, config.topk_group), True, axis=1)
    return (np.repeat(kept, grouped.shape[2], axis=1),
            top_k_margins(group_scores, config.topk_group))


def route(config: TargetConfig, x: np.ndarray, gate_weight: np.ndarray,
          correction_bias: np.ndarray | None) -> Routing:
    """x [rows, hidden], gate_weight [experts, hidden], correction_bias [experts].

    The bias (noaux_tc only) steers the choice; the weights are the scores without it.
    DeepSeek-V3: weights divided by their sum + 1e-20 if norm_topk_prob, then always multiplied by
    routed_scaling_factor. DeepSeek-V2: normalised or multiplied, one or the other.
    """
    logits = linear(x, gate_weight)
    scores = {"sigmoid": sigmoid, "softmax": softmax}[config.scoring_func](logits)
    is_v3 = config.topk_method == "noaux_tc"
    if not is_v3 and config.topk_method not in ("greedy", "group_limited_greedy"):
        raise ValueError(f"unknown topk_method {config.topk_method}")
    choice = scores + correction_bias if is_v3 else scores
    margins = np.full(x.shape[0], np.inf)
    if config.n_group > 1 and config.topk_method != "greedy":
        kept, margins = best_groups(config, choice.reshape(x.shape[0], config.n_group, -1))
        # A biased score may be negative, so V3 needs -inf; V2's code writes 0 below positive ones.
        choice = np.where(kept, choice, choice.dtype.type(-np.inf if is_v3 else 0.0))
    indices = top_k_indices(choice, config.num_experts_per_tok)
    margins = np.minimum(margins, top_k_margins(choice, config.num_experts_per_tok))
    weights = np.take_along_axis(scores, indices, axis=1)
    if config.norm_topk_prob:
        weights = weights / (weights.sum(axis=1, keepdims=True) + scores.dtype.type(1e-20))
    if is_v3 or not config.norm_topk_prob:
        weights = weights * scores.dtype.type(config.routed_scaling_factor)
    return Routing(indices, weights, margins)
