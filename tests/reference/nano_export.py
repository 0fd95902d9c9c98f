"""Hugging Face directories of the nano model, and the configurations and sizes of its parts.

The budget, in bytes, of a bundle with INT4 routed experts (0.5625 a weight: a nibble, and a bf16
scale for 32) and bf16 for the rest. Hidden 192, 6 layers, the first of them dense, vocabulary 2304:

| part | a layer | all |
| --- | --- | --- |
| routed experts, 5 layers of 32 x 3 x 192 x 96 weights | 995,328 | 4,976,640 |
| attention (8 heads of 32 + 16 and 32, ranks 96 and 64) | 305,472 | 1,832,832 |
| shared experts, 5 layers of 3 x 192 x 96 | 110,592 | 552,960 |
| dense layer, 3 x 192 x 512 | 589,824 | 589,824 |
| embedding and head, 2 x 2304 x 192 | | 1,769,472 |
| routers, norms | | 67,000 |
| drafter: fc 576 x 192, 3 layers of 98,304 + 3 x 192 x 256 | 491,520 | 1,695,744 |
| tokenizer, configs, names of 1,400 tensors | | 220,000 |

11.7 MB together; 43 % of it are routed experts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from checkpoint_ref import HfLayout, write_hf_directory
from nano_drafter import Drafter
from nano_model import Moe, Target
from nano_quantize import dequantized
from nano_tokenizer import BOS, EOS, IM_END, PAD, UNKNOWN, Tokenizer

# YaRN is on from the first step. The pretrained length is that of training; positions up to
# max_position_embeddings are rotated sensibly, but those past the longest training window are
# unseen.
YARN = {"type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 512}
TARGET_SIZES = {"hidden_size": 192, "intermediate_size": 512, "moe_intermediate_size": 96,
                "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 8,
                "n_routed_experts": 32, "num_experts_per_tok": 4, "q_lora_rank": 96,
                "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
                "v_head_dim": 32}
SMOKE_SIZES = TARGET_SIZES | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
                              "moe_intermediate_size": 32, "n_routed_experts": 16,
                              "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16}
DRAFTER_SIZES = {"intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 6,
                 "num_key_value_heads": 2, "head_dim": 32}
BLOCK_SIZE = 8


def target_config(tokenizer: Tokenizer, smoke: bool) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
        "vocab_size": tokenizer.vocab_size, **(SMOKE_SIZES if smoke else TARGET_SIZES),
        "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "norm_topk_prob": True, "routed_scaling_factor": 2.0, "num_nextn_predict_layers": 0,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "attention_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": False,
        "rope_interleave": True, "rope_theta": 10000.0, "rope_scaling": YARN,
        "bos_token_id": tokenizer.added(BOS),
        "eos_token_id": [tokenizer.added(EOS), tokenizer.added(IM_END)],
        "pad_token_id": tokenizer.added(PAD), "torch_dtype": "bfloat16",
    }


def drafter_config(target: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Taps: layers 1 and 3 and the last (of a smoke model: all but the first)."""
    layers = target["num_hidden_layers"]
    taps = sorted({1, layers // 2, layers - 1})
    return {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3",
        "vocab_size": target["vocab_size"], "hidden_size": target["hidden_size"],
        **DRAFTER_SIZES, "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False,
        "max_position_embeddings": 2048, "block_size": BLOCK_SIZE, "num_target_layers": layers,
        "dflash_config": {"target_layer_ids": taps, "mask_token_id": tokenizer.added(UNKNOWN)},
        "rope_theta": 10000.0, "rope_scaling": None, "torch_dtype": "bfloat16",
    }


def target_weights(target: Target) -> dict[str, np.ndarray]:
    """float32 weights under Hugging Face names, an expert's matrices apart."""
    weights = {name: tensor.detach().float().cpu().numpy()
               for name, tensor in target.state_dict().items()
               if ".experts_" not in name and not name.endswith("gate.load")}
    for index, block in enumerate(target.model.layers):
        if not isinstance(block.mlp, Moe):
            continue
        for kind in ("gate", "up", "down"):
            stacked = getattr(block.mlp, f"experts_{kind}").detach().float().cpu().numpy()
            for expert, weight in enumerate(stacked):
                weights[f"model.layers.{index}.mlp.experts.{expert}.{kind}_proj.weight"] = weight
    return weights


def module_weights(module: nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.detach().float().cpu().numpy()
            for name, tensor in module.state_dict().items()}


@torch.no_grad()
def round_to_bf16(module: nn.Module) -> None:
    """Every parameter becomes what its bf16 copy holds; buffers (the router's bias) stay."""
    for parameter in module.parameters():
        parameter.copy_(parameter.bfloat16().float())


@torch.no_grad()
def round_experts_to_int4(target: Target) -> None:
    """Routed experts become what their INT4 copies stand for."""
    for moe in target.moe_layers():
        for weight in (moe.experts_gate, moe.experts_up, moe.experts_down):
            weight.copy_(dequantized(weight))


def write_target(directory: Path, config: dict[str, Any], target: Target,
                 tokenizer: Tokenizer) -> None:
    """bf16 and int4 of one target, whose weights should be rounded to bf16 already."""
    weights = target_weights(target)
    for name, layout in (("bf16", HfLayout()), ("int4", HfLayout(int4_group_size=32))):
        write_hf_directory(directory / name, config, weights, layout)
        tokenizer.write(directory / name)


def write_drafter(directory: Path, config: dict[str, Any], drafter: Drafter) -> None:
    write_hf_directory(directory / "drafter", config, module_weights(drafter))


def write_goldens(directory: Path, weights: str, goldens: list[dict[str, Any]]) -> None:
    """Goldens that `kdtree convert` takes into a bundle of the directory, as --verify-golden reads
    them; `weights`: "original" or "quantized"."""
    cases = [{"prompt_ids": case["prompt_ids"], "greedy_ids": case["output_ids"]}
             for case in goldens]
    header = {"goldens": {weights: {"cases": cases}}}
    (directory / "kdtree.json").write_text(
        json.dumps({"format": "kdtree bundle header", "version": 1, "header": header}) + "\n",
        encoding="utf-8")


def directory_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def write_json_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
