"""Makes the small bundles of the test data: INT4 copies of the experts, and goldens.

The goldens are computed in float64 from float32 weights. A prompt is used only if nothing about
its result hangs on a rounding error.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from config_ref import DrafterConfig, TargetConfig
from dflash_ref import Drafter
from kdtr import Tensor, write_kdtr
from model_ref import TargetModel
from number_formats import bf16_from_float32, dequantize_w4a16, quantize_w4a16
from random_weights import TokenCycle, make_drafter_weights, make_target_weights
from tree_ref import Generation, generate

MIN_LOGIT_MARGIN = 1e-3
# Float32 arithmetic moves router scores by about 1e-6 and a slot's log-probabilities by about 2e-5
# here, and a prefix sums up to seven of those. Goldens stay well away from choices that this could
# turn over, for a correct engine would then differ from them.
MIN_ROUTER_MARGIN = 1e-4
MIN_ACCEPT_MARGIN = 1e-3
TREE_BUDGETS = (7, 16, 64)
PROMPT_LENGTHS = (1, 2, 5, 17, 33)
MAX_PROMPT_ATTEMPTS = 50


@dataclass(frozen=True)
class BundleSpec:
    """What a bundle holds; group_size None leaves it without quantised weights."""

    name: str
    target: dict[str, Any]
    drafter: dict[str, Any]
    max_new_tokens: int
    group_size: int | None = None
    scale_dtype: str = "F32"


def quantize_experts(weights: dict[str, np.ndarray], group_size: int,
                     scale_dtype: str) -> tuple[dict[str, Tensor], dict[str, np.ndarray]]:
    """The .qw and .sc tensors of the routed experts, and all weights with those dequantised."""
    stored: dict[str, Tensor] = {}
    dequantized = dict(weights)
    for name, weight in weights.items():
        if ".mlp.experts." not in name:
            continue
        words, scale = quantize_w4a16(weight, group_size, scale_dtype)
        stored[name + ".qw"] = Tensor("I32", words.view(np.int32))
        stored[name + ".sc"] = Tensor(
            scale_dtype, bf16_from_float32(scale) if scale_dtype == "BF16" else scale)
        dequantized[name] = dequantize_w4a16(words, scale)
    return stored, dequantized


# --- Goldens ---------------------------------------------------------------------------------


class GoldenError(Exception):
    """A prompt whose result hangs on a rounding error or meets an eos token."""


@dataclass(frozen=True)
class Engine:
    """A target and its drafter, computing in float64, and how far to decode."""

    target: TargetModel
    drafter: Drafter
    max_new_tokens: int

    def plain(self, prompt_ids: list[int]) -> Generation:
        result = generate(self.target, None, prompt_ids, self.max_new_tokens)
        if min(result.margins) <= MIN_LOGIT_MARGIN:
            raise GoldenError(f"logit margin {min(result.margins)}")
        if result.least_router_margin <= MIN_ROUTER_MARGIN:
            raise GoldenError(f"router margin {result.least_router_margin}")
        if set(result.output_ids) & set(self.target.config.eos_token_ids):
            raise GoldenError("an eos token occurs")
        return result

    def speculative(self, prompt_ids: list[int], mode: str, tree_budget: int,
                    plain: Generation) -> dict[str, list[int]]:
        result = generate(self.target, self.drafter, prompt_ids, self.max_new_tokens, mode,
                          tree_budget)
        if result.output_ids != plain.output_ids:
            raise AssertionError(f"{mode} {tree_budget} differs from plain decoding")
        if result.least_accept_margin <= MIN_ACCEPT_MARGIN:
            raise GoldenError(f"{mode} {tree_budget} margin {result.least_accept_margin}")
        return {"output_ids": result.output_ids, "acceptance_lengths": result.acceptance_lengths}

    def golden(self, prompt_ids: list[int], plain: Generation) -> dict[str, Any]:
        """One case of the bundle's goldens; floats are cut to 7 decimals, beyond what counts."""
        return {
            "prompt_ids": prompt_ids,
            "greedy_ids": plain.output_ids,
            "margins": [round(margin, 7) for margin in plain.margins],
            "last_logits": [round(float(logit), 7) for logit in plain.last_logits],
            "tree": {str(tree_budget): self.speculative(prompt_ids, "tree", tree_budget, plain)
                     for tree_budget in TREE_BUDGETS},
            "chain": self.speculative(prompt_ids, "chain", 0, plain),
        }


def make_goldens(engines: dict[str, Engine], vocab_size: int,
                 rng: np.random.Generator) -> dict[str, dict[str, Any]]:
    """The same prompts for every precision; a prompt that is refused is drawn anew."""
    goldens: dict[str, dict[str, Any]] = {name: {"cases": []} for name in engines}
    for length in PROMPT_LENGTHS:
        for _ in range(MAX_PROMPT_ATTEMPTS):
            prompt_ids = [int(token) for token in rng.integers(2, vocab_size - 1, size=length)]
            try:
                plain = {name: engine.plain(prompt_ids) for name, engine in engines.items()}
                cases = {name: engine.golden(prompt_ids, plain[name])
                         for name, engine in engines.items()}
            except GoldenError:
                continue
            for name, case in cases.items():
                goldens[name]["cases"].append(case)
            break
        else:
            raise AssertionError(f"no prompt of length {length} is safe: change the weights")
    return goldens


def check_goldens(goldens: dict[str, dict[str, Any]]) -> None:
    """Asserts the promises of the goldens across precisions."""
    for part in goldens.values():
        assert len(part["cases"]) == len(PROMPT_LENGTHS)
        assert all(min(case["margins"]) > MIN_LOGIT_MARGIN for case in part["cases"])
        acceptance_lengths = [length for case in part["cases"]
                              for length in case["tree"]["64"]["acceptance_lengths"]]
        assert max(acceptance_lengths) > 1, "no draft was ever accepted"
    if "quantized" in goldens:
        pairs = list(zip(goldens["original"]["cases"], goldens["quantized"]["cases"]))
        assert all(original["last_logits"] != quantized["last_logits"]
                   for original, quantized in pairs)
        assert any(original["greedy_ids"] != quantized["greedy_ids"]
                   for original, quantized in pairs), "INT4 weights give the FP32 tokens"


def write_bundle(spec: BundleSpec, path: Path, seed: int) -> None:
    """Draws the weights, computes the goldens and writes the bundle."""
    target_config = TargetConfig.from_dict(spec.target)
    drafter_config = DrafterConfig.from_dict(spec.drafter)
    rng = np.random.default_rng([seed, *spec.name.encode()])
    cycle = TokenCycle(target_config.vocab_size, target_config.hidden_size, rng)
    weights = make_target_weights(target_config, cycle, rng)
    drafter_weights = make_drafter_weights(drafter_config, cycle, rng)
    header: dict[str, Any] = {"target": {"config": spec.target},
                              "drafter": {"config": spec.drafter}}
    precisions = {"original": weights}
    quantized: dict[str, Tensor] = {}
    if spec.group_size is not None:
        header["quantization"] = {"format": "w4a16", "group_size": spec.group_size}
        quantized, precisions["quantized"] = quantize_experts(weights, spec.group_size,
                                                              spec.scale_dtype)
    engines = {}
    for name, values in precisions.items():
        target = TargetModel(target_config, values, np.float64)
        engines[name] = Engine(target, Drafter(drafter_config, drafter_weights, target),
                               spec.max_new_tokens)
    header["goldens"] = make_goldens(engines, target_config.vocab_size, rng)
    check_goldens(header["goldens"])

    tensors = {name: Tensor("F32", weight) for name, weight in weights.items()}
    tensors.update(quantized)
    tensors.update({"drafter." + name: Tensor("F32", weight)
                    for name, weight in drafter_weights.items()})
    write_kdtr(path, header, tensors)
