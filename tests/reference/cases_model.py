"""Tests of the configuration, rotary embedding, router and attention of the target."""

from __future__ import annotations

import unittest
from dataclasses import replace
from typing import Any

import numpy as np

from config_ref import (RopeConfig, TargetConfig, default_target_layer_ids, read_rope_config)
from gen_model import TINY
from gen_model_int4 import INT4_TINY2
from layers_ref import (attention_scale, rope_amplitude, rope_inverse_frequencies, rope_tables,
                        rotate_half_split, rotate_interleaved, route, yarn_mscale, yarn_range)
from model_ref import TargetModel, attention_form_difference
from random_weights import TokenCycle, make_target_weights

# Float64 passes of these small models agree to about 1e-14 of the logits (which reach about 20);
# a wrong formula differs in the first digits.
FLOAT64_BOUND = 1e-11


def random_target(config_dict: dict[str, Any], seed: int) -> TargetModel:
    config = TargetConfig.from_dict(config_dict)
    rng = np.random.default_rng(seed)
    cycle = TokenCycle(config.vocab_size, config.hidden_size, rng)
    return TargetModel(config, make_target_weights(config, cycle, rng), np.float64)


class Configs(unittest.TestCase):

    def test_spellings_of_rope(self) -> None:
        scaling = {"factor": 64, "beta_fast": 32, "beta_slow": 1, "mscale": 1, "mscale_all_dim": 1,
                   "original_max_position_embeddings": 4096}
        with_type = {"rope_theta": 5e4, "rope_scaling": {"type": "yarn", **scaling}}
        with_rope_type = {"rope_theta": 5e4, "rope_scaling": {"rope_type": "yarn", **scaling}}
        parameters = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e4, **scaling}}
        self.assertEqual(read_rope_config(with_type), read_rope_config(parameters))
        self.assertEqual(read_rope_config(with_type), read_rope_config(with_rope_type))
        self.assertIsNone(read_rope_config({"rope_scaling": None, "rope_theta": 1e4}).factor)

    def test_nested_and_flat_config(self) -> None:
        nested = {"model_type": "kimi_k25", "text_config": TINY.target}
        self.assertEqual(TargetConfig.from_dict(nested), TargetConfig.from_dict(TINY.target))
        config = TargetConfig.from_dict(INT4_TINY2.target)
        self.assertEqual((config.q_lora_rank, config.eos_token_ids), (0, (1, 3)))
        without = {key: value for key, value in TINY.target.items() if key != "q_lora_rank"}
        self.assertEqual(TargetConfig.from_dict(without).q_lora_rank, 0)

    def test_dense_layers(self) -> None:
        config = replace(TargetConfig.from_dict(TINY.target), first_k_dense_replace=1,
                         moe_layer_freq=2)
        self.assertEqual([config.is_moe_layer(layer) for layer in range(5)],
                         [False, False, True, False, True])

    def test_default_taps(self) -> None:
        self.assertEqual(default_target_layer_ids(36, 5), [1, 9, 17, 25, 33])
        self.assertEqual(default_target_layer_ids(61, 6), [1, 12, 24, 35, 47, 58])
        self.assertEqual(default_target_layer_ids(36, 1), [18])


def yarn(theta: float, factor: float, beta_fast: float, mscale: float) -> RopeConfig:
    return RopeConfig(theta, factor, beta_fast, 1.0, mscale, mscale, 4096)


class Rope(unittest.TestCase):

    def test_yarn_table_of_known_models(self) -> None:
        """(low, high), m and softmax scale for 64 rotated of 192 dimensions."""
        table = {
            "DeepSeek-V3": (yarn(1e4, 40, 32, 1.0), 10, 23, 1.368887945, 0.135233778861),
            "DeepSeek-V2-Lite": (yarn(1e4, 40, 32, 0.707), 10, 23, 1.260803777, 0.114721386793),
            "Kimi-K2-Instruct": (yarn(5e4, 32, 1, 1.0), 19, 20, 1.346573590, 0.130860799963),
            "Kimi-K2-Thinking": (yarn(5e4, 64, 1, 1.0), 19, 20, 1.415888308, 0.144679625803),
            "Kimi-K2.5": (yarn(5e4, 64, 32, 1.0), 8, 20, 1.415888308, 0.144679625803),
        }
        for name, (rope, low, high, mscale, scale) in table.items():
            with self.subTest(model=name):
                self.assertEqual(yarn_range(rope, 64), (low, high))
                self.assertAlmostEqual(yarn_mscale(rope.factor, rope.mscale_all_dim), mscale, 9)
                self.assertAlmostEqual(attention_scale(rope, 192), scale, 12)
                self.assertEqual(rope_amplitude(rope), 1.0)
        self.assertAlmostEqual(attention_scale(RopeConfig(5e4), 192), 0.072168783649, 12)

    def test_yarn_frequencies_blend(self) -> None:
        rope = yarn(5e4, 64, 32, 1.0)
        ratio = rope_inverse_frequencies(rope, 64) / rope_inverse_frequencies(RopeConfig(5e4), 64)
        np.testing.assert_allclose(ratio[:9], 1.0, rtol=1e-15)
        np.testing.assert_allclose(ratio[20:], 1 / 64, rtol=1e-14)
        self.assertAlmostEqual(ratio[14], 0.5 + 0.5 / 64, 14)

    def test_amplitude_override_and_default(self) -> None:
        self.assertEqual(rope_amplitude(replace(yarn(5e4, 64, 32, 1.0), attention_factor=1.25)),
                         1.25)
        bare = RopeConfig(5e4, 64, original_max_position_embeddings=4096)
        self.assertAlmostEqual(rope_amplitude(bare), 1.415888308, 9)

    def test_both_layouts_rotate_alike(self) -> None:
        rng = np.random.default_rng(1)
        x = rng.standard_normal((5, 2, 12))
        cos, sin = rope_tables(RopeConfig(1e4), 12, np.array([0, 1, 7, 30, 4000]), np.float64)
        order = np.concatenate([np.arange(0, 12, 2), np.arange(1, 12, 2)])
        np.testing.assert_allclose(rotate_interleaved(x, cos, sin)[..., order],
                                   rotate_half_split(x[..., order], cos, sin), rtol=1e-14)
        np.testing.assert_array_equal(rotate_interleaved(x, cos, sin)[0], x[0])
        # The pair (1, 0) turned by the angle 1.
        unit = np.zeros((1, 1, 4))
        unit[0, 0, 0] = 1
        turned = rotate_interleaved(unit, *rope_tables(RopeConfig(1e4), 4, np.array([1]),
                                                       np.float64))
        np.testing.assert_allclose(turned[0, 0], [np.cos(1), np.sin(1), 0, 0], rtol=1e-15)


class Router(unittest.TestCase):
    """Logits are given directly: hidden size equals the expert count, the gate is the identity."""

    def route(self, scores: list[float], bias: list[float] | None = None, **changes: Any):
        config = replace(TargetConfig.from_dict(TINY.target), n_routed_experts=len(scores),
                         **changes)
        values = np.array([scores])
        logits = (np.log(values) - np.log1p(-values) if config.scoring_func == "sigmoid"
                  else np.log(values))
        return route(config, logits, np.eye(len(scores)),
                     None if bias is None else np.array(bias))

    def test_bias_steers_the_choice_only(self) -> None:
        routing = self.route([0.5, 0.6, 0.7, 0.1], [0.5, 0, 0, 0], num_experts_per_tok=2,
                             routed_scaling_factor=2.5)
        self.assertEqual(routing.indices.tolist(), [[0, 2]])
        np.testing.assert_allclose(routing.weights, [[2.5 * 0.5 / 1.2, 2.5 * 0.7 / 1.2]])
        self.assertAlmostEqual(routing.margins[0], 0.1)

    def test_groups_count_their_two_best(self) -> None:
        # The best expert is in group 0, the best pair in group 1.
        routing = self.route([0.9, 0.1, 0.6, 0.7], [0.0] * 4, n_group=2, topk_group=1,
                             num_experts_per_tok=1, norm_topk_prob=False)
        self.assertEqual(routing.indices.tolist(), [[3]])
        np.testing.assert_allclose(routing.weights, [[2.5 * 0.7]])

    def test_negative_scores_in_a_kept_group_beat_masked_ones(self) -> None:
        routing = self.route([0.1, 0.1, 0.6, 0.7], [0, 0, -0.8, -0.9], n_group=2, topk_group=1,
                             num_experts_per_tok=2)
        self.assertEqual(routing.indices.tolist(), [[0, 1]])
        routing = self.route([0.1, 0.2, 0.6, 0.7], [-0.5, -0.5, -2, -2], n_group=2, topk_group=1,
                             num_experts_per_tok=2)
        self.assertEqual(routing.indices.tolist(), [[1, 0]])

    def test_equal_scores_take_the_lowest_index(self) -> None:
        routing = self.route([0.5] * 6, [0.0] * 6, num_experts_per_tok=3)
        self.assertEqual(routing.indices.tolist(), [[0, 1, 2]])
        self.assertEqual(routing.margins[0], 0)

    def test_v2_normalises_or_scales(self) -> None:
        shared = {"scoring_func": "softmax", "topk_method": "greedy", "num_experts_per_tok": 2,
                  "routed_scaling_factor": 16.0}
        scaled = self.route([0.1, 0.2, 0.3, 0.4], norm_topk_prob=False, **shared)
        self.assertEqual(scaled.indices.tolist(), [[3, 2]])
        np.testing.assert_allclose(scaled.weights, [[6.4, 4.8]])
        normalised = self.route([0.1, 0.2, 0.3, 0.4], norm_topk_prob=True, **shared)
        np.testing.assert_allclose(normalised.weights, [[4 / 7, 3 / 7]])

    def test_v2_groups_count_their_best(self) -> None:
        routing = self.route([0.4, 0.01, 0.29, 0.3], scoring_func="softmax", n_group=2,
                             topk_group=1, topk_method="group_limited_greedy",
                             num_experts_per_tok=2, norm_topk_prob=False)
        self.assertEqual(routing.indices.tolist(), [[0, 1]])


class Attention(unittest.TestCase):

    def setUp(self) -> None:
        self.models = [random_target(TINY.target, 11), random_target(INT4_TINY2.target, 12)]
        self.prompt = [int(token) for token in np.random.default_rng(2).integers(0, 256, size=21)]

    def test_expanded_equals_absorbed(self) -> None:
        for model in self.models:
            self.assertLess(attention_form_difference(model, self.prompt), FLOAT64_BOUND)

    def test_incremental_equals_full(self) -> None:
        for model in self.models:
            full = model.forward_causal(self.prompt, model.new_cache())
            for absorbed in (True, False):
                cache = model.new_cache()
                logits = []
                for begin, end in ((0, 1), (1, 9), (9, 10), (10, 21)):
                    forward = model.forward_causal(self.prompt[begin:end], cache, absorbed)
                    cache.commit(forward.latents, list(range(end - begin)))
                    logits.append(forward.logits)
                difference = np.abs(np.concatenate(logits) - full.logits).max()
                self.assertLess(difference, FLOAT64_BOUND)

    def test_logits_depend_on_order_and_position(self) -> None:
        """A model that lost its position information would pass the tests above."""
        for model in self.models:
            swapped = [self.prompt[1], self.prompt[0]] + self.prompt[2:]
            forward = model.forward_causal(self.prompt, model.new_cache())
            other = model.forward_causal(swapped, model.new_cache())
            self.assertGreater(np.abs(forward.logits[-1] - other.logits[-1]).max(), 1e-3)
