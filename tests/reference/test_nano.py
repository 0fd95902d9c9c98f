"""The nano model's training code against the reference; skipped where PyTorch is missing."""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path

import numpy as np

from checkpoint_ref import read_hf_directory
from config_ref import DrafterConfig, TargetConfig
from dflash_ref import Drafter as DrafterReference
from model_ref import TargetModel

try:
    import torch

    import nano_export
    from nano_drafter import Drafter
    from nano_model import Target
    from nano_quantize import fake_quantize
    from nano_tokenizer import Tokenizer, train_ranks
except ImportError:
    torch = None  # type: ignore[assignment]

TEXTS = ["the cat sat on the mat; the dog's bone was 12345 days old.\n\n",
         "Cats aren't DOGS  here "]


@unittest.skipIf(torch is None, "needs PyTorch")
class NanoTest(unittest.TestCase):

    def setUp(self) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(5)
        self.tokenizer = Tokenizer(train_ranks(TEXTS * 3, 270))
        self.target_json = nano_export.target_config(self.tokenizer, smoke=True)
        self.drafter_json = nano_export.drafter_config(self.target_json, self.tokenizer)
        self.target = Target(TargetConfig.from_dict(self.target_json), 64).eval()
        self.drafter = Drafter(DrafterConfig.from_dict(self.drafter_json), 64).eval()
        with torch.no_grad():
            for module in (self.target, self.drafter):
                for parameter in module.parameters():
                    if parameter.ndim == 1:
                        parameter += 0.1 * torch.randn_like(parameter)
            for moe in self.target.moe_layers():
                moe.gate.e_score_correction_bias += 0.1 * torch.randn(16)
        nano_export.round_to_bf16(self.target)
        nano_export.round_to_bf16(self.drafter)
        self.ids = torch.randint(0, self.tokenizer.vocab_size, (2, 40))

    def reference(self, layout: str) -> TargetModel:
        """The reference on the directory that nano_export writes of self.target."""
        with tempfile.TemporaryDirectory() as folder:
            nano_export.write_target(Path(folder), self.target_json, self.target, self.tokenizer)
            config, weights = read_hf_directory(Path(folder) / layout)
        return TargetModel(TargetConfig.from_dict(config), weights, np.float64)

    def assert_near(self, actual: torch.Tensor, expected: np.ndarray) -> None:
        """Within 1e-5 of the largest expected value: float32 sums of some hundred terms."""
        difference = np.abs(actual.numpy() - expected).max()
        self.assertLess(difference, 1e-5 * np.abs(expected).max())

    def test_logits_of_bf16_and_int4(self) -> None:
        for layout in ("bf16", "int4"):
            model = self.reference(layout)
            self.target.set_quantized(layout == "int4")
            with torch.no_grad():
                logits = self.target(self.ids)
            for row in range(2):
                expected = model.forward_causal(self.ids[row].tolist(), model.new_cache())
                self.assert_near(logits[row], expected.logits)
        self.target.set_quantized(False)

    def test_rounded_experts_are_the_quantized_ones(self) -> None:
        self.target.set_quantized(True)
        with torch.no_grad():
            expected = self.target(self.ids)
            self.target.set_quantized(False)
            self.assertGreater(float((self.target(self.ids) - expected).abs().max()), 1e-3)
            nano_export.round_experts_to_int4(self.target)
            self.assertTrue(torch.equal(self.target(self.ids), expected))

    def test_straight_through_gradient(self) -> None:
        weight = torch.randn(2, 4, 64, requires_grad=True)
        factor = torch.randn(2, 4, 64)
        (fake_quantize(weight) * factor).sum().backward()
        self.assertTrue(torch.equal(weight.grad, factor))

    def test_generation_with_the_cache(self) -> None:
        ids, margins = self.target.generate(self.ids[:, :7], 20)
        self.assertTrue(torch.equal(ids[:, :7], self.ids[:, :7]))
        with torch.no_grad():
            best = self.target(ids[:, :-1]).topk(2)
        values = best.values[:, 6:]
        self.assertGreater(float((values[..., 0] - values[..., 1]).min()), 1e-5)
        self.assertTrue(torch.equal(ids[:, 7:], best.indices[:, 6:, 0]))
        self.assertLess(float((margins - (values[..., 0] - values[..., 1])).abs().max()), 1e-4)

    def test_blocks_of_the_drafter(self) -> None:
        model = self.reference("bf16")
        config = DrafterConfig.from_dict(self.drafter_json)
        reference = DrafterReference(config, nano_export.module_weights(self.drafter), model)
        anchors = torch.tensor([[1, 17, 32], [5, 9, 9]])
        with torch.no_grad():
            taps = self.target.hidden(self.ids, taps=config.target_layer_ids)[1]
            logits = self.drafter(self.target, self.ids, taps, anchors)
        for row in range(2):
            ids = self.ids[row].tolist()
            row_taps = reference.taps(model.forward_causal(ids, model.new_cache()))
            for block, anchor in enumerate(anchors[row].tolist()):
                context = reference.new_context()
                context.extend(row_taps[:anchor])
                self.assert_near(logits[row, block].log_softmax(-1),
                                 reference.draft(ids[anchor], context))

    def test_load_is_counted_and_balanced(self) -> None:
        router = self.target.moe_layers()[0].gate
        before = router.e_score_correction_bias.clone()
        self.target.train()
        self.target(self.ids)
        load = router.load.clone()
        self.assertEqual(float(load.sum()), self.ids.numel() * router.config.num_experts_per_tok)
        router.balance(0.01)
        moved = router.e_score_correction_bias - before
        self.assertTrue(torch.allclose(moved, 0.01 * torch.sign(load.mean() - load), atol=1e-6))

    def test_tokens_are_the_text(self) -> None:
        for text in TEXTS:
            ids = self.tokenizer.encode(text)
            self.assertLess(len(ids), len(text))
            self.assertEqual(self.tokenizer.decode(ids), text)


if __name__ == "__main__":
    unittest.main()
