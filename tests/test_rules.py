"""The verification rules: exact laws by enumeration, a textbook walk in fractions, keyed noise by chi-square, planted faults.

Every check returns a number: 1 or 0 where it is exact, a p-value where it is not. Above GREEN it holds, below RED it is broken.
"""

import functools
import itertools
import math
import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from draftsmith.inference import expand, rules, sampler, verify
from draftsmith.inference.drafter import RoundContext
from draftsmith.inference.sampler import RULES, Sampling, gumbel, sample, uniform, warp
from draftsmith.inference.tree import DraftTree, StaticTree

GREEN, RED = 1e-4, 1e-6
KINDS = ("random", "equal", "orthogonal", "one-hot", "narrow", "mixed")
# Parents and size: chains of 1, 2, 3; widths 2 and 3; two and three levels; a root of 3 children one of which has 2; padding.
SHAPES = [
    ([-1, 0], 2),
    ([-1, 0, 1], 3),
    ([-1, 0, 1, 2], 4),
    ([-1, 0, 0], 3),
    ([-1, 0, 0, 0], 4),
    ([-1, 0, 0, 1, 1], 5),
    ([-1, 0, 1, 0, 3], 5),
    ([-1, 0, 0, 0, 2, 2], 6),
    ([-1, 0, 1, 0, 1, 2], 6),
    ([-1, 0, 1, -1, 0], 3),
]


def weights(rng: random.Random, vocab: int) -> list[int]:
    """A law as whole numbers, zeros among them."""
    law = [rng.choice((0, 1, 2, 3, 5, 8)) for _ in range(vocab)]
    law[rng.randrange(vocab)] += 1
    return law


def pair(rng: random.Random, vocab: int, kind: str) -> tuple[list[int], list[int]]:
    """Laws of the target and of the drafter."""
    kind = rng.choice(KINDS[:-1]) if kind == "mixed" else kind
    p, q = weights(rng, vocab), weights(rng, vocab)
    if kind == "equal":
        q = list(p)
    elif kind == "orthogonal":
        mine = rng.sample(range(vocab), rng.randint(1, vocab - 1))
        p = [rng.randint(1, 5) if x in mine else 0 for x in range(vocab)]
        q = [0 if x in mine else rng.randint(1, 5) for x in range(vocab)]
    elif kind in ("one-hot", "narrow"):
        few = rng.sample(range(vocab), 1 if kind == "one-hot" else 2)
        q = [rng.randint(1, 5) if x in few else 0 for x in range(vocab)]
    return p, q


def normal(rows: list[list[int]]) -> Tensor:
    law = torch.tensor(rows, dtype=torch.float64)
    return law / law.sum(-1, keepdim=True)


def built(tokens: Tensor, parents: list[int], size: int, replacement: bool) -> DraftTree:
    rows = len(tokens)
    tree = DraftTree.build(tokens, torch.tensor(parents).expand(rows, -1), torch.full((rows,), size))
    tree.replacement = replacement
    return tree


def drawn(tokens: Tensor, parents: list[int], size: int, q: Tensor, replacement: bool) -> tuple[Tensor, Tensor]:
    """tokens [T,N], q [T,N,V] -> the probability [T] that these children are drawn, by successive renormalised draws where they are
    without replacement, and [T,N] who was drawn when nothing was left: any token, each as likely."""
    left, nothing = q.clone(), torch.zeros_like(tokens, dtype=torch.bool)
    chance = torch.full_like(q[:, 0, 0], q.shape[-1] ** (size - tokens.shape[1]))  # padding is any token
    for i in range(1, size):
        x, total = tokens[:, i : i + 1], left[:, parents[i]].sum(-1)
        nothing[:, i] = total == 0
        chance = chance * torch.where(total > 0, left[:, parents[i]].gather(1, x)[:, 0] / total, 1 / q.shape[-1])
        if not replacement:
            left[:, parents[i]] = left[:, parents[i]].scatter(1, x, 0.0)
    return chance, nothing


def enumerated(parents: list[int], size: int, vocab: int, kind: str, replacement: bool, copy: int, seen: Counter) -> float:
    """All drawn trees, all outcomes of the coins, all final tokens, through the real walk and judge -> the largest error of the joint
    law of the first K+1 tokens, those that a round leaves open being the target's own."""
    rng, nodes = random.Random(f"{parents} {vocab} {kind} {copy}"), len(parents)
    tokens = torch.tensor([[0, *x] for x in itertools.product(range(vocab), repeat=nodes - 1)])
    depth, code = [0] * nodes, torch.zeros_like(tokens)  # code: the tokens after the root, read as a number
    for i in range(1, size):
        depth[i], code[:, i] = depth[parents[i]] + 1, code[:, parents[i]] * vocab + tokens[:, i]
    deepest = max(depth)
    pairs = [[pair(rng, vocab, kind) for _ in range(vocab**d)] for d in range(deepest + 1)]
    target, drafter = ([normal([one[side] for one in level]) for level in pairs] for side in (0, 1))
    p, q = (torch.stack([table[depth[i]][code[:, i]] for i in range(nodes)], 1) for table in (target, drafter))
    weight, nothing = drawn(tokens, parents, size, q, replacement)
    some = weight > 0
    tokens, p, q, weight, nothing = tokens[some], p[some], q[some], weight[some], nothing[some]
    chance, rest = rules.acceptance_probability(built(tokens, parents, size, replacement), p, q)
    seen["trees"] += len(tokens)
    seen["drawn from nothing"] += int(nothing.sum())
    if not (0 <= chance.min() and chance.max() <= 1) or chance[nothing].any():  # NaN fails too
        return math.inf
    for a in {parents[i] for i in range(1, size)}:  # children drawn from nothing leave p as it is
        mine = [i for i in range(1, size) if parents[i] == a]
        lone = nothing[:, mine[1:]].all(1) & (len(mine) > 1)
        residual = (p - q)[lone, a].clamp(min=0)
        total = residual.sum(-1, keepdim=True)
        if lone.any() and (torch.where(total > 0, residual / total, p[lone, a]) - rest[lone, a]).abs().max() > 1e-12:
            return math.inf
    accepted = torch.tensor([[0, *bits] for bits in itertools.product((0, 1), repeat=nodes - 1)]).bool()  # [C,N]
    coin = torch.where(torch.arange(nodes) < size, chance, 0.5)[:, None]
    weight = weight[:, None] * torch.where(accepted, coin, 1 - coin)[:, :, 1:].prod(-1)  # [T,C]
    row, outcome = (weight > 0).nonzero(as_tuple=True)
    weight, tokens, rest, accepted = weight[row, outcome], tokens[row], rest[row], accepted[outcome]
    # Every node emits each token in one of V rows, and no two nodes the same in all: reading the wrong one is seen.
    shift = torch.randint(vocab, (len(row), 1, nodes), generator=torch.Generator().manual_seed(len(row)))
    final = (torch.arange(vocab)[:, None] + shift) % vocab  # [R,V,N]
    many = [tensor.repeat_interleave(vocab, 0) for tensor in (tokens, accepted, weight, rest)]
    (tokens, accepted, weight, rest), final = many, final.flatten(0, 1)
    tree = built(tokens, parents, size, replacement)
    verdict = verify.judge(tree, accepted, final)
    last = verdict.path.gather(1, verdict.length[:, None] - 1)
    weight = weight * rest.gather(1, last[:, :, None].expand(-1, -1, vocab))[:, 0].gather(1, final.gather(1, last))[:, 0]
    text = torch.zeros_like(verdict.length)
    for j in range(1, deepest + 1):
        text = torch.where(j < verdict.length, text * vocab + tokens.gather(1, verdict.path[:, j : j + 1].clamp(min=0))[:, 0], text)
    text = text * vocab + verdict.next_token
    joint, truth = weight.new_zeros(1), weight.new_ones(1)
    for length in range(1, deepest + 2):
        here = verdict.length == length
        joint = (joint[:, None] * target[length - 1]).flatten().index_add(0, text[here], weight[here])
        truth = (truth[:, None] * target[length - 1]).flatten()
        seen[f"length {length}"] += int((weight[here] > 0).sum())
    seen["rows"] += len(weight)
    seen["laws"] += 1
    return float((joint - truth).abs().max())


def exact(shapes=SHAPES, vocabs=(2, 3), kinds=KINDS, copies: int = 3, seen: Counter | None = None) -> float:
    seen = Counter() if seen is None else seen
    for (parents, size), vocab, kind, replacement, copy in itertools.product(shapes, vocabs, kinds, (False, True), range(copies)):
        if not enumerated(parents, size, vocab, kind, replacement, copy, seen) < 1e-12:
            return 0.0
    return 1.0


def test_joint_law_by_enumeration():
    seen = Counter()
    assert exact(seen=seen) and exact(vocabs=(4,), copies=2, seen=seen)
    assert seen["laws"] == len(SHAPES) * 12 * (2 * 3 + 2)
    assert seen["trees"] > 20_000 and seen["rows"] > 200_000 and seen["drawn from nothing"] > 2000
    assert all(seen[f"length {length}"] > 10_000 for length in (1, 2, 3, 4))


def random_tree(rng: random.Random, nodes: int, vocab: int) -> tuple[list[int], list[int], int]:
    """Few tokens, so that siblings are often equal; padding that would count if it were read."""
    size = rng.choice((0, 1, nodes, nodes, nodes, rng.randint(0, nodes)))
    parents = [-1] + [rng.randint(max(0, i - 3), i - 1) if i < size else rng.choice((-1, 0, i - 1)) for i in range(1, nodes)]
    return [rng.randrange(vocab) for _ in range(nodes)], parents, size


def padded(trees: list[tuple[list[int], list[int], int]], static: bool) -> DraftTree:
    """One batch of them; static: a tree made whole and cut short by its size alone, so that padding lies as deep as it was."""
    tokens, parents, size = (torch.tensor(list(column)) for column in zip(*trees, strict=True))
    tree = DraftTree.build(tokens, parents, torch.full_like(size, tokens.shape[1]) if static else size)
    tree.size = size
    return tree


def textbook(tokens, parents, size, p, q, coins, replacement):
    """SpecInfer's walk, a coin for each child visited, in exact fractions: (path, {visited child: chance}, law of the final token)."""
    path, chances = [0], {}
    while True:
        node = path[-1]
        law, draft = list(p[node]), list(q[node])
        for child in (i for i in range(1, size) if parents[i] == node):
            x = tokens[child]
            chances[child] = min(Fraction(1), law[x] / draft[x]) if draft[x] else Fraction(0)
            if coins[child] < chances[child]:
                path.append(child)
                break
            if draft[x]:  # else it was not drawn from q, and its refusal says nothing
                rest = [max(a - b, Fraction(0)) for a, b in zip(law, draft, strict=True)]
                law = [a / sum(rest) for a in rest]
                if not replacement:
                    draft[x] = Fraction(0)
                    draft = [b / sum(draft) for b in draft] if sum(draft) else draft
        else:
            return path, chances, law


def by_the_book(count: int = 400, seen: Counter | None = None) -> float:
    """chance and rest wherever the textbook's walk comes, and its path."""
    rng, seen, worst = random.Random(5), Counter() if seen is None else seen, 0.0
    for nodes, vocab, replacement in itertools.product((2, 4, 7, 12), (2, 4, 6), (False, True)):
        trees = [random_tree(rng, nodes, vocab) for _ in range(count)]
        pairs = [[pair(rng, vocab, "mixed") for _ in range(nodes)] for _ in range(count)]
        coins = [[Fraction(rng.randrange(1, 1009), 1009) for _ in range(nodes)] for _ in range(count)]
        tree = padded(trees, static=vocab == 4)
        tree.replacement = replacement
        if vocab == 4:  # as static trees know it; else it is N − 1
            tree.width = max(max(Counter(parents[1:size]).values(), default=0) for _, parents, size in trees)
        p, q = (torch.stack([normal([one[side] for one in row]) for row in pairs]) for side in (0, 1))
        chance, rest = rules.acceptance_probability(tree, p, q)
        path, length = verify.walk(tree, torch.tensor([[float(coin) for coin in row] for row in coins]) < chance)
        for b in range(count):
            if not trees[b][2]:
                seen["idle"] += 1
                worst = max(worst, float(length[b]))
                continue
            laws = [[[Fraction(w, sum(one[side])) for w in one[side]] for one in pairs[b]] for side in (0, 1)]
            walked, chances, law = textbook(*trees[b], *laws, coins[b], replacement)
            if path[b].tolist() != walked + [-1] * (nodes - len(walked)):
                return 0.0
            errors = [abs(float(value) - float(chance[b, child])) for child, value in chances.items()]
            errors += [abs(float(value) - other) for value, other in zip(law, rest[b, walked[-1]].tolist(), strict=True)]
            worst = max(worst, math.inf if any(error != error for error in errors) else max(errors))
            siblings = [child for child in chances if child not in walked and trees[b][1][child] in [trees[b][1][i] for i in walked[1:]]]
            seen["children visited"] += len(chances)
            seen["accepted after a refusal"] += bool(siblings)
            seen["trees"] += 1
            seen["padded"] += trees[b][2] < nodes
            seen["deep"] += len(walked) > 3
    return float(worst < 1e-12)


def test_against_the_textbook():
    seen = Counter()
    assert by_the_book(seen=seen)
    assert seen["trees"] > 7000 and seen["children visited"] > 10_000 and seen["idle"] > 1000 and seen["padded"] > 2000
    assert seen["accepted after a refusal"] > 250 and seen["deep"] > 150


def test_chains_are_speculative_sampling():
    """Leviathan et al. 2023, Chen et al. 2023: min(1, p/q), then norm(max(p − q, 0)), at every node of a chain, with or without
    replacement; and what is accepted sums to Σ min(p, q)."""
    rng, vocab, depth = random.Random(2), 5, 3
    accepts = 0
    for kind, replacement, _ in itertools.product(KINDS, (False, True), range(10)):
        tokens = torch.tensor([[0, *x] for x in itertools.product(range(vocab), repeat=depth)])
        tree = built(tokens, [-1, 0, 1, 2], depth + 1, replacement)
        pairs = [pair(rng, vocab, kind) for _ in range(depth + 1)]
        p, q = (normal([one[side] for one in pairs]) for side in (0, 1))
        chance, rest = rules.acceptance_probability(tree, p.expand(len(tokens), -1, -1), q.expand(len(tokens), -1, -1))
        for i in range(depth):
            for x in range(vocab):
                mine = tokens[:, i + 1] == x
                assert mine.sum() == vocab ** (depth - 1)
                expected = min(1.0, float(p[i, x] / q[i, x])) if q[i, x] else 0.0
                assert (chance[mine, i + 1] - expected).abs().max() < 1e-12
                left = (p[i] - q[i]).clamp(min=0)
                if expected < 1 and q[i, x]:
                    assert (rest[mine, i] - left / left.sum()).abs().max() < 1e-12
            first = torch.stack([chance[tokens[:, i + 1] == x, i + 1][0] for x in range(vocab)])
            accept = float((q[i] * first).sum())
            assert abs(accept - float(torch.minimum(p[i], q[i]).sum())) < 1e-12
            accepts += 0 < accept < 1
        assert torch.equal(rest[:, depth], p[depth].expand(len(tokens), -1)), "the bonus is the target's"
    assert accepts > 100


def test_acceptance_as_predicted():
    """One draw: Σ p over the set of children, by enumeration. Rejection: more draws never accept less, and the whole vocabulary
    without replacement accepts always."""
    rng, vocab, between = random.Random(3), 4, 0
    for _ in range(50):
        p, q = weights(rng, vocab), [rng.randint(1, 5) for _ in range(vocab)]
        target, draft = normal([p])[0], normal([q])[0]
        children = [rng.randrange(vocab) for _ in range(3)]  # twins among them
        tree = built(torch.tensor([[0, *children]] * vocab), [-1, 0, 0, 0], 4, False)
        y = torch.arange(vocab)[:, None].expand(-1, 4)
        verdict = verify.judge(tree, rules.match(tree, y), y)
        assert abs(float(target[verdict.length == 2].sum()) - float(target[sorted(set(children))].sum())) < 1e-12
        previous = 0.0
        for count in range(1, vocab + 1):
            tokens = torch.tensor([[0, *x] for x in itertools.permutations(range(vocab), count)])
            parents, laws = [-1] + [0] * count, [law.expand(len(tokens), count + 1, -1) for law in (target, draft)]
            chance, _ = rules.acceptance_probability(built(tokens, parents, count + 1, False), *laws)
            refused = (drawn(tokens, parents, count + 1, laws[1], False)[0] * (1 - chance[:, 1:]).prod(1)).sum()
            assert 1 - refused > previous - 1e-12
            previous = float(1 - refused)
            between += previous < 1
        assert abs(previous - 1) < 1e-12
    assert between > 80


# Keyed noise. The target's law of a token depends on its index and on the token before it; V tokens, the drafter's D of them.
V, D, FIRST, COUNT = 5, 3, 7, 40_000
# Far apart, with a token on which they nearly agree, so that the second child of a node is neither sure nor hopeless.
_laws = torch.tensor([[0.35, 0.05, 0.40, 0.15, 0.05], [0.30, 0.50, 0.05, 0.10, 0.05]]).log()
_laws = torch.stack([torch.stack([_laws.roll(2 * k + x, -1) for x in range(V)], 1) for k in range(3)], 1)
TARGET, DRAFTER = _laws + 0.2 * torch.randn(_laws.shape, generator=torch.Generator().manual_seed(0))  # [3,V,V] by index % 3, token
BUSHY = StaticTree.from_paths([(0,), (1,), (2,), (0, 0), (1, 0), (1, 1)])
WIDE = StaticTree.from_paths([(0,), (1,), (2,), (3,), (0, 0), (0, 1)])
SETTINGS = {
    "rejection": (Sampling(1.0, seed=1, rule="rejection"), BUSHY, V),
    "replacement": (Sampling(1.0, seed=2, rule="rejection-replacement"), BUSHY, V),
    "chain": (Sampling(0.9, seed=3, rule="rejection"), StaticTree.chain(2), V),
    "cut laws": (Sampling(0.8, top_k=3, seed=4, rule="rejection"), WIDE, V),  # four children of a law on three tokens
    "cut, replacement": (Sampling(1.3, top_k=3, seed=5, rule="rejection-replacement"), BUSHY, V),
    "draft vocabulary": (Sampling(1.0, seed=6, rule="rejection"), BUSHY, D),
    "one draw": (Sampling(1.0, seed=7, rule="target-sample"), BUSHY, V),
    "shared-noise": (Sampling(0.7, top_k=4, seed=8, rule="shared-noise"), BUSHY, V),
}


def rounds(how: Sampling, shape: StaticTree, vocab: int = V, count: int = COUNT, tokens: int = 3, root: Tensor | None = None):
    """Rounds of drafting and verifying with keyed noise until every request has its tokens: (them [count,tokens], the first lengths)."""
    start = torch.zeros(count, dtype=torch.int64) if root is None else root
    out, lengths = torch.cat((start[:, None], start.new_zeros(count, tokens + shape.max_depth)), 1), None  # the root, then what follows
    done, busy = torch.zeros_like(start), torch.arange(count)
    while len(busy):
        round = RoundContext([], busy, out[busy, done[busy]], FIRST + done[busy], busy, how, shape.max_depth)
        expansion, before, depth = expand.StaticExpansion(shape, round), round.last_tokens[:, None], 0
        while True:
            index = (round.positions[:, None] + depth + 1).expand_as(before)
            level = expansion.add_level(
                *expand.choose(DRAFTER[index % 3, before][..., :vocab], expansion.count, round, index, expansion.scored)
            )
            if level is None:
                break
            before, depth = level.tokens, level.depth
        tree, _ = expansion.finish()
        logits = TARGET[(round.positions[:, None] + tree.depth + 1) % 3, tree.tokens]
        verdict = verify.verify(tree, logits, how, round.noise_keys, round.positions, shape.max_depth)
        for j in range(1, shape.max_depth + 2):
            some = j <= verdict.length
            node = verdict.path[:, min(j, shape.max_depth)].clamp(min=0)
            token = torch.where(j < verdict.length, tree.tokens.gather(1, node[:, None])[:, 0], verdict.next_token)
            out[busy[some], done[busy[some]] + j] = token[some]
        done[busy] += verdict.length
        lengths = verdict.length if lengths is None else lengths
        busy = (done < tokens).nonzero()[:, 0]
    return out[:, 1 : tokens + 1], lengths


def p_value(found: Tensor, law: Tensor) -> float:
    """Pearson's test of cells found [count] against law [cells]; rare cells go together. What cannot be has p-value 0."""
    counts, expected = torch.bincount(found, minlength=len(law)).double(), law.double() * len(found)
    if counts[expected == 0].sum() > 0:
        return 0.0
    cells, rare = [], (0.0, 0.0)
    for cell in sorted(zip(expected.tolist(), counts.tolist(), strict=True)):
        rare = (rare[0] + cell[0], rare[1] + cell[1])
        if rare[0] >= 10:
            cells, rare = [*cells, rare], (0.0, 0.0)
    assert len(cells) >= 2 and len(found) > 1000
    cells[-1] = (cells[-1][0] + rare[0], cells[-1][1] + rare[1])
    statistic = sum((count - mean) ** 2 / mean for mean, count in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def test_p_value():
    """Two cells: a normal deviate squared; a cell of no probability; rare cells, which go together."""
    cells = torch.tensor([0] * 1060 + [1] * 940)
    assert p_value(cells, torch.tensor([0.5, 0.5]).double()) == pytest.approx(math.erfc(3.6**0.5))
    assert p_value(cells, torch.tensor([0.5, 0.45, 0.05]).double()) < RED and p_value(cells, torch.tensor([1.0, 0.0])) == 0
    found = torch.tensor([0] * 1060 + [1] * 920 + [3] * 20)
    assert p_value(found, torch.tensor([0.53, 0.46, 0.009, 0.001]).double()) == pytest.approx(1.0), "the last two are one cell of 20"


def law_of(how: Sampling) -> list[Tensor]:
    """The target's joint laws of the first, two and three tokens after a 0 at index FIRST."""
    steps = [warp(TARGET[(FIRST + k) % 3], how).double().softmax(-1) for k in (1, 2, 3)]
    joint = [steps[0][0]]
    for step in steps[1:]:
        joint.append((joint[-1].view(-1, V, 1) * step).flatten())
    return joint


def sampled(name: str, values: dict | None = None) -> float:
    """The least p-value of the joint laws of one, two and three tokens."""
    how, shape, vocab = SETTINGS[name]
    tokens, lengths = rounds(how, shape, vocab)
    assert lengths.unique().tolist() == list(range(1, shape.max_depth + 2))
    code, found = torch.zeros(len(tokens), dtype=torch.int64), []
    for k, law in enumerate(law_of(how)):
        code = code * V + tokens[:, k]
        found.append(p_value(code, law))
    if values is not None:
        values[name] = found
    return min(found)


def test_law_of_keyed_rounds():
    """Several rounds per request, so that noise used twice would be seen as well."""
    values: dict[str, list[float]] = {}
    assert all(sampled(name, values) > GREEN for name in SETTINGS), values
    assert len(values) == 8 and all(len(found) == 3 for found in values.values())


def children(kind: str, values: list[float] | None = None) -> float:
    """Drawn children are Plackett-Luce, replaced ones independent, and neighbouring indices are independent of each other."""
    how = Sampling(0.8, seed=len(kind), rule="rejection" if kind == "drawn" else "rejection-replacement")
    logits = DRAFTER[0, :2].expand(COUNT, 2, V)
    index = torch.tensor([4, 5]).expand(COUNT, 2)
    request = torch.arange(COUNT)
    round = RoundContext([], request, request * 0, request * 0 + 3, request, how, 1)
    ids, _, law = expand.choose(logits, 3, round, index, False)
    assert ids.shape == (COUNT, 2, 3) and law is not None
    q = (logits[0].double() / 0.8).softmax(-1)
    assert (law[0].double().softmax(-1) - q).abs().max() < 1e-6
    triples = torch.tensor([[0, *x] for x in itertools.product(range(V), repeat=3)])
    expected = [drawn(triples, [-1, 0, 0, 0], 4, one.expand(len(triples), 4, -1), kind == "replaced")[0] for one in q]
    found = [p_value(ids[:, k] @ torch.tensor([V * V, V, 1]), expected[k]) for k in range(2)]
    found.append(p_value(ids[:, 0, 0] * V + ids[:, 1, 0], (q[0, :, None] * q[1]).flatten()))
    if values is not None:
        values += found
    return min(found)


def test_law_of_children():
    values: list[float] = []
    assert children("drawn", values) > GREEN and children("replaced", values) > GREEN, values
    assert len(values) == 6


def test_children_that_only_the_best_are():
    """Children of the other rules: the best, of the law or with the target's noise; without a law to report."""
    request = torch.arange(9)
    round = RoundContext([], request, request * 0, request, request, Sampling(0.8, seed=1, rule="shared-noise"), 1)
    logits, index = DRAFTER[0, :1].expand(9, 1, V), torch.arange(9)[:, None] + 1
    ids, _, law = expand.choose(logits, 2, round, index, False)
    assert law is None and torch.equal(ids[:, :, 0], sample(logits, round.sampling, round.noise_keys[:, None], index))
    assert len(ids.unique(dim=0)) > 3
    for how in (Sampling(0.8, rule="target-sample"), Sampling(), Sampling(rule="rejection"), Sampling(0.8, rule="typical")):
        ids, scores, law = expand.choose(logits, 2, replace(round, sampling=how), index, True)
        assert law is None and torch.equal(ids, logits.topk(2).indices) and torch.equal(scores, logits.log_softmax(-1).gather(-1, ids))


def plain(how: Sampling, count: int, tokens: int) -> Tensor:
    last, request, out = torch.zeros(count, dtype=torch.int64), torch.arange(count), []
    for k in range(1, tokens + 1):
        last = sample(TARGET[(FIRST + k) % 3, last], how, request, torch.full_like(last, FIRST + k))
        out.append(last)
    return torch.stack(out, 1)


def same_as_plain() -> float:
    """One draw, coupled or not, and every rule at temperature 0: the tokens of plain sampling, whatever was drafted."""
    same = []
    for how in (*(SETTINGS[name][0] for name in ("one draw", "shared-noise")), *(Sampling(rule=rule, top_k=2) for rule in RULES)):
        tokens, lengths = rounds(how, BUSHY, count=2000, tokens=4)
        same.append(torch.equal(tokens, plain(how, 2000, 4)))
        assert how.greedy or lengths.unique().tolist() == [1, 2, 3]
    return float(len(same) == 8 and all(same))


def test_tokens_of_plain_sampling():
    assert same_as_plain()
    request = torch.arange(300)
    tree, logits = StaticTree.chain(1).tree(request % V, (request % 3)[:, None, None]), TARGET[0, :2].expand(300, 2, V)
    one, other = (verify.verify(tree, logits, Sampling(1.0, rule=rule), request, request) for rule in ("target-sample", "rejection"))
    assert torch.equal(one.path, other.path) and torch.equal(one.next_token, other.next_token), "where nothing was drawn from a law"
    assert one.length.unique().tolist() == [1, 2]
    root = DraftTree.root(request % V)
    root.q_logits = logits[:, :1]
    alone = verify.verify(root, logits[:, :1], Sampling(1.0, rule="rejection"), request, request)
    assert torch.equal(alone.next_token, sample(logits[:, 0], Sampling(1.0), request, request + 1)), "where there are no children"


def test_acceptance_of_keyed_rules():
    """A chain of one, for each of five laws: rejection accepts 1 − TV, coupled noise Σ 1/Σ max(p_y/p_x, q_y/q_x), which is at least
    (1 − TV)/(1 + TV) (Daliri et al. 2024), one draw p of the drafter's best. 8000 requests each: 4.5 standard deviations, 20 trials."""
    per = COUNT // V
    root = torch.arange(V).repeat_interleave(per)
    p, q = (table[(FIRST + 1) % 3].double().softmax(-1) for table in (TARGET, DRAFTER))
    distance = 1 - torch.minimum(p, q).sum(-1)
    both = torch.maximum(p[:, None] / p[:, :, None], q[:, None] / q[:, :, None]).sum(-1)  # [law, x]
    expected = {
        "rejection": 1 - distance,
        "rejection-replacement": 1 - distance,
        "shared-noise": (1 / both).sum(-1),
        "target-sample": p.gather(1, q.argmax(-1, keepdim=True))[:, 0],
    }
    assert (expected["shared-noise"] > (1 - distance) / (1 + distance)).all() and (expected["shared-noise"] < 1 - distance).all()
    for rule, chance in expected.items():
        _, lengths = rounds(Sampling(1.0, seed=9, rule=rule), StaticTree.chain(1), tokens=1, root=root)
        rate = (lengths == 2).double().view(V, per).mean(1)
        error = (rate - chance).abs() / (chance * (1 - chance) / per).sqrt()
        assert error.max() < 4.5, rule
        assert rule != "shared-noise" or (rate > (1 - distance) / (1 + distance) - 4.5 * (0.25 / per) ** 0.5).all()


LOSSY = [
    Sampling(0.8, seed=1, rule="typical"),
    Sampling(1.0, top_k=3, seed=2, rule="typical", epsilon=0.15, delta=0.6),
    Sampling(1.0, seed=3, rule="membership", top_k=2),
    Sampling(0.7, seed=4, rule="membership", top_p=0.7),
    Sampling(1.3, seed=5, rule="membership", top_k=4, top_p=0.9, min_p=0.2),
]


def kept_by(law: list[float], how: Sampling, seen: Counter) -> set[int]:
    """The tokens that a lossy rule accepts after logits `law`, in plain words."""
    weight = [math.exp(x / how.temperature) for x in law]
    if how.rule == "typical":
        p = [w / sum(weight) for w in weight]
        threshold = how.delta * math.exp(sum(x * math.log(x) for x in p))
        seen["epsilon" if threshold > how.epsilon else "delta"] += 1
        return {x for x, chance in enumerate(p) if chance > min(how.epsilon, threshold)}
    best = sorted(range(len(law)), key=lambda x: -law[x])[: how.top_k or None]
    total, before, kept = sum(weight[x] for x in best), 0.0, []
    for x in best:  # the fewest that reach top_p
        if before < how.top_p * total:
            kept.append(x)
        before += weight[x]
    return {x for x in kept if weight[x] >= how.min_p * weight[best[0]]}


def in_words(tokens: list[int], parents: list[int], size: int, accepts: list[set[int]], seen: Counter) -> list[int]:
    """The longest path of accepted tokens, the first of equals."""
    paths: dict[int, list[int]] = {0: [0]} if size else {}
    for i in range(1, size):
        if parents[i] in paths and tokens[i] in accepts[parents[i]]:
            paths[i] = [*paths[parents[i]], i]
    best = max(paths.values(), key=len, default=[])
    seen["equals"] += sum(len(path) == len(best) for path in paths.values()) > 1
    seen["past an accepted sibling"] += any(j in paths and parents[j] == parents[i] for i in best for j in range(1, i))
    twins = Counter((parents[i], tokens[i]) for i in paths)
    seen["accepted twins"] += max(twins.values(), default=0) > 1
    return best


def lossy(seen: Counter | None = None) -> float:
    rng, seen, rows, nodes, vocab = random.Random(7), Counter() if seen is None else seen, 150, 11, 5
    for case, how in enumerate(LOSSY):
        trees = [random_tree(rng, nodes, vocab) for _ in range(rows)]
        tree = padded(trees, static=case % 2 == 0)
        logits = 1.5 * torch.randn(rows, nodes, vocab, generator=torch.Generator().manual_seed(case))
        request, position = torch.arange(rows), torch.arange(rows) % 7
        verdict = verify.verify(tree, logits, how, request, position)
        for b, law in enumerate(logits.tolist()):
            path = in_words(*trees[b], [kept_by(one, how, seen) for one in law], seen)
            if verdict.path[b].tolist() != path + [-1] * (nodes - len(path)) or verdict.length[b] != len(path):
                return 0.0
            if path and verdict.next_token[b] != sample(logits[b, path[-1]], how, request[b], position[b] + len(path)):
                return 0.0
            seen[f"length {len(path)}"] += 1
            seen["padded"] += 0 < trees[b][2] < nodes
    return 1.0


def test_lossy_rules_in_words():
    seen = Counter()
    assert lossy(seen)
    for name in ("length 0", "length 1", "length 2", "length 4", "equals", "past an accepted sibling", "accepted twins", "padded"):
        assert seen[name] > 20, (name, seen)
    assert seen["epsilon"] > 500 and seen["delta"] > 500


def test_who_is_lossless():
    limits = {"top_k": 3}
    assert {rule: Sampling(1.0, rule=rule, **limits).lossless for rule in RULES} == {
        "target-sample": True,
        "shared-noise": True,
        "rejection": True,
        "rejection-replacement": True,
        "typical": False,
        "membership": False,
    }
    assert all(Sampling(0.0, rule=rule, **limits).lossless and Sampling(rule=rule, **limits).children == "top" for rule in RULES)
    with pytest.raises(ValueError, match="rule membership without top_k, top_p or min_p"):
        Sampling(1.0, rule="membership")
    with pytest.raises(ValueError, match="rule greedy; expected one of shared-noise, target-sample"):
        Sampling(rule="greedy")


def plainly(fault: str = ""):
    """`rules.acceptance_probability` node after node, with one thing done wrong. Index −1 reads the last row, as advanced indexing does."""

    def odds(tree: DraftTree, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        rows, first, real, p, q = torch.arange(len(p)), p, tree.size, p.clone(), q.clone()
        chance, nodes = torch.zeros_like(p[:, :, 0]), range(1, tree.tokens.shape[1])
        if fault == "siblings in reverse":
            nodes = reversed(nodes)
        if fault == "the root is a child of the last row":
            nodes = [0, *nodes]
        for i in nodes:
            x, parent = tree.tokens[:, i : i + 1], tree.parents[:, i]
            law, draft = p[rows, parent], q[rows, parent]
            p_x, q_x = (draft, law) if fault == "p and q swapped" else (law, draft)
            p_x, q_x = p_x.gather(1, x), q_x.gather(1, x)
            has = (i < real[:, None]) & (q_x > 0)
            if fault == "padding is a child":
                has = q_x > 0
            ratio = p_x / q_x
            chance[:, i] = torch.where(has, ratio if fault == "a chance above one" else ratio.clamp(max=1), 0.0)[:, 0]
            if fault == "accepted though q cannot have drawn it":
                chance[:, i] = torch.where(i < real, ratio.clamp(max=1).nan_to_num(0.0)[:, 0], 0.0)
            rest = (law - draft).clamp(min=0)
            if fault == "p and q swapped in the residual":
                rest = (draft - law).clamp(min=0)
            if fault == "only the refused token leaves p":
                rest = law.scatter(1, x, 0.0)
            total = rest.sum(-1, keepdim=True)
            rest = rest if fault == "the residual is not renormalised" else rest / total
            changed = has & (total > 0) & (fault != "p stays among siblings")
            p[rows, parent] = torch.where(changed, rest, law)
            if fault == "refused though q cannot have drawn it":
                p[rows, parent] = torch.where(has, p[rows, parent], law.scatter(1, x, 0.0))
            if not tree.replacement or fault == "q changes though drawn with replacement":
                left = draft.scatter(1, x, 0.0)
                total = left.sum(-1, keepdim=True)
                if fault == "q is not renormalised":
                    total = torch.ones_like(total)
                empty = 1 / q.shape[-1] if fault == "an empty q is uniform" else 0.0
                draft = torch.where(has & (fault != "q stays among siblings"), torch.where(total > 0, left / total, empty), draft)
                q[rows, parent] = draft
        if fault == "the residual of the node before":
            p = p.roll(1, 1)
        return chance, first if fault == "always emits from p" else p

    return odds


def drawn_for_each_child(tree, y):
    """A node's token drawn anew for each child that asks, as where every path draws its own."""
    child = torch.arange(y.shape[1])
    again = y.gather(1, tree.parents.clamp(min=0))
    other = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(0))].gather(1, tree.parents.clamp(min=0))
    return torch.where(child % 2 == 0, other, again) == tree.tokens


def last_of_equals(tree, accepted):
    nodes = accepted.shape[1]
    barred = ((~accepted) | (torch.arange(nodes) >= tree.size[:, None])) & (torch.arange(nodes) > 0)
    alive = ~(tree.visible() & barred[:, None]).any(-1)
    best = nodes - 1 - torch.where(alive, tree.depth, -1).flip(1).argmax(1)
    return tree.visible()[torch.arange(len(best)), best]


plain_judge, plain_choose, plain_longest = verify.judge, expand.choose, rules._longest_path
plain_odds, plain_typical, plain_membership = rules.acceptance_probability, rules.typical, rules.membership
laws_hold = functools.partial(exact, SHAPES[3:], (3, 4), ("random", "narrow", "mixed"), 2)
textbook_holds = functools.partial(by_the_book, 60)
rejection_law, chain_law, cut_law = (functools.partial(sampled, name) for name in ("rejection", "chain", "cut laws"))
drawn_law, replaced_law = functools.partial(children, "drawn"), functools.partial(children, "replaced")

ODDS = (
    "the residual is not renormalised",
    "always emits from p",
    "p stays among siblings",
    "q stays among siblings",
    "q is not renormalised",
    "only the refused token leaves p",
    "p and q swapped",
    "p and q swapped in the residual",
    "a chance above one",
    "accepted though q cannot have drawn it",
    "refused though q cannot have drawn it",
    "an empty q is uniform",
    "the root is a child of the last row",
    "padding is a child",
    "the residual of the node before",
    "siblings in reverse",
)
# Refusing twins and changing q is lossless with replacement too, but it is not the rule that is named and accepts less.
LAWFUL = "q changes though drawn with replacement"
# name -> where it is planted, what, and the check that must turn red
FAULTS = {f"{name}, by enumeration": (rules, "acceptance_probability", plainly(name), laws_hold) for name in ODDS}
FAULTS |= {f"{name}, by the textbook": (rules, "acceptance_probability", plainly(name), textbook_holds) for name in (*ODDS, LAWFUL)}
FAULTS |= {f"{name}, sampled": (rules, "acceptance_probability", plainly(name), rejection_law) for name in ODDS[:4]}
FAULTS |= {
    "the last sibling is left out": (rules, "acceptance_probability", lambda t, *laws: plain_odds(replace(t, width=t.width - 1), *laws), textbook_holds),
    "the bonus of the root": (verify, "judge", lambda tree, m, y, k=None: plain_judge(tree, m, y[:, :1].expand_as(y), k), laws_hold),
    "one coin for all siblings": (rules, "uniform", lambda seed, row, index, number: uniform(seed, row, index, number * 0), rejection_law),
    "one coin for all depths": (rules, "uniform", lambda seed, row, index, number: uniform(seed, row, index * 0, number), chain_law),
    "the drafter draws with the target's noise": (expand, "PURPOSE_DRAFT", sampler.PURPOSE_TOKEN, rejection_law),
    "coins are the drafter's numbers": (sampler, "PURPOSE_UNIFORM", sampler.PURPOSE_DRAFT, chain_law),
    "the law before temperature": (expand, "choose", lambda logits, *rest: (*plain_choose(logits, *rest)[:2], logits), cut_law),
    "the best instead of draws": (expand, "gumbel", lambda seed, row, *_: torch.zeros(*row.shape, V), drawn_law),
    "one draw for all copies": (expand, "gumbel", lambda *key: gumbel(*key[:5]), replaced_law),
    "one noise for all indices": (expand, "gumbel", lambda seed, row, index, *rest: gumbel(seed, row, index * 0, *rest), drawn_law),
    "a node's token drawn for each child": (rules, "match", drawn_for_each_child, same_as_plain),
    "children judged by their own law": (rules, "_at_parent", lambda tree, v: v.gather(2, tree.tokens[:, :, None])[:, :, 0], lossy),
    "not the longest path": (rules, "_longest_path", lambda tree, accepted: accepted, lossy),
    "the last of equals": (rules, "_longest_path", last_of_equals, lossy),
    "padding is accepted": (rules, "_longest_path", lambda t, m: plain_longest(replace(t, size=torch.full_like(t.size, m.shape[1])), m), lossy),
    "epsilon for delta": (rules, "typical", lambda t, x, how, *k: plain_typical(t, x, replace(how, delta=how.epsilon), *k), lossy),
    "typical of the cut law": (rules, "typical", lambda t, x, how, *k: plain_typical(t, warp(x, how) * how.temperature, how, *k), lossy),
    "membership without min-p": (rules, "membership", lambda t, x, how, *k: plain_membership(t, x, replace(how, min_p=0.0), *k), lossy),
}


def test_every_fault_is_seen(monkeypatch):
    for check in {id(check): check for *_, check in FAULTS.values()}.values():
        assert check() > GREEN, check
    monkeypatch.setattr(rules, "acceptance_probability", plainly())
    assert laws_hold() and textbook_holds(), "the form that carries the faults is right without one"
    monkeypatch.undo()
    found = {}
    for name, (owner, attribute, fault, check) in FAULTS.items():
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, fault)
            found[name] = check()
    assert {name: value for name, value in found.items() if value >= RED} == {}
    assert len(found) == len(FAULTS) == 55
