"""Tests against outputs of published implementations (tests/data/goldens)."""

from __future__ import annotations

import json
import math
import unittest
from pathlib import Path
from typing import Any

import numpy as np

from checkpoint_ref import read_hf_directory
from config_ref import DrafterConfig, TargetConfig
from dflash_ref import Drafter
from model_ref import TargetModel
from tree_ref import Generation, generate

GOLDENS = Path(__file__).resolve().parent.parent / "data" / "goldens"
FLOAT32_ROUNDING = 2.0**-24
# The files print logits to 6 decimals, margins and log-probabilities to 5.
PRINTED_LOGIT_ERROR = 0.5e-6
PRINTED_MARGIN_ERROR = 0.5e-5
FIRST_BLOCK_BOUND = 1e-4


def relative_logit_bound(config: TargetConfig) -> float:
    """How far two float32 runs of this model may differ, relative to the largest logit.

    A sum of K products in arbitrary order errs by about sqrt(K) roundings, of which the longest
    K of the model is taken. A layer has six products in sequence (q or kv down and up, scores,
    values, output, gate/up with down), whose independent errors add as a root of squares; so do
    those of the two runs. This comes to 5e-6 to 7e-6 for the models here.
    """
    longest = max(config.hidden_size, config.intermediate_size, config.moe_intermediate_size,
                  config.q_lora_rank, config.kv_lora_rank,
                  config.num_attention_heads * config.v_head_dim)
    num_products = 6 * config.num_hidden_layers + 1
    return math.sqrt(2 * num_products) * math.sqrt(longest) * FLOAT32_ROUNDING


def read_cases(folder: str) -> list[dict[str, Any]]:
    return json.loads((GOLDENS / folder / "expected.json").read_text(encoding="utf-8"))["cases"]


def read_target(folder: str, dtype: type = np.float32) -> TargetModel:
    config, weights = read_hf_directory(GOLDENS / folder)
    return TargetModel(TargetConfig.from_dict(config), weights, dtype)


class PublishedGoldens(unittest.TestCase):

    def check(self, target: TargetModel, cases: list[dict[str, Any]]) -> None:
        self.assertGreater(len(cases), 0)
        for case in cases:
            with self.subTest(prompt_length=len(case["prompt_ids"])):
                forward = target.forward_causal(case["prompt_ids"], target.new_cache())
                self.assertEqual(forward.logits.argmax(axis=1).tolist(),
                                 case["argmax_per_position"])
                expected = np.array(case["last_logits"])
                bound = relative_logit_bound(target.config) * np.abs(expected).max()
                difference = np.abs(forward.logits[-1] - expected).max()
                self.assertLess(difference, bound + PRINTED_LOGIT_ERROR)
                result = generate(target, None, case["prompt_ids"], len(case["greedy_ids"]))
                self.assertEqual(result.output_ids, case["greedy_ids"])
                # A margin is a difference of two logits, at most as large as those here.
                margin_difference = np.abs(np.array(result.margins) - case["margins"]).max()
                largest = max(np.abs(expected).max(), np.abs(forward.logits).max())
                self.assertLess(margin_difference,
                                2 * 2 * relative_logit_bound(target.config) * largest
                                + PRINTED_MARGIN_ERROR)

    def test_kimi_nested_int4(self) -> None:
        self.check(read_target("kimi_nested_int4"), read_cases("kimi_nested_int4"))

    def test_deepseek_v3_fp8_groups(self) -> None:
        self.check(read_target("deepseek_v3_fp8_groups"), read_cases("deepseek_v3_fp8_groups"))

    def test_dflash_trained_target(self) -> None:
        self.check(read_target("dflash_trained_bf16/target"), read_cases("dflash_trained_bf16"))

    def test_other_layouts(self) -> None:
        for folder in ("deepseek_v2_lite", "deepseek_v2_groups", "moonlight", "uneven_tied",
                       "fp8_partial_blocks", "moe_layer_freq"):
            with self.subTest(folder=folder):
                self.check(read_target(folder), read_cases(folder))

    def test_expanded_attention_as_well(self) -> None:
        for folder in ("kimi_nested_int4", "deepseek_v3_fp8_groups"):
            target, case = read_target(folder), read_cases(folder)[-1]
            forward = target.forward_causal(case["prompt_ids"], target.new_cache(), absorbed=False)
            expected = np.array(case["last_logits"])
            difference = np.abs(forward.logits[-1] - expected).max()
            self.assertLess(difference, relative_logit_bound(target.config)
                            * np.abs(expected).max() + PRINTED_LOGIT_ERROR)


class DraftingGoldens(unittest.TestCase):

    @classmethod
    def setUpClass(cls) -> None:
        cls.target = read_target("dflash_trained_bf16/target")
        config, weights = read_hf_directory(GOLDENS / "dflash_trained_bf16" / "draft")
        cls.drafter = Drafter(DrafterConfig.from_dict(config), weights, cls.target)
        cls.cases = read_cases("dflash_trained_bf16")

    def generate(self, case: dict[str, Any], mode: str, tree_budget: int = 0) -> Generation:
        return generate(self.target, self.drafter, case["prompt_ids"], len(case["greedy_ids"]),
                        mode, tree_budget)

    def check_outputs(self, result: Generation, expected: dict[str, Any]) -> None:
        self.assertEqual(result.output_ids, expected["output_ids"])
        # The published loop may run one more step although its pending root reaches the limit.
        count = len(result.acceptance_lengths)
        self.assertIn(len(expected["acceptance_lengths"]), (count, count + 1))
        self.assertEqual(result.acceptance_lengths, expected["acceptance_lengths"][:count])

    def test_chain_and_first_block(self) -> None:
        for case in self.cases:
            result = self.generate(case, "chain")
            self.check_outputs(result, case["chain"])
            first, expected = result.steps[0], case["first_block"]
            self.assertEqual(first.root, expected["root"])
            self.assertEqual(first.token_ids, expected["draft_logits_argmax"])
            for ours, theirs in zip(first.draft_top_log_probs, expected["draft_log_probs_top8"]):
                self.assertEqual([token for token, _ in ours], [token for token, _ in theirs])
                for (_, log_prob), (_, expected_log_prob) in zip(ours, theirs):
                    self.assertAlmostEqual(log_prob, expected_log_prob, delta=FIRST_BLOCK_BOUND)

    def test_trees(self) -> None:
        for case in self.cases:
            for tree_budget, expected in case["tree"].items():
                with self.subTest(prompt_length=len(case["prompt_ids"]), tree_budget=tree_budget):
                    result = self.generate(case, "tree", int(tree_budget))
                    self.check_outputs(result, expected)
                    first, tree = result.steps[0], case["first_tree"][tree_budget]
                    self.assertEqual(first.token_ids, tree["token_ids"])
                    self.assertEqual(first.depths, tree["depths"])
                    self.assertEqual(first.parents, tree["parents"])

    def test_steps_tell_the_output(self) -> None:
        """The dumps of a run alone give back its tokens and lengths."""
        result = self.generate(self.cases[0], "tree", 16)
        tokens: list[int] = []
        for step, length in zip(result.steps, result.acceptance_lengths):
            self.assertEqual(len(step.accepted_nodes) + 1, length)
            tokens += [step.root] + [step.token_ids[node - 1] for node in step.accepted_nodes]
        tokens.append(result.steps[-1].bonus_token)
        self.assertEqual(tokens[:len(result.output_ids)], result.output_ids)
        lengths = result.acceptance_lengths
        self.assertGreaterEqual(1 + sum(lengths), len(result.output_ids))
        self.assertLess(1 + sum(lengths[:-1]), len(result.output_ids))
