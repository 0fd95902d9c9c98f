"""Best-first draft trees, greedy acceptance and the decoding loops.

The tree holds the tree_budget most probable prefixes under the product of the drafter's
per-slot distributions; they are popped from a heap in the order of their probability.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from dflash_ref import Drafter
from model_ref import TargetModel

NUM_DUMPED_LOG_PROBS = 8


@dataclass
class DraftTree:
    """token_ids and depths of the nodes 1..n without the root; parents with the root's -1 first.

    log_probs are the path's log-probabilities, float64, without the root. next_log_prob is that
    of the best prefix which no longer fitted into the budget (-inf if there is none).
    """

    token_ids: list[int]
    depths: list[int]
    parents: list[int]
    log_probs: list[float] = field(default_factory=list)
    next_log_prob: float = -np.inf


def sorted_candidates(log_probs: np.ndarray, num_candidates: int) -> list[tuple[int, float]]:
    """[vocab] -> the best (token_id, log_prob), descending, equal ones by the lower token id."""
    order = np.argsort(-log_probs, kind="stable")[:num_candidates]
    return [(int(token_id), float(log_probs[token_id])) for token_id in order]


def build_tree(log_probs: np.ndarray, tree_budget: int) -> DraftTree:
    """log_probs [draft_horizon, vocab] float32 -> the best-first tree of tree_budget nodes.

    A heap entry is a prefix, named by the rank of each of its tokens; equal probabilities are
    popped by the smaller rank tuple. Log-probabilities are summed in float64, and a sibling is
    computed from the parent's sum, so that a prefix has one value however it was reached.
    """
    draft_horizon, vocab_size = log_probs.shape
    num_candidates = min(tree_budget, vocab_size)
    candidates = [sorted_candidates(row, num_candidates) for row in log_probs]
    tree = DraftTree([], [], [-1])
    heap: list[tuple[float, tuple[int, ...], int, float]] = []

    def push(ranks: tuple[int, ...], parent: int, parent_log_prob: float) -> None:
        depth, rank = len(ranks), ranks[-1]
        if depth <= draft_horizon and rank < num_candidates:
            log_prob = parent_log_prob + candidates[depth - 1][rank][1]
            heapq.heappush(heap, (-log_prob, ranks, parent, parent_log_prob))

    push((0,), 0, 0.0)
    while heap and len(tree.token_ids) < tree_budget:
        negative_log_prob, ranks, parent, parent_log_prob = heapq.heappop(heap)
        depth = len(ranks)
        tree.token_ids.append(candidates[depth - 1][ranks[-1]][0])
        tree.depths.append(depth)
        tree.parents.append(parent)
        tree.log_probs.append(-negative_log_prob)
        node_index = len(tree.token_ids)
        push(ranks[:-1] + (ranks[-1] + 1,), parent, parent_log_prob)
        push(ranks + (0,), node_index, -negative_log_prob)
    if heap:
        tree.next_log_prob = -heap[0][0]
    return tree


def chain_tree(log_probs: np.ndarray) -> DraftTree:
    """The chain of each slot's best token, as a tree without branches."""
    token_ids = [sorted_candidates(row, 1)[0][0] for row in log_probs]
    num_nodes = len(token_ids)
    return DraftTree(token_ids, list(range(1, num_nodes + 1)), list(range(-1, num_nodes)))


def ancestor_mask(parents: list[int]) -> np.ndarray:
    """[n, n] bool: entry (i, j) says that node j is node i or one of its ancestors."""
    mask = np.zeros((len(parents), len(parents)), dtype=bool)
    for node_index, parent in enumerate(parents):
        if parent >= 0:
            mask[node_index] = mask[parent]
        mask[node_index, node_index] = True
    return mask


def accept_greedy(tree: DraftTree, choices: list[int]) -> tuple[list[int], int]:
    """choices[i] is the target's token after node i -> (path with the root 0, bonus_token)."""
    path = [0]
    while True:
        wanted = choices[path[-1]]
        children = [node_index for node_index in range(1, len(tree.parents))
                    if tree.parents[node_index] == path[-1]
                    and tree.token_ids[node_index - 1] == wanted]
        if not children:
            return path, wanted
        path.append(children[0])


@dataclass
class Step:
    """One draft-verify-accept step, as dumped for tests; accepted_nodes leaves out the root."""

    root: int
    draft_top_log_probs: list[list[tuple[int, float]]]
    token_ids: list[int]
    depths: list[int]
    parents: list[int]
    accepted_nodes: list[int]
    bonus_token: int


@dataclass
class Generation:
    """output_ids are cut at max_new_tokens; acceptance_lengths count the bonus and are not cut.

    margins: top-1 minus top-2 logit where each output token was chosen. last_logits [vocab]: after
    the prompt. How much rounding the result withstands: least_router_margin for the experts taken
    (plain mode only), least_accept_margin for the acceptance lengths, in log-probability.
    """

    output_ids: list[int]
    last_logits: np.ndarray
    margins: list[float]
    acceptance_lengths: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    least_router_margin: float = np.inf
    least_accept_margin: float = np.inf


def greedy_choice(logits: np.ndarray) -> tuple[int, float]:
    """[vocab] -> the best token (ties: lowest id) and its margin over the second."""
    second, first = np.partition(logits, -2)[-2:]
    return int(np.argmax(logits)), float(first - second)


def tree_accept_margin(tree: DraftTree, path: list[int], bonus_token: int,
                       log_probs: np.ndarray) -> float:
    """How far the accepted path is from losing its end, or from being one node longer.

    The deepest accepted node must stay above the first prefix outside the tree, and the prefix
    that the bonus token would have continued must stay below the last one inside.
    """
    depth = len(path) - 1
    path_log_prob = tree.log_probs[path[-1] - 1] if depth > 0 else 0.0
    margin = path_log_prob - tree.next_log_prob if depth > 0 else np.inf
    if depth < log_probs.shape[0]:
        missed = path_log_prob + float(log_probs[depth, bonus_token])
        margin = min(margin, tree.log_probs[-1] - missed)
    return margin


def chain_accept_margin(tree: DraftTree, path: list[int], bonus_token: int,
                        log_probs: np.ndarray) -> float:
    """The same for a chain: accepted tokens against the second best, then bonus against best."""
    depth = len(path) - 1
    margins = [greedy_choice(row)[1] for row in log_probs[:depth]]
    if depth < log_probs.shape[0]:
        margins.append(float(log_probs[depth].max() - log_probs[depth, bonus_token]))
    return min(margins)


def generate_plain(target: TargetModel, prompt_ids: list[int], max_new_tokens: int) -> Generation:
    """Greedy decoding, one token at a time; eos tokens do not stop it."""
    cache = target.new_cache()
    forward = target.forward_causal(prompt_ids, cache)
    cache.commit(forward.latents, list(range(len(prompt_ids))))
    result = Generation([], forward.logits[-1], [])
    while True:
        result.least_router_margin = min(result.least_router_margin,
                                         float(forward.router_margins.min()))
        token_id, margin = greedy_choice(forward.logits[-1])
        result.output_ids.append(token_id)
        result.margins.append(margin)
        if len(result.output_ids) == max_new_tokens:
            return result
        forward = target.forward_causal([token_id], cache)
        cache.commit(forward.latents, [0])


def generate(target: TargetModel, drafter: Drafter | None, prompt_ids: list[int],
             max_new_tokens: int, mode: str = "plain", tree_budget: int = 0) -> Generation:
    """Greedy decoding in the modes plain, chain and tree; all give the same output_ids.

    A step drafts after the root (the last known token, not yet run through the target), verifies
    the tree in one pass and commits the accepted path. It ends as soon as 1 + the sum of the
    acceptance lengths reaches max_new_tokens; eos tokens do not stop it.
    """
    if mode == "plain":
        return generate_plain(target, prompt_ids, max_new_tokens)
    if mode not in ("chain", "tree") or drafter is None:
        raise ValueError(f"mode {mode} is unknown or needs a drafter")
    cache, context = target.new_cache(), drafter.new_context()
    forward = target.forward_causal(prompt_ids, cache)
    cache.commit(forward.latents, list(range(len(prompt_ids))))
    context.extend(drafter.taps(forward))
    root, margin = greedy_choice(forward.logits[-1])
    result = Generation([root], forward.logits[-1], [margin])
    while len(result.output_ids) < max_new_tokens:
        log_probs = drafter.draft(root, context)
        tree = chain_tree(log_probs) if mode == "chain" else build_tree(log_probs, tree_budget)
        start = cache.committed()
        forward = target.forward([root] + tree.token_ids,
                                 [start] + [start + depth for depth in tree.depths],
                                 ancestor_mask(tree.parents), cache)
        choices, margins = zip(*(greedy_choice(row) for row in forward.logits))
        path, bonus_token = accept_greedy(tree, list(choices))
        cache.commit(forward.latents, path)
        context.extend(drafter.taps(forward)[path])
        result.output_ids += [tree.token_ids[node - 1] for node in path[1:]] + [bonus_token]
        result.margins += [margins[node] for node in path]
        result.acceptance_lengths.append(len(path))
        result.steps.append(Step(
            root, [sorted_candidates(row, NUM_DUMPED_LOG_PROBS) for row in log_probs],
            tree.token_ids, tree.depths, tree.parents, path[1:], bonus_token))
        accept_margin = chain_accept_margin if mode == "chain" else tree_accept_margin
        result.least_accept_margin = min(result.least_accept_margin,
                                         accept_margin(tree, path, bonus_token, log_probs))
        root = bonus_token
    result.output_ids = result.output_ids[:max_new_tokens]
    result.margins = result.margins[:max_new_tokens]
    return result
