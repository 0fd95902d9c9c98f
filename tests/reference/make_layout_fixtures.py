"""Writes small checkpoints in published layouts, with outputs that transformers computed in FP32.

    python3 make_layout_fixtures.py ../data/goldens [NAME...]

Needs transformers 5.24.0, torch 2.15.0 and numpy. Weights are random and stored as bf16 (or fp8);
transformers computes with the stored values, widened to float32. transformers 5.24 scales the
attention scores of DeepSeek-V2 by mscale^2 under YaRN, as the published model does; earlier
versions leave that out, so that the version is checked. They have no moe_layer_freq either: dense
layers are put where the published code of DeepSeek has them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from checkpoint_ref import write_safetensors
from kdtr import Tensor
from number_formats import bf16_from_float32, dequantize_fp8_blocks, float32_from_bf16

TRANSFORMERS = "5.24.0"
LEAST_MARGIN = 1e-3  # of logits, so that no token hangs on rounding
BLOCK = 128

COMMON = dict(vocab_size=256, hidden_size=64, intermediate_size=96, moe_intermediate_size=32,
              num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4,
              n_shared_experts=2, n_routed_experts=8, num_experts_per_tok=3, n_group=1,
              topk_group=1, first_k_dense_replace=1, q_lora_rank=None, kv_lora_rank=32,
              qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, rms_norm_eps=1e-6,
              hidden_act="silu", max_position_embeddings=4096, tie_word_embeddings=False,
              attention_bias=False)
YARN_V2 = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
           "mscale_all_dim": 0.707, "original_max_position_embeddings": 64}
V2 = dict(architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", moe_layer_freq=1,
          scoring_func="softmax", topk_method="greedy", norm_topk_prob=False,
          routed_scaling_factor=1.0, rope_theta=10000, rope_scaling=YARN_V2,
          torch_dtype="bfloat16", bos_token_id=0, eos_token_id=1)
V3 = dict(architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", moe_layer_freq=1,
          scoring_func="sigmoid", topk_method="noaux_tc", norm_topk_prob=True,
          routed_scaling_factor=2.446, rope_theta=50000.0, torch_dtype="bfloat16",
          bos_token_id=0, eos_token_id=1)

# name -> (config.json, how it is stored)
FIXTURES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "deepseek_v2_lite": ({**COMMON, **V2}, set()),
    "deepseek_v2_groups": ({**COMMON, **V2, "topk_method": "group_limited_greedy", "n_group": 4,
                            "topk_group": 2, "n_routed_experts": 12, "q_lora_rank": 48,
                            "routed_scaling_factor": 16.0}, set()),
    "moonlight": ({**COMMON, **V3, "rms_norm_eps": 1e-5, "num_nextn_predict_layers": 0},
                  {"bf16_bias"}),
    "uneven_tied": ({**{key: value for key, value in {**COMMON, **V3}.items()
                        if key not in ("rope_theta", "torch_dtype")},
                     "num_attention_heads": 5.0, "num_key_value_heads": 5.0, "hidden_size": 72.0,
                     "n_routed_experts": 10.0, "n_shared_experts": 1, "q_lora_rank": 40,
                     "vocab_size": 251, "tie_word_embeddings": True, "eos_token_id": [1, 2],
                     "dtype": "bfloat16", "num_nextn_predict_layers": 1,
                     "rope_parameters": {"rope_type": "yarn", "rope_theta": 50000.0,
                                         "factor": 64.0, "beta_fast": 32.0, "beta_slow": 1.0,
                                         "mscale": 1.0, "mscale_all_dim": 1.0,
                                         "original_max_position_embeddings": 64}},
                    {"ignored_tensors"}),
    "fp8_partial_blocks": ({**COMMON, **V3, "hidden_size": 144, "intermediate_size": 200,
                            "moe_intermediate_size": 40, "n_routed_experts": 6,
                            "n_shared_experts": 1, "num_hidden_layers": 2, "q_lora_rank": 136,
                            "vocab_size": 192,
                            "quantization_config": {"quant_method": "fp8", "fmt": "e4m3",
                                                    "activation_scheme": "dynamic",
                                                    "weight_block_size": [BLOCK, BLOCK]}},
                           {"fp8"}),
    # Experts in layers 2 and 4, dense layers 0, 1 and 3.
    "moe_layer_freq": ({**COMMON, **V3, "num_hidden_layers": 5, "moe_layer_freq": 2,
                        "n_shared_experts": 1, "q_lora_rank": 40}, set()),
}


def reference_model(config: dict[str, Any]) -> torch.nn.Module:
    """transformers' class for the config, float32, all its weights random."""
    keys = dict(config)
    for key in ("architectures", "model_type", "torch_dtype", "dtype", "quantization_config"):
        keys.pop(key, None)
    keys = {key: int(value) if isinstance(value, float) and key in COMMON and key != "rms_norm_eps"
            else value for key, value in keys.items()}
    v2 = config["model_type"] == "deepseek_v2"
    made = (transformers.DeepseekV2Config if v2 else transformers.DeepseekV3Config)(**keys)
    made._attn_implementation = "eager"
    made._experts_implementation = "eager"
    kind = transformers.DeepseekV2ForCausalLM if v2 else transformers.DeepseekV3ForCausalLM
    model = kind(made).float().eval()
    dense = model.model.layers[0].mlp
    for index, layer in enumerate(model.model.layers):
        if index % config["moe_layer_freq"]:
            layer.mlp = type(dense)(made, config["intermediate_size"]).float().eval()
    if v2:
        # mscale 0.707, factor 40: (0.1 * 0.707 * ln 40 + 1)^2 / sqrt(head)
        head = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        scale = model.model.layers[0].self_attn.scaling * head**0.5
        assert abs(scale - 1.260803777**2) < 1e-6, scale
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("norm.weight"):
                tensor.copy_(1 + 0.1 * torch.randn(tensor.shape))
            elif name.endswith("e_score_correction_bias"):
                tensor.copy_(0.1 * torch.randn(tensor.shape))
            elif "embed_tokens" in name:
                tensor.copy_(torch.randn(tensor.shape))
            else:
                tensor.copy_(1.3 * torch.randn(tensor.shape) / tensor.shape[-1] ** 0.5)
    return model


def stored_fp8(weight: np.ndarray) -> tuple[Tensor, Tensor, np.ndarray]:
    """fp8 patterns, a scale for each block (those at the edges are partial), the values."""
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    scale = np.zeros((rows, columns), np.float32)
    patterns = np.zeros(weight.shape, np.uint8)
    for row in range(rows):
        for column in range(columns):
            place = np.s_[row * BLOCK:(row + 1) * BLOCK, column * BLOCK:(column + 1) * BLOCK]
            scale[row, column] = np.abs(weight[place]).max() / 448
            scaled = torch.from_numpy(weight[place] / scale[row, column])
            patterns[place] = scaled.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return (Tensor("F8_E4M3", patterns), Tensor("F32", scale),
            dequantize_fp8_blocks(patterns, scale))


def store(weight: np.ndarray, name: str, how: set[str],
          tensors: dict[str, Tensor]) -> np.ndarray:
    """Adds the tensor as the layout stores it; returns the values that are left of it."""
    if "fp8" in how and name.endswith("_proj.weight") or \
            "fp8" in how and name.endswith("kv_a_proj_with_mqa.weight"):
        tensors[name], tensors[name + "_scale_inv"], values = stored_fp8(weight)
        return values
    if name.endswith("e_score_correction_bias") and "bf16_bias" not in how:
        tensors[name] = Tensor("F32", weight)
        return weight
    patterns = bf16_from_float32(weight)
    tensors[name] = Tensor("BF16", patterns)
    return float32_from_bf16(patterns)


def store_model(model: torch.nn.Module, config: dict[str, Any],
                how: set[str]) -> dict[str, Tensor]:
    """Stores all weights under the published names and leaves the stored values in the model."""
    tensors: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            values = tensor.numpy()
            if name == "lm_head.weight" and config["tie_word_embeddings"]:
                continue
            if name.endswith("experts.gate_up_proj"):
                width = values.shape[1] // 2
                for expert in range(values.shape[0]):
                    place = f"{name.removesuffix('gate_up_proj')}{expert}."
                    for part, key in ((np.s_[:width], "gate_proj"), (np.s_[width:], "up_proj")):
                        values[expert, part] = store(np.ascontiguousarray(values[expert, part]),
                                                     f"{place}{key}.weight", how, tensors)
            elif name.endswith("experts.down_proj"):
                for expert in range(values.shape[0]):
                    place = f"{name.removesuffix('down_proj')}{expert}.down_proj.weight"
                    values[expert] = store(np.ascontiguousarray(values[expert]), place, how,
                                           tensors)
            else:
                values[...] = store(np.ascontiguousarray(values), name, how, tensors)
    if "ignored_tensors" in how:
        one = Tensor("BF16", bf16_from_float32(np.ones((4, 4), np.float32)))
        last = f"model.layers.{int(config['num_hidden_layers'])}."
        for name in (last + "eh_proj.weight", last + "enorm.weight", "vision_tower.patch.weight",
                     "mm_projector.linear_1.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"):
            tensors[name] = one
    return tensors


def greedy_case(model: torch.nn.Module, prompt: list[int], length: int) -> dict[str, Any]:
    ids, margins = list(prompt), []
    case: dict[str, Any] = {"prompt_ids": prompt}
    with torch.no_grad():
        for _ in range(length):
            logits = model(torch.tensor([ids]), use_cache=False).logits[0]
            if len(ids) == len(prompt):
                case["last_logits"] = [round(float(value), 6) for value in logits[-1]]
                case["argmax_per_position"] = logits.argmax(-1).tolist()
                two = logits.topk(2, -1).values
                margins.append(float((two[:, 0] - two[:, 1]).min()))
            best = logits[-1].topk(2)
            margins.append(float(best.values[0] - best.values[1]))
            ids.append(int(best.indices[0]))
    case["greedy_ids"] = ids[len(prompt):]
    case["margins"] = [round(margin, 5) for margin in margins[1:]]
    case["least"] = min(margins)
    return case


def main() -> None:
    assert transformers.__version__ == TRANSFORMERS, transformers.__version__
    torch.set_num_threads(1)
    for number, (name, (config, how)) in enumerate(FIXTURES.items()):
        if sys.argv[2:] and name not in sys.argv[2:]:
            continue
        torch.manual_seed(number)
        rng = np.random.default_rng(number)
        model = reference_model(config)
        tensors = store_model(model, config, how)
        cases: list[dict[str, Any]] = []
        while len(cases) < 3:
            length = (1, 7, 40)[len(cases)]
            prompt = rng.integers(3, int(config["vocab_size"]), length).tolist()
            case = greedy_case(model, prompt, 12)
            if case.pop("least") > LEAST_MARGIN and not {1, 2} & set(case["greedy_ids"]):
                cases.append(case)
        folder = Path(sys.argv[1]) / name
        folder.mkdir(parents=True, exist_ok=True)
        write_safetensors(folder / "model.safetensors", tensors)
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        note = f"fp32 logits of transformers {TRANSFORMERS} on the stored weights"
        (folder / "expected.json").write_text(json.dumps({"note": note, "cases": cases}) + "\n",
                                              encoding="utf-8")
        print(name, sum(file.stat().st_size for file in folder.iterdir()), flush=True)


if __name__ == "__main__":
    main()
