"""Tests of the bundle generators: what they promise, and that the files alone reproduce it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import numpy as np

from bundle_ref import MIN_LOGIT_MARGIN, PROMPT_LENGTHS, TREE_BUDGETS
from cases_goldens import relative_logit_bound
from config_ref import DrafterConfig, TargetConfig
from dflash_ref import Drafter
from kdtr import Bundle, read_kdtr
from model_ref import TargetModel
from number_formats import dequantize_w4a16, float32_from_bf16
from tree_ref import generate

HERE = Path(__file__).resolve().parent
NAMES = ("model_tiny", "model_int4_tiny", "model_int4_tiny2")
MAX_BUNDLE_BYTES = 8 * 1000 * 1000


def run_generator(script: str, output: Path) -> None:
    subprocess.run([sys.executable, str(HERE / script), "--output", str(output)], check=True,
                   stdout=subprocess.DEVNULL)


def target_weights(bundle: Bundle, quantized: bool) -> dict[str, np.ndarray]:
    """The target's float32 weights, from .qw and .sc where asked and there."""
    tensors = {name: tensor for name, tensor in bundle.tensors.items()
               if not name.startswith("drafter.")}
    weights = {name: tensor.array for name, tensor in tensors.items()
               if not name.endswith((".qw", ".sc"))}
    if quantized:
        for name in [name for name in tensors if name.endswith(".qw")]:
            base = name.removesuffix(".qw")
            scale = tensors[base + ".sc"]
            weights[base] = dequantize_w4a16(
                tensors[name].array,
                float32_from_bf16(scale.array) if scale.dtype == "BF16" else scale.array)
    return weights


class GeneratedBundles(unittest.TestCase):

    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)
        run_generator("gen_model.py", cls.folder)
        run_generator("gen_model_int4.py", cls.folder)
        cls.bundles = {name: read_kdtr(cls.folder / f"{name}.kdtr") for name in NAMES}

    def test_same_bytes_again(self) -> None:
        again = self.folder / "again.kdtr"
        run_generator("gen_model.py", again)
        self.assertEqual(again.read_bytes(), (self.folder / "model_tiny.kdtr").read_bytes())

    def test_size_and_contents(self) -> None:
        for name, bundle in self.bundles.items():
            with self.subTest(bundle=name):
                path = self.folder / f"{name}.kdtr"
                self.assertLess(path.stat().st_size, MAX_BUNDLE_BYTES)
                target = TargetConfig.from_dict(bundle.header["target"]["config"])
                drafter = DrafterConfig.from_dict(bundle.header["drafter"]["config"])
                self.assertLess(max(drafter.target_layer_ids), target.num_hidden_layers)
                self.assertLess(drafter.mask_token_id, target.vocab_size)
                self.assertLess(drafter.num_key_value_heads, drafter.num_attention_heads)
                if "quantization" not in bundle.header:
                    continue
                group_size = bundle.header["quantization"]["group_size"]
                for tensor_name, tensor in bundle.tensors.items():
                    if not tensor_name.endswith(".qw"):
                        continue
                    base = tensor_name.removesuffix(".qw")
                    out_features, in_features = bundle.tensors[base].array.shape
                    self.assertEqual(tensor.array.shape, (out_features, in_features // 8))
                    self.assertEqual(bundle.tensors[base + ".sc"].array.shape,
                                     (out_features, in_features // group_size))

    def test_goldens_keep_their_promises(self) -> None:
        for name, bundle in self.bundles.items():
            goldens = bundle.header["goldens"]
            eos = set(TargetConfig.from_dict(bundle.header["target"]["config"]).eos_token_ids)
            for precision, part in goldens.items():
                self.assertEqual([len(case["prompt_ids"]) for case in part["cases"]],
                                 list(PROMPT_LENGTHS))
                for case in part["cases"]:
                    with self.subTest(bundle=name, precision=precision):
                        self.assertGreater(min(case["margins"]), MIN_LOGIT_MARGIN)
                        self.assertFalse(eos & set(case["greedy_ids"]))
                        self.assertEqual(set(case["tree"]), {str(b) for b in TREE_BUDGETS})
                        for run in [*case["tree"].values(), case["chain"]]:
                            self.assertEqual(run["output_ids"], case["greedy_ids"])
            if "quantized" in goldens:
                pairs = list(zip(goldens["original"]["cases"], goldens["quantized"]["cases"]))
                self.assertTrue(any(a["greedy_ids"] != b["greedy_ids"] for a, b in pairs))

    def test_files_reproduce_goldens_in_float32(self) -> None:
        """What an engine does: read the file, compute in float32, compare."""
        for name, bundle in self.bundles.items():
            config = TargetConfig.from_dict(bundle.header["target"]["config"])
            drafter_config = DrafterConfig.from_dict(bundle.header["drafter"]["config"])
            drafter_weights = {key.removeprefix("drafter."): tensor.array
                               for key, tensor in bundle.tensors.items()
                               if key.startswith("drafter.")}
            for precision, part in bundle.header["goldens"].items():
                target = TargetModel(config, target_weights(bundle, precision == "quantized"))
                drafter = Drafter(drafter_config, drafter_weights, target)
                for case in part["cases"]:
                    with self.subTest(bundle=name, precision=precision,
                                      prompt_length=len(case["prompt_ids"])):
                        result = generate(target, drafter, case["prompt_ids"],
                                          len(case["greedy_ids"]), "tree", 16)
                        self.assertEqual(result.output_ids, case["greedy_ids"])
                        self.assertEqual(result.acceptance_lengths,
                                         case["tree"]["16"]["acceptance_lengths"])
                        expected = np.array(case["last_logits"])
                        difference = np.abs(result.last_logits - expected).max()
                        self.assertLess(difference,
                                        relative_logit_bound(config) * np.abs(expected).max())
