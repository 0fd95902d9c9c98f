"""The model and drafter configurations, read from Hugging Face's config.json keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding; factor is None without YaRN.

    attention_factor, when a config states it, replaces the amplitude that mscale would give.
    """

    rope_theta: float
    factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    original_max_position_embeddings: int = 0
    attention_factor: float | None = None


def read_rope_config(config: dict[str, Any]) -> RopeConfig:
    """Accepts rope_scaling {type | rope_type} beside rope_theta, or rope_parameters with both."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta)
    if kind not in ("yarn", "deepseek_yarn"):
        raise ValueError(f"unknown rope type {kind}")

    def optional_float(key: str) -> float | None:
        return None if scaling.get(key) is None else float(scaling[key])

    original = scaling.get("original_max_position_embeddings")
    return RopeConfig(
        rope_theta=theta,
        factor=float(scaling["factor"]),
        beta_fast=float(scaling.get("beta_fast", 32.0)),
        beta_slow=float(scaling.get("beta_slow", 1.0)),
        mscale=optional_float("mscale"),
        mscale_all_dim=optional_float("mscale_all_dim"),
        original_max_position_embeddings=int(original or config["max_position_embeddings"]),
        attention_factor=optional_float("attention_factor"),
    )


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config.json: text_config where nested, else the whole."""
    return config.get("text_config", config)


def read_token_ids(value: int | list[int] | None) -> list[int]:
    """eos_token_id may be absent, one id or a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [int(value)]


@dataclass(frozen=True)
class TargetConfig:
    """Field names are the keys of config.json; q_lora_rank 0 means a plain q_proj."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    n_shared_experts: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    first_k_dense_replace: int
    moe_layer_freq: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    scoring_func: str
    topk_method: str
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    eos_token_ids: tuple[int, ...]

    @staticmethod
    def from_dict(config: dict[str, Any]) -> TargetConfig:
        config = text_config(config)
        return TargetConfig(
            vocab_size=int(config["vocab_size"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            moe_intermediate_size=int(config["moe_intermediate_size"]),
            num_hidden_layers=int(config["num_hidden_layers"]),
            num_attention_heads=int(config["num_attention_heads"]),
            n_shared_experts=int(config.get("n_shared_experts") or 0),
            n_routed_experts=int(config["n_routed_experts"]),
            num_experts_per_tok=int(config["num_experts_per_tok"]),
            n_group=int(config.get("n_group") or 1),
            topk_group=int(config.get("topk_group") or 1),
            first_k_dense_replace=int(config.get("first_k_dense_replace") or 0),
            moe_layer_freq=int(config.get("moe_layer_freq") or 1),
            routed_scaling_factor=float(config.get("routed_scaling_factor", 1.0)),
            norm_topk_prob=bool(config.get("norm_topk_prob", False)),
            scoring_func=str(config.get("scoring_func", "sigmoid")),
            topk_method=str(config.get("topk_method", "noaux_tc")),
            q_lora_rank=int(config.get("q_lora_rank") or 0),
            kv_lora_rank=int(config["kv_lora_rank"]),
            qk_nope_head_dim=int(config["qk_nope_head_dim"]),
            qk_rope_head_dim=int(config["qk_rope_head_dim"]),
            v_head_dim=int(config["v_head_dim"]),
            rms_norm_eps=float(config["rms_norm_eps"]),
            rope=read_rope_config(config),
            eos_token_ids=tuple(read_token_ids(config.get("eos_token_id"))),
        )

    def is_moe_layer(self, layer_index: int) -> bool:
        """Dense below first_k_dense_replace and off the moe_layer_freq grid (DeepSeek-V2 code)."""
        return (layer_index >= self.first_k_dense_replace
                and layer_index % self.moe_layer_freq == 0)


@dataclass(frozen=True)
class DrafterConfig:
    """A DFlash drafter; target_layer_ids are target layers whose outputs are tapped, 0-based."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    rope: RopeConfig

    @staticmethod
    def from_dict(config: dict[str, Any]) -> DrafterConfig:
        dflash = config["dflash_config"]
        if any(kind != "full_attention" for kind in config.get("layer_types") or []):
            raise ValueError("only full_attention drafter layers are defined here")
        num_attention_heads = int(config["num_attention_heads"])
        hidden_size = int(config["hidden_size"])
        num_hidden_layers = int(config["num_hidden_layers"])
        ids = dflash.get("target_layer_ids")
        if ids is None:
            ids = default_target_layer_ids(int(config["num_target_layers"]), num_hidden_layers)
        return DrafterConfig(
            hidden_size=hidden_size,
            intermediate_size=int(config["intermediate_size"]),
            num_hidden_layers=num_hidden_layers,
            num_attention_heads=num_attention_heads,
            num_key_value_heads=int(config.get("num_key_value_heads") or num_attention_heads),
            head_dim=int(config.get("head_dim") or hidden_size // num_attention_heads),
            rms_norm_eps=float(config["rms_norm_eps"]),
            block_size=int(config.get("block_size") or dflash["block_size"]),
            target_layer_ids=tuple(int(index) for index in ids),
            mask_token_id=int(dflash["mask_token_id"]),
            rope=read_rope_config(config),
        )


def default_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> list[int]:
    """Taps of a drafter whose config names none: the middle, or evenly from 1 to last - 2."""
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    span = num_target_layers - 3 - 1
    # Python's round rounds halves to even, as the published drafter does.
    return [round(1 + index * span / (num_draft_layers - 1)) for index in range(num_draft_layers)]
