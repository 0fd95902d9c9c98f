"""Tests of draft trees, acceptance and the drafter's context."""

from __future__ import annotations

import itertools
import unittest

import numpy as np

from cases_model import FLOAT64_BOUND, random_target
from config_ref import DrafterConfig
from dflash_ref import Drafter
from gen_model import TINY
from layers_ref import log_softmax
from random_weights import TokenCycle, make_drafter_weights
from tree_ref import DraftTree, accept_greedy, ancestor_mask, build_tree, chain_tree


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """The token path of every node."""
    result: list[tuple[int, ...]] = [()]
    for token_id, parent in zip(tree.token_ids, tree.parents[1:]):
        result.append(result[parent] + (token_id,))
    return result[1:]


class DraftTrees(unittest.TestCase):

    def test_holds_the_most_probable_prefixes(self) -> None:
        """Against all prefixes, written out: vocabulary 4, horizon 3, 84 of them."""
        rng = np.random.default_rng(4)
        log_probs = log_softmax(rng.standard_normal((3, 4)).astype(np.float32))
        every = [path for depth in (1, 2, 3)
                 for path in itertools.product(range(4), repeat=depth)]
        every.sort(key=lambda path: -sum(float(log_probs[slot, token_id])
                                         for slot, token_id in enumerate(path)))
        for tree_budget in (1, 4, 5, 20, 84):
            tree = build_tree(log_probs, tree_budget)
            self.assertEqual(paths(tree), every[:tree_budget])
            self.assertEqual(tree.depths, [len(path) for path in paths(tree)])
            self.assertTrue(all(parent < node for node, parent in enumerate(tree.parents)))
        self.assertEqual(len(build_tree(log_probs, 100).token_ids), 84)

    def test_ties(self) -> None:
        """Equal tokens by the lower id; equal prefixes by the smaller rank tuple."""
        log_probs = np.full((2, 3), -1.0, dtype=np.float32)
        tree = build_tree(log_probs, 12)
        self.assertEqual(paths(tree), [(0,), (1,), (2,), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1),
                                       (1, 2), (2, 0), (2, 1), (2, 2)])
        certain = np.array([[0, -9], [0, -9]], dtype=np.float32)
        self.assertEqual(paths(build_tree(certain, 3)), [(0,), (0, 0), (0, 1)])

    def test_sums_do_not_drift(self) -> None:
        rng = np.random.default_rng(6)
        log_probs = log_softmax(rng.standard_normal((7, 300)).astype(np.float32) * 3)
        tree = build_tree(log_probs, 200)
        for path, log_prob in zip(paths(tree), tree.log_probs):
            total = 0.0
            for slot, token_id in enumerate(path):
                total += float(log_probs[slot, token_id])
            self.assertEqual(total, log_prob)

    def test_chain(self) -> None:
        log_probs = np.array([[-1, 0, 0], [0, -1, -1]], dtype=np.float32)
        tree = chain_tree(log_probs)
        self.assertEqual((tree.token_ids, tree.depths, tree.parents), ([1, 0], [1, 2], [-1, 0, 1]))

    def test_ancestor_mask(self) -> None:
        self.assertEqual(ancestor_mask([-1, 0, 0, 1]).astype(int).tolist(),
                         [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]])


class Acceptance(unittest.TestCase):
    # Root 0 with children 1 (token 5) and 2 (token 6); 3 (token 7) below 1, 4 (token 7) below 2.
    tree = DraftTree([5, 6, 7, 7], [1, 1, 2, 2], [-1, 0, 0, 1, 2])

    def test_follows_the_target(self) -> None:
        self.assertEqual(accept_greedy(self.tree, [6, 0, 7, 0, 9]), ([0, 2, 4], 9))
        self.assertEqual(accept_greedy(self.tree, [5, 8, 7, 0, 9]), ([0, 1], 8))

    def test_nothing_accepted(self) -> None:
        self.assertEqual(accept_greedy(self.tree, [7, 0, 0, 0, 0]), ([0], 7))


class DrafterContexts(unittest.TestCase):

    def setUp(self) -> None:
        self.target = random_target(TINY.target, 21)
        config = DrafterConfig.from_dict(TINY.drafter)
        rng = np.random.default_rng(22)
        cycle = TokenCycle(self.target.config.vocab_size, config.hidden_size, rng)
        self.drafter = Drafter(config, make_drafter_weights(config, cycle, rng), self.target)
        self.prompt = [int(token) for token in rng.integers(0, 300, size=13)]
        self.taps = self.drafter.taps(
            self.target.forward_causal(self.prompt, self.target.new_cache()))

    def test_pieces_equal_the_whole(self) -> None:
        whole, pieces = self.drafter.new_context(), self.drafter.new_context()
        whole.extend(self.taps)
        for begin, end in ((0, 1), (1, 8), (8, 13)):
            pieces.extend(self.taps[begin:end])
        for ours, theirs in zip(whole.keys + whole.values, pieces.keys + pieces.values):
            self.assertLess(np.abs(ours - theirs).max(), FLOAT64_BOUND)

    def test_drafting_leaves_the_context_alone(self) -> None:
        context = self.drafter.new_context()
        context.extend(self.taps)
        first = self.drafter.draft(17, context)
        np.testing.assert_array_equal(first, self.drafter.draft(17, context))
        self.assertEqual(context.length(), 13)
        self.assertEqual(first.shape, (7, 320))
        self.assertEqual(first.dtype, np.float32)
        np.testing.assert_allclose(np.exp(first).sum(axis=1), 1.0, rtol=1e-5)

    def test_tree_rows_equal_a_causal_run_of_their_path(self) -> None:
        """Each tree node's logits are those of its path run alone behind the same prompt."""
        cache = self.target.new_cache()
        forward = self.target.forward_causal(self.prompt, cache)
        cache.commit(forward.latents, list(range(len(self.prompt))))
        tree = DraftTree([5, 6, 7, 7, 5], [1, 1, 2, 2, 3], [-1, 0, 0, 1, 2, 4])
        verified = self.target.forward([9] + tree.token_ids,
                                       [13] + [13 + depth for depth in tree.depths],
                                       ancestor_mask(tree.parents), cache)
        for node, path in enumerate([()] + paths(tree)):
            alone = self.target.forward_causal([9, *path], cache)
            difference = np.abs(alone.logits[-1] - verified.logits[node]).max()
            self.assertLess(difference, FLOAT64_BOUND)
