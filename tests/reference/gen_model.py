"""Writes model_tiny.kdtr: a random FP32 target with its drafter and goldens.

    python3 gen_model.py --output DIR        writes DIR/model_tiny.kdtr
    python3 gen_model.py --output X.kdtr     writes that file
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bundle_ref import BundleSpec, write_bundle

TINY = BundleSpec(
    name="model_tiny",
    max_new_tokens=40,
    target={
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": 320,
        "hidden_size": 96,
        "intermediate_size": 160,
        "moe_intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": 64,
        "kv_lora_rank": 48,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 24,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "yarn", "factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0,
                         "mscale": 1.0, "mscale_all_dim": 1.0,
                         "original_max_position_embeddings": 4096},
    },
    drafter={
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": 320,
        "hidden_size": 96,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 4096,
        "block_size": 8,
        "num_target_layers": 3,
        "dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": 319},
        "rope_theta": 10000.0,
        "rope_scaling": None,
    },
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="a folder or a .kdtr file")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    is_file = arguments.output.suffix == ".kdtr"
    path = arguments.output if is_file else arguments.output / f"{TINY.name}.kdtr"
    write_bundle(TINY, path, arguments.seed)
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
