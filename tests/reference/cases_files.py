"""Tests of number formats, the KDTR bundle and Hugging Face directories."""

from __future__ import annotations

import json
import struct
import tempfile
import unittest
from pathlib import Path

import numpy as np

from checkpoint_ref import HfLayout, is_ignored, read_hf_directory, write_hf_directory
from config_ref import TargetConfig
from gen_model import TINY
from kdtr import KdtrError, Tensor, read_kdtr, write_kdtr, xxh3_64
from number_formats import (FP8_E4M3_VALUES, bf16_from_float32, dequantize_fp8_blocks,
                            dequantize_w4a16, float32_from_bf16, pack_int4, quantize_w4a16,
                            unpack_int4)
from random_weights import TokenCycle, make_target_weights


class NumberFormats(unittest.TestCase):

    def test_int4_golden_words(self) -> None:
        values = np.array([[1, 2, 3, 4, 5, 6, 7, 0, -1, -2, -3, -4, -5, -6, -7, -8]])
        words = pack_int4(values)
        self.assertEqual(words.tolist(), [[0x8FEDCBA9, 0x01234567]])
        self.assertEqual(unpack_int4(words).tolist(), values.tolist())
        self.assertEqual(unpack_int4(words.view(np.int32)).tolist(), values.tolist())

    def test_quantization_rounds_half_to_even_and_clamps(self) -> None:
        # absmax 7.5 makes the scale exactly 1.
        weight = np.array([[7.5, -7.5, 0.5, 1.5, 2.5, -0.5, -1.5, 6.5]], dtype=np.float32)
        words, scale = quantize_w4a16(weight, 8, "F32")
        self.assertEqual(scale.tolist(), [[1.0]])
        self.assertEqual(unpack_int4(words).tolist(), [[7, -8, 0, 2, 2, 0, -2, 6]])

    def test_quantization_error_is_half_a_step(self) -> None:
        rng = np.random.default_rng(5)
        weight = rng.standard_normal((6, 64)).astype(np.float32)
        weight[2, :16] = 0
        for scale_dtype in ("F32", "BF16"):
            words, scale = quantize_w4a16(weight, 16, scale_dtype)
            self.assertEqual(scale[2, 0], 0)
            # absmax / scale is 7.5 * (1 + 2^-8) at most with a bf16 scale: the clamp to 7 adds
            # 0.03 of a step to the half step of rounding.
            step = np.repeat(scale, 16, axis=1)
            error = np.abs(dequantize_w4a16(words, scale) - weight)
            self.assertTrue(np.all(error <= 0.5301 * step))
            if scale_dtype == "BF16":
                self.assertTrue(np.all(scale.view(np.uint32) & 0xFFFF == 0))

    def test_bf16_rounds_to_nearest_even(self) -> None:
        values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -3.0], np.float32)
        self.assertEqual(float32_from_bf16(bf16_from_float32(values)).tolist(),
                         [1.0, 1.0, 1 + 2**-6, 1 + 2**-7, -3.0])

    def test_fp8_values_and_edge_blocks(self) -> None:
        known = {0x00: 0.0, 0x01: 2.0**-9, 0x08: 2.0**-6, 0x38: 1.0, 0x7E: 448.0, 0xC0: -2.0}
        for pattern, value in known.items():
            self.assertEqual(FP8_E4M3_VALUES[pattern], value)
        self.assertTrue(np.isnan(FP8_E4M3_VALUES[0x7F]) and np.isnan(FP8_E4M3_VALUES[0xFF]))
        patterns = np.full((130, 200), 0x38, dtype=np.uint8)
        weights = dequantize_fp8_blocks(patterns, np.array([[1, 2], [3, 4]], dtype=np.float32))
        corners = [weights[0, 0], weights[127, 128], weights[128, 127], weights[129, 199]]
        self.assertEqual(corners, [1, 2, 3, 4])


class KdtrFile(unittest.TestCase):

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name) / "bundle.kdtr"
        rng = np.random.default_rng(7)
        self.tensors = {
            "small": Tensor("F32", rng.standard_normal((3, 5)).astype(np.float32)),
            "large": Tensor("F32", rng.standard_normal((128, 129)).astype(np.float32)),
            "bits": Tensor("BF16", rng.integers(0, 2**16, size=7).astype(np.uint16)),
            "words": Tensor("I32", rng.integers(-2**31, 2**31, size=(2, 3)).astype(np.int32)),
        }
        self.header = {"target": {"config": {"hidden_size": 5}}, "goldens": {"original": {}}}
        write_kdtr(self.path, self.header, self.tensors)
        self.content = self.path.read_bytes()

    def test_xxh3_of_the_empty_string(self) -> None:
        self.assertEqual(xxh3_64(b""), 0x2D06800538D394C2)

    def test_round_trip(self) -> None:
        bundle = read_kdtr(self.path)
        self.assertEqual(bundle.header, self.header)
        self.assertEqual(set(bundle.tensors), set(self.tensors))
        for name, tensor in self.tensors.items():
            self.assertEqual(bundle.tensors[name].dtype, tensor.dtype)
            np.testing.assert_array_equal(bundle.tensors[name].array, tensor.array)

    def test_layout(self) -> None:
        version, header_bytes, checksum, reserved = struct.unpack("<IQQQ", self.content[4:32])
        text = self.content[32:32 + header_bytes]
        self.assertEqual((self.content[:4], version, checksum, reserved),
                         (b"KDTR", 1, xxh3_64(text), 0))
        table = json.loads(text)["tensors"]
        self.assertEqual(table["small"]["offset"], 0)
        self.assertEqual(table["large"]["offset"], 4096)
        self.assertEqual(table["bits"]["offset"] % 64, 0)
        data_start = -(-(32 + header_bytes) // 4096) * 4096
        self.assertEqual(len(self.content),
                         data_start + table["words"]["offset"] + table["words"]["bytes"])

    def assert_refused(self, content: bytes, message: str) -> None:
        self.path.write_bytes(content)
        with self.assertRaisesRegex(KdtrError, message):
            read_kdtr(self.path)

    def test_changed_bytes_are_found(self) -> None:
        header_bytes = struct.unpack("<Q", self.content[8:16])[0]
        data_start = -(-(32 + header_bytes) // 4096) * 4096
        for place, message in ((0, "magic"), (4, "version"), (16, "header checksum"),
                               (24, "bytes 24-31"), (32 + header_bytes // 2, "header checksum"),
                               (32 + header_bytes, "zero padding"),
                               (data_start, "small: checksum"), (data_start + 60, "zero padding"),
                               (data_start + 100, "zero padding"), (data_start + 9000, "large"),
                               (len(self.content) - 1, "words: checksum")):
            changed = bytearray(self.content)
            changed[place] ^= 0x40
            with self.subTest(place=place):
                self.assert_refused(bytes(changed), message)

    def test_wrong_length_is_found(self) -> None:
        self.assert_refused(self.content[:-1], "words: ends at")
        self.assert_refused(self.content + b"\0", "the last tensor ends at")
        self.assert_refused(self.content[:20], "no room")
        self.assert_refused(self.content[:100], "header ends at")


class Checkpoints(unittest.TestCase):

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name)
        rng = np.random.default_rng(3)
        config = TargetConfig.from_dict(TINY.target)
        cycle = TokenCycle(config.vocab_size, config.hidden_size, rng)
        self.weights = make_target_weights(config, cycle, rng)

    def check(self, layout: HfLayout) -> dict[str, np.ndarray]:
        write_hf_directory(self.path, TINY.target, self.weights, layout)
        config, weights = read_hf_directory(self.path)
        self.assertEqual(TargetConfig.from_dict(config), TargetConfig.from_dict(TINY.target))
        self.assertEqual(set(weights), set(self.weights))
        return weights

    def test_float32_is_exact(self) -> None:
        for name, weight in self.check(HfLayout(dtype="F32")).items():
            np.testing.assert_array_equal(weight, self.weights[name])

    def test_nested_int4_shards(self) -> None:
        weights = self.check(HfLayout(num_shards=3, int4_group_size=16, nested=True))
        self.assertEqual(len(list(self.path.glob("model-0000?-of-000003.safetensors"))), 3)
        for name, weight in weights.items():
            original = self.weights[name]
            if ".mlp.experts." in name:
                expected = dequantize_w4a16(*quantize_w4a16(original, 16, "BF16"))
            elif name.endswith("e_score_correction_bias"):
                expected = original
            else:
                expected = float32_from_bf16(bf16_from_float32(original))
            np.testing.assert_array_equal(weight, expected)

    def test_ignored_names(self) -> None:
        for name in ("vision_tower.x", "mm_projector.y", "model.layers.4.eh_proj.weight",
                     "model.layers.0.self_attn.rotary_emb.inv_freq"):
            self.assertTrue(is_ignored(name, 4))
        self.assertFalse(is_ignored("model.layers.3.input_layernorm.weight", 4))
