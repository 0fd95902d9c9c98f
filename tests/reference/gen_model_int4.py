"""Writes model_int4_tiny.kdtr and model_int4_tiny2.kdtr: random targets with INT4 experts.

    python3 gen_model_int4.py --output DIR

Both keep the FP32 originals of the quantised experts, hold a drafter, and have goldens for the
original and the quantised weights. Together they cover what one model cannot: expert counts and
head counts that rank counts do not divide, both scale types, both query forms, expert groups.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bundle_ref import BundleSpec, write_bundle

# Kimi-like: one expert group, query compression, bf16 scales. 11 experts: no rank count above one
# divides them.
INT4_TINY = BundleSpec(
    name="model_int4_tiny",
    max_new_tokens=36,
    group_size=32,
    scale_dtype="BF16",
    target={
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "vocab_size": 384,
        "hidden_size": 128,
        "intermediate_size": 224,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_shared_experts": 1,
        "n_routed_experts": 11,
        "num_experts_per_tok": 3,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "rope_theta": 50000.0,
        "rope_scaling": {"type": "yarn", "factor": 64.0, "beta_fast": 32.0, "beta_slow": 1.0,
                         "mscale": 1.0, "mscale_all_dim": 1.0,
                         "original_max_position_embeddings": 4096},
    },
    drafter={
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": 384,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 262144,
        "block_size": 8,
        "num_target_layers": 4,
        "dflash_config": {"target_layer_ids": [0, 1, 3], "mask_token_id": 383},
        "rope_theta": 50000.0,
        # 0.1 ln 64 + 1, stated because the ratio of the two mscales would be 1.
        "rope_scaling": {"rope_type": "yarn", "factor": 64.0, "beta_fast": 32.0, "beta_slow": 1.0,
                         "mscale": 1.0, "mscale_all_dim": 1.0,
                         "attention_factor": 1.4158883083359673,
                         "original_max_position_embeddings": 4096},
    },
)

# DeepSeek-V2/V3-like: four expert groups, no query compression, float32 scales, two shared
# experts, key and value heads of different widths, a list of eos tokens, no YaRN.
INT4_TINY2 = BundleSpec(
    name="model_int4_tiny2",
    max_new_tokens=40,
    group_size=16,
    scale_dtype="F32",
    target={
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": 260,
        "hidden_size": 96,
        "intermediate_size": 144,
        "moe_intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "n_shared_experts": 2,
        "n_routed_experts": 12,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": None,
        "kv_lora_rank": 40,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": [1, 3],
        "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
    },
    drafter={
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": 260,
        "hidden_size": 96,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 20,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 8192,
        "block_size": 6,
        "num_target_layers": 3,
        "dflash_config": {"target_layer_ids": [1], "mask_token_id": 259},
        "rope_theta": 20000.0,
        "rope_scaling": None,
    },
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="a folder")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    for spec in (INT4_TINY, INT4_TINY2):
        path = arguments.output / f"{spec.name}.kdtr"
        write_bundle(spec, path, arguments.seed)
        print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
