"""Drafts replayed along recorded texts, without a model.

A drafter that looks its drafts up in the request's own text reads nothing else, so that replaying it is exact: at any depth, along any text of
the target.

A dynamic tree is exact too where a drafter's candidates at a depth do not depend on what was drafted before them, as with Medusa heads: the
log-probabilities of its candidates say which nodes it keeps. For drafters that read their own drafts, one recorded tree of D levels, width W
and all its candidates gives any tree of the same width, no deeper and with fewer nodes. It does not give narrower trees exactly: a node that
a narrower tree expands may not be among the W best, and then was never expanded. Position records hold the candidates along the target's
text alone, so that they give none of these for such drafters; static trees they give exactly (eval/trees.py).

Letters: S positions · K draft depth · R candidates of a depth.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from draftsmith.eval.records import Round
from draftsmith.eval.trees import Path, Rounds
from draftsmith.inference.drafts import Draft
from draftsmith.inference.expand import DynamicTree


def lookup_rounds(drafter: Any, target: Any, texts: Mapping[str, tuple[Sequence[int], Sequence[int]]], depth: int) -> Rounds:
    """The rounds of a look-up along the target's own texts, one request after the other.

    A memory of finished answers makes it inexact by little: decoding remembers in the order in which requests end, and with what the last
    round committed past the end.

    Args:
        drafter: an `Ngram` or a `Suffix`, which is left without slots.
        target: the drafter is bound to it.
        texts: by prompt, the tokens of the prompt and of the target's answer.
        depth: levels of a draft at most, K.
    """
    tokens, rounds = torch.zeros(2, len(texts), dtype=torch.float64)
    sizes: Counter[int] = Counter()
    drafter.bind(target, 1, max(len(prompt) + len(text) for prompt, text in texts.values()))
    for row, (prompt, text) in enumerate(texts.values()):
        drafter.start([0], [list(prompt)], None)
        for each in _rounds_along(drafter, len(prompt), list(text), depth):
            tokens[row] += each.committed
            rounds[row] += 1
            sizes[each.nodes] += 1
        drafter.drop([0])
    return Rounds(tokens, rounds, dict(sizes), depth)


def _rounds_along(drafter: Any, start: int, text: list[int], depth: int) -> Iterator[Round]:
    done = 0
    while done < len(text):
        draft = drafter.draft(0, depth)
        committed = min(1 + _accepted(draft, text[done:]), len(text) - done)
        yield Round(start - 1 + done, 1 + len(draft.tokens), committed)
        drafter.extend(0, text[done : done + committed])
        done += committed


def _accepted(draft: Draft, text: Sequence[int]) -> int:
    """How many tokens of the text the draft's tree holds."""
    child = {(parent, token): node for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True), 1)}
    node = 0
    for number, token in enumerate(text):
        if (node, token) not in child:
            return number
        node = child[node, token]
    return len(text)


def dynamic_paths(log_probs: Tensor, tree: DynamicTree) -> set[Path]:
    """The rank paths of a dynamic tree whose candidates depend on depth alone.

    Args:
        log_probs: [K,R] float32, of the R ≥ width best candidates of each depth, best first.
        tree: depth ≤ K.
    """
    width = tree.width
    stored: list[tuple[float, Path]] = []
    level: list[tuple[float, Path]] = [(0.0, ())]
    for depth in range(tree.depth):
        chances = log_probs[depth].float().clamp(max=0.0)
        parents = torch.tensor([score for score, _ in level])
        scores = (parents[:, None] + chances[:width]).flatten().tolist()  # rounded as `DynamicExpansion` rounds them
        children = [(*path, rank) for (_, path), rank in itertools.product(level, range(min(width, len(chances))))]
        candidates = list(zip(scores, children, strict=True))
        stored += candidates
        level = sorted(candidates, key=lambda candidate: -candidate[0])[:width]  # of equal scores the earlier, as everywhere
    best = sorted(stored, key=lambda candidate: -candidate[0])[: tree.nodes - 1]
    return {path for _, path in best}


def dynamic_rounds(ranks: Sequence[Tensor], log_probs: Sequence[Tensor], tree: DynamicTree) -> Rounds:
    """The rounds of a dynamic tree along the target's texts, one prompt each, for a drafter whose candidates depend on depth alone.

    Args:
        ranks: [S,K] of each text, as in a position record.
        log_probs: [S,K,R] of each text, of the best candidates at each position and depth.
        tree: depth ≤ K, width ≤ R.
    """
    tokens, rounds = torch.zeros(2, len(ranks), dtype=torch.float64)
    for row, (own, chances) in enumerate(zip(ranks, log_probs, strict=True)):
        at, targets = 0, own.tolist()
        while at < len(targets):
            paths = dynamic_paths(chances[at], tree)
            path, accepted = targets[at][: tree.depth], 0
            while accepted < len(path) and tuple(path[: accepted + 1]) in paths:
                accepted += 1
            rounds[row] += 1
            at += 1 + accepted
        tokens[row] = len(targets)
    return Rounds(tokens, rounds, {tree.num_nodes: int(rounds.sum())}, tree.depth)
