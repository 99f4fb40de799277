"""Drafts replayed along recorded texts, without a model: what a round accepts is known where the draft depends on the text before it alone.

A drafter that looks its drafts up in the request's own text is replayed at any depth. Dynamic trees are replayed inside one recorded
superset (eval/supersets.py): its nodes are ordered by likelihood, and a smaller tree of the same width has the first of them. It does not give narrower trees: a node that such a tree expands may not be among the W best, and then was never expanded.

Letters: P prompts · S positions · K draft depth · W width.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.eval.intervals import conversations
from draftsmith.eval.records import KEYED_RULES, Records
from draftsmith.eval.settings import greedy, rule_of
from draftsmith.eval.totals import columns, first_turns
from draftsmith.eval.trees import Rounds
from draftsmith.inference.expand import DynamicTree, TreeSpec, parse_tree_spec
from draftsmith.inference.lookup import Ngram, Suffix

LOOKUPS = {"ngram": Ngram, "suffix": Suffix}
DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # of look-ups that a report compares
SIZES = (4, 8, 16, 32, 64)  # nodes of the dynamic trees that a report compares


def lookup_rounds(drafter: Ngram | Suffix, texts: Iterable[tuple[Sequence[int], Sequence[int]]], depth: int) -> Rounds:
    """The rounds of a look-up along the target's own texts.

    Args:
        drafter: looks drafts up in the request's own text.
        texts: of each prompt its tokens and those of the target's answer.
        depth: levels of a draft at most, K.
    """
    replayed = [drafter.replay(prompt, answer, depth) for prompt, answer in texts]
    tokens = torch.tensor([sum(committed for _, committed in rounds) for rounds in replayed], dtype=torch.float64)
    count = torch.tensor([len(rounds) for rounds in replayed], dtype=torch.float64)
    return Rounds(tokens, count, dict(Counter(nodes for rounds in replayed for nodes, _ in rounds)), depth)


def dynamic_rounds(orders: Sequence[Tensor], tree: DynamicTree) -> Rounds:
    """The rounds of a dynamic tree along the target's texts.

    Args:
        orders: [S,K,K] of each prompt, see `supersets.order_along`.
        tree: of the superset's width, no deeper and with no more nodes.
    """
    tokens, rounds = torch.zeros(2, len(orders), dtype=torch.float64)
    for row, each in enumerate(orders):
        order = each[:, : tree.depth, tree.depth - 1]  # [S,K]
        inside = (order > 0) & (order < tree.num_nodes)
        accepted = inside.long().cumprod(1).sum(1).tolist()
        position = 0
        while position < len(accepted):
            position += 1 + accepted[position]
            rounds[row] += 1
        tokens[row] = len(accepted)
    return Rounds(tokens, rounds, {tree.num_nodes: int(rounds.sum())}, tree.depth)


class Replayed(NamedTuple):
    """A tree, and its rounds on the prompts that choose and on the others."""

    tree: TreeSpec
    choosing: Rounds
    reported: Rounds


def replayed(records: Records, setting: str) -> list[Replayed]:
    """The drafts that can be replayed along the recorded answers of a setting: a look-up at several depths, or dynamic trees inside the recorded
    superset. Every second conversation chooses. None of other drafters, under rules whose answers depend on the draft, and of fewer than two
    conversations.
    """
    answers = {each.prompt: each.tokens for each in records.requests_at(setting) if each.tokens}
    conversation = conversations(answers)
    choosing = set(first_turns(list(answers))[::2])
    halves = [[prompt for prompt in answers if (conversation[prompt] in choosing) is half] for half in (True, False)]
    if not halves[1] or not records.tree or not (greedy(setting) or rule_of(setting) in KEYED_RULES):
        return []
    spec = parse_tree_spec(records.tree["tree"])
    if isinstance(spec, DynamicTree) and all((setting, prompt) in records.supersets for prompt in answers):
        tables = [[records.supersets[setting, prompt] for prompt in half] for half in halves]
        return [
            Replayed(tree, *(_by_conversation(dynamic_rounds(each, tree), half) for each, half in zip(tables, halves, strict=True)))
            for tree in dynamic_trees(spec)
        ]
    name = records.header["drafter"].get("name")
    if name not in LOOKUPS or not answers.keys() <= records.prompts.keys():
        return []
    drafter = LOOKUPS[name](spec)
    texts = [[(records.prompts[prompt].ids, answers[prompt]) for prompt in half] for half in halves]
    depths = sorted({spec.max_depth, *(depth for depth in DEPTHS if depth < spec.max_depth)})
    return [
        Replayed(
            spec.cut(depth),
            *(_by_conversation(lookup_rounds(drafter, each, depth), half) for each, half in zip(texts, halves, strict=True)),
        )
        for depth in depths
    ]


def _by_conversation(rounds: Rounds, prompts: Sequence[str]) -> Rounds:
    """Rounds by prompt -> by conversation: its turns are not independent."""
    counts = dict(zip(prompts, zip(rounds.tokens.tolist(), rounds.rounds.tolist(), strict=True), strict=True))
    tokens, count = columns([counts], prompts)
    return replace(rounds, tokens=tokens[0], rounds=count[0])


def dynamic_trees(spec: DynamicTree) -> list[DynamicTree]:
    """The trees of a width that a report compares: each depth up to the given one, with some numbers of nodes."""
    trees = {}
    for depth in range(1, spec.depth + 1):
        for nodes in sorted({*SIZES, spec.nodes}):
            tree = DynamicTree(depth, spec.width, nodes)
            if depth < nodes:
                trees.setdefault((depth, tree.num_nodes), DynamicTree(depth, spec.width, tree.num_nodes))
    return list(trees.values())
