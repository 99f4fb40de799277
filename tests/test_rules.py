"""The verification rules: exact distributions by enumeration, a textbook walk in fractions, keyed noise by chi-square, planted faults.

Every check returns a number: 1 or 0 for an exact check, else a p-value. Above GREEN the rule holds, below RED it is broken.
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
from decoding_cases import GREEN, RED, build_tree, p_value
from torch import Tensor

from draftsmith.inference import expand, rules, sampler, verify
from draftsmith.inference.drafter import RoundContext
from draftsmith.inference.sampler import RULES, Sampling, gumbel, sample, uniform, warp
from draftsmith.inference.tree import DraftTree, StaticTree

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
    """A distribution as integer weights, some of them 0."""
    numbers = [rng.choice((0, 1, 2, 3, 5, 8)) for _ in range(vocab)]
    numbers[rng.randrange(vocab)] += 1
    return numbers


def pair(rng: random.Random, vocab: int, kind: str) -> tuple[list[int], list[int]]:
    """Weights of the target's and of the drafter's distribution."""
    kind = rng.choice(KINDS[:-1]) if kind == "mixed" else kind
    p, q = weights(rng, vocab), weights(rng, vocab)
    if kind == "equal":
        q = list(p)
    elif kind == "orthogonal":
        support = rng.sample(range(vocab), rng.randint(1, vocab - 1))
        p = [rng.randint(1, 5) if x in support else 0 for x in range(vocab)]
        q = [0 if x in support else rng.randint(1, 5) for x in range(vocab)]
    elif kind in ("one-hot", "narrow"):
        few = rng.sample(range(vocab), 1 if kind == "one-hot" else 2)
        q = [rng.randint(1, 5) if x in few else 0 for x in range(vocab)]
    return p, q


def normal(rows: list[list[int]]) -> Tensor:
    numbers = torch.tensor(rows, dtype=torch.float64)
    return numbers / numbers.sum(-1, keepdim=True)


def draw_probability(tokens: Tensor, parents: list[int], size: int, q: Tensor, replacement: bool) -> tuple[Tensor, Tensor]:
    """The probability [B] that the children tokens [B,N] are drawn from q [B,N,V], without replacement by successive renormalised draws.

    Also returns which nodes [B,N] were drawn when no token was left: any token, all equally likely.
    """
    remaining, none_left = q.clone(), torch.zeros_like(tokens, dtype=torch.bool)
    probability = torch.full_like(q[:, 0, 0], q.shape[-1] ** (size - tokens.shape[1]))  # padding is any token
    for i in range(1, size):
        x, total = tokens[:, i : i + 1], remaining[:, parents[i]].sum(-1)
        none_left[:, i] = total == 0
        probability = probability * torch.where(total > 0, remaining[:, parents[i]].gather(1, x)[:, 0] / total, 1 / q.shape[-1])
        if not replacement:
            remaining[:, parents[i]] = remaining[:, parents[i]].scatter(1, x, 0.0)
    return probability, none_left


def enumerated(parents: list[int], size: int, vocab: int, kind: str, replacement: bool, copy: int, seen: Counter) -> float:
    """The largest error of the joint distribution of the first K+1 tokens, over all drawn trees, outcomes of the uniform draws and final tokens.

    The trees go through the real walk and judge. Tokens that a round does not reach are drawn from the target.
    """
    rng, nodes = random.Random(f"{parents} {vocab} {kind} {copy}"), len(parents)
    tokens = torch.tensor([[0, *x] for x in itertools.product(range(vocab), repeat=nodes - 1)])
    depth, code = [0] * nodes, torch.zeros_like(tokens)  # code: the tokens after the root, read as a number
    for i in range(1, size):
        depth[i], code[:, i] = depth[parents[i]] + 1, code[:, parents[i]] * vocab + tokens[:, i]
    deepest = max(depth)
    pairs = [[pair(rng, vocab, kind) for _ in range(vocab**d)] for d in range(deepest + 1)]
    target, drafter = ([normal([weights[side] for weights in level]) for level in pairs] for side in (0, 1))
    p, q = (torch.stack([table[depth[i]][code[:, i]] for i in range(nodes)], 1) for table in (target, drafter))
    weight, none_left = draw_probability(tokens, parents, size, q, replacement)
    possible = weight > 0
    tokens, p, q, weight, none_left = tokens[possible], p[possible], q[possible], weight[possible], none_left[possible]
    probability, residual = rules.acceptance_probability(build_tree(tokens, parents, size, replacement), p, q)
    seen["trees"] += len(tokens)
    seen["drawn from nothing"] += int(none_left.sum())
    if not (0 <= probability.min() and probability.max() <= 1) or probability[none_left].any():  # NaN fails too
        return math.inf
    for a in {parents[i] for i in range(1, size)}:  # children drawn when no token was left do not change p
        children = [i for i in range(1, size) if parents[i] == a]
        first_only = none_left[:, children[1:]].all(1) & (len(children) > 1)
        difference = (p - q)[first_only, a].clamp(min=0)
        total = difference.sum(-1, keepdim=True)
        expected = torch.where(total > 0, difference / total, p[first_only, a])
        if first_only.any() and (expected - residual[first_only, a]).abs().max() > 1e-12:
            return math.inf
    accepted = torch.tensor([[0, *bits] for bits in itertools.product((0, 1), repeat=nodes - 1)]).bool()  # [outcomes,N]
    accepts = torch.where(torch.arange(nodes) < size, probability, 0.5)[:, None]
    weight = weight[:, None] * torch.where(accepted, accepts, 1 - accepts)[:, :, 1:].prod(-1)  # [trees,outcomes]
    row, outcome = (weight > 0).nonzero(as_tuple=True)
    weight, tokens, residual, accepted = weight[row, outcome], tokens[row], residual[row], accepted[outcome]
    # Each node emits each token in one of V rows, and no two nodes emit the same tokens in all rows: reading a wrong node shows.
    shift = torch.randint(vocab, (len(row), 1, nodes), generator=torch.Generator().manual_seed(len(row)))
    final = (torch.arange(vocab)[:, None] + shift) % vocab  # [·,V,N]
    many = [tensor.repeat_interleave(vocab, 0) for tensor in (tokens, accepted, weight, residual)]
    (tokens, accepted, weight, residual), final = many, final.flatten(0, 1)
    tree = build_tree(tokens, parents, size, replacement)
    verdict = verify.judge(tree, accepted, final)
    last = verdict.path.gather(1, verdict.length[:, None] - 1)
    weight = weight * residual.gather(1, last[:, :, None].expand(-1, -1, vocab))[:, 0].gather(1, final.gather(1, last))[:, 0]
    text = torch.zeros_like(verdict.length)
    for j in range(1, deepest + 1):
        text = torch.where(j < verdict.length, text * vocab + tokens.gather(1, verdict.path[:, j : j + 1].clamp(min=0))[:, 0], text)
    text = text * vocab + verdict.next_token
    joint, truth = weight.new_zeros(1), weight.new_ones(1)
    for length in range(1, deepest + 2):
        ends = verdict.length == length
        joint = (joint[:, None] * target[length - 1]).flatten().index_add(0, text[ends], weight[ends])
        truth = (truth[:, None] * target[length - 1]).flatten()
        seen[f"length {length}"] += int((weight[ends] > 0).sum())
    seen["rows"] += len(weight)
    seen["distributions"] += 1
    return float((joint - truth).abs().max())


def exact(shapes=SHAPES, vocabs=(2, 3), kinds=KINDS, copies: int = 3, seen: Counter | None = None) -> float:
    seen = Counter() if seen is None else seen
    for (parents, size), vocab, kind, replacement, copy in itertools.product(shapes, vocabs, kinds, (False, True), range(copies)):
        if not enumerated(parents, size, vocab, kind, replacement, copy, seen) < 1e-12:
            return 0.0
    return 1.0


@pytest.mark.slow
def test_joint_distribution_by_enumeration():
    seen = Counter()
    assert exact(seen=seen) and exact(vocabs=(4,), copies=2, seen=seen)
    assert seen["distributions"] == len(SHAPES) * 12 * (2 * 3 + 2)
    assert seen["trees"] > 20_000 and seen["rows"] > 200_000 and seen["drawn from nothing"] > 2000
    assert all(seen[f"length {length}"] > 10_000 for length in (1, 2, 3, 4))


def random_tree(rng: random.Random, nodes: int, vocab: int) -> tuple[list[int], list[int], int]:
    """Few tokens, so that siblings are often equal, and padding whose parents would count if they were read."""
    size = rng.choice((0, 1, nodes, nodes, nodes, rng.randint(0, nodes)))
    parents = [-1] + [rng.randint(max(0, i - 3), i - 1) if i < size else rng.choice((-1, 0, i - 1)) for i in range(1, nodes)]
    return [rng.randrange(vocab) for _ in range(nodes)], parents, size


def padded(trees: list[tuple[list[int], list[int], int]], static: bool) -> DraftTree:
    """A batch of the trees. static: complete trees that are cut short by their size alone, so that padding nodes keep their depth."""
    tokens, parents, size = (torch.tensor(list(column)) for column in zip(*trees, strict=True))
    tree = DraftTree.build(tokens, parents, torch.full_like(size, tokens.shape[1]) if static else size)
    tree.size = size
    return tree


def textbook(tokens, parents, size, p, q, draws, replacement):
    """SpecInfer's walk with a uniform draw for each visited child, in exact fractions.

    Returns the path, {visited child: acceptance probability}, and the distribution of the final token.
    """
    path, probabilities = [0], {}
    while True:
        node = path[-1]
        target, draft = list(p[node]), list(q[node])
        for child in (i for i in range(1, size) if parents[i] == node):
            x = tokens[child]
            probabilities[child] = min(Fraction(1), target[x] / draft[x]) if draft[x] else Fraction(0)
            if draws[child] < probabilities[child]:
                path.append(child)
                break
            if draft[x]:  # else it was not drawn from q, and its rejection changes nothing
                residual = [max(a - b, Fraction(0)) for a, b in zip(target, draft, strict=True)]
                target = [a / sum(residual) for a in residual]
                if not replacement:
                    draft[x] = Fraction(0)
                    draft = [b / sum(draft) for b in draft] if sum(draft) else draft
        else:
            return path, probabilities, target


def by_the_book(count: int = 400, seen: Counter | None = None) -> float:
    """Acceptance probabilities and residuals at the nodes that the textbook's walk visits, and its path."""
    rng, seen, worst = random.Random(5), Counter() if seen is None else seen, 0.0
    for nodes, vocab, replacement in itertools.product((2, 4, 7, 12), (2, 4, 6), (False, True)):
        trees = [random_tree(rng, nodes, vocab) for _ in range(count)]
        pairs = [[pair(rng, vocab, "mixed") for _ in range(nodes)] for _ in range(count)]
        draws = [[Fraction(rng.randrange(1, 1009), 1009) for _ in range(nodes)] for _ in range(count)]
        tree = padded(trees, static=vocab == 4)
        tree.replacement = replacement
        if vocab == 4:  # as static trees know it; else it is N − 1
            tree.width = max(max(Counter(parents[1:size]).values(), default=0) for _, parents, size in trees)
        p, q = (torch.stack([normal([numbers[side] for numbers in row]) for row in pairs]) for side in (0, 1))
        probability, residual = rules.acceptance_probability(tree, p, q)
        path, length = verify.walk(tree, torch.tensor([[float(draw) for draw in row] for row in draws]) < probability)
        for b in range(count):
            if not trees[b][2]:
                seen["idle"] += 1
                worst = max(worst, float(length[b]))
                continue
            fractions = [[[Fraction(w, sum(numbers[side])) for w in numbers[side]] for numbers in pairs[b]] for side in (0, 1)]
            walked, probabilities, final = textbook(*trees[b], *fractions, draws[b], replacement)
            if path[b].tolist() != walked + [-1] * (nodes - len(walked)):
                return 0.0
            errors = [abs(float(value) - float(probability[b, child])) for child, value in probabilities.items()]
            errors += [abs(float(value) - got) for value, got in zip(final, residual[b, walked[-1]].tolist(), strict=True)]
            worst = max(worst, math.inf if any(error != error for error in errors) else max(errors))
            parents_walked = [trees[b][1][i] for i in walked[1:]]
            rejected = [child for child in probabilities if child not in walked and trees[b][1][child] in parents_walked]
            seen["children visited"] += len(probabilities)
            seen["accepted after a rejection"] += bool(rejected)
            seen["trees"] += 1
            seen["padded"] += trees[b][2] < nodes
            seen["deep"] += len(walked) > 3
    return float(worst < 1e-12)


def test_against_the_textbook():
    seen = Counter()
    assert by_the_book(seen=seen)
    assert seen["trees"] > 7000 and seen["children visited"] > 10_000 and seen["idle"] > 1000 and seen["padded"] > 2000
    assert seen["accepted after a rejection"] > 250 and seen["deep"] > 150


def test_chains_are_speculative_sampling():
    """Leviathan et al. 2023, Chen et al. 2023: min(1, p/q), then norm(max(p − q, 0)), at every node of a chain, with or without
    replacement. The acceptance probability is Σ min(p, q)."""
    rng, vocab, depth = random.Random(2), 5, 3
    between = 0
    for kind, replacement, _ in itertools.product(KINDS, (False, True), range(10)):
        tokens = torch.tensor([[0, *x] for x in itertools.product(range(vocab), repeat=depth)])
        tree = build_tree(tokens, [-1, 0, 1, 2], depth + 1, replacement)
        pairs = [pair(rng, vocab, kind) for _ in range(depth + 1)]
        p, q = (normal([numbers[side] for numbers in pairs]) for side in (0, 1))
        probability, residual = rules.acceptance_probability(tree, p.expand(len(tokens), -1, -1), q.expand(len(tokens), -1, -1))
        for i in range(depth):
            for x in range(vocab):
                drafts_x = tokens[:, i + 1] == x
                assert drafts_x.sum() == vocab ** (depth - 1)
                expected = min(1.0, float(p[i, x] / q[i, x])) if q[i, x] else 0.0
                assert (probability[drafts_x, i + 1] - expected).abs().max() < 1e-12
                difference = (p[i] - q[i]).clamp(min=0)
                if expected < 1 and q[i, x]:
                    assert (residual[drafts_x, i] - difference / difference.sum()).abs().max() < 1e-12
            by_token = torch.stack([probability[tokens[:, i + 1] == x, i + 1][0] for x in range(vocab)])
            accept = float((q[i] * by_token).sum())
            assert abs(accept - float(torch.minimum(p[i], q[i]).sum())) < 1e-12
            between += 0 < accept < 1
        assert torch.equal(residual[:, depth], p[depth].expand(len(tokens), -1)), "the bonus is the target's"
    assert between > 100


def test_acceptance_as_predicted():
    """Target-sample matching accepts with probability Σ p over the set of children, by enumeration. Under rejection, more draws never accept
    less, and the complete vocabulary without replacement accepts always."""
    rng, vocab, between = random.Random(3), 4, 0
    for _ in range(50):
        p, q = weights(rng, vocab), [rng.randint(1, 5) for _ in range(vocab)]
        target, draft = normal([p])[0], normal([q])[0]
        children = [rng.randrange(vocab) for _ in range(3)]  # equal tokens among them
        tree = build_tree(torch.tensor([[0, *children]] * vocab), [-1, 0, 0, 0], 4, False)
        y = torch.arange(vocab)[:, None].expand(-1, 4)
        verdict = verify.judge(tree, rules.match(tree, y), y)
        assert abs(float(target[verdict.length == 2].sum()) - float(target[sorted(set(children))].sum())) < 1e-12
        previous = 0.0
        for count in range(1, vocab + 1):
            tokens = torch.tensor([[0, *x] for x in itertools.permutations(range(vocab), count)])
            parents, pq = [-1] + [0] * count, [p.expand(len(tokens), count + 1, -1) for p in (target, draft)]
            probability, _ = rules.acceptance_probability(build_tree(tokens, parents, count + 1, False), *pq)
            rejected = (draw_probability(tokens, parents, count + 1, pq[1], False)[0] * (1 - probability[:, 1:]).prod(1)).sum()
            assert 1 - rejected > previous - 1e-12
            previous = float(1 - rejected)
            between += previous < 1
        assert abs(previous - 1) < 1e-12
    assert between > 80


# Keyed noise. The target's distribution of a token depends on its index and on the token before. V tokens; the drafter has D of them.
V, D, FIRST, COUNT = 5, 3, 7, 40_000
# Target and drafter are far apart, with a token on which they nearly agree, so that the second child of a node is neither certain nor impossible.
_logits = torch.tensor([[0.35, 0.05, 0.40, 0.15, 0.05], [0.30, 0.50, 0.05, 0.10, 0.05]]).log()
_logits = torch.stack([torch.stack([_logits.roll(2 * k + x, -1) for x in range(V)], 1) for k in range(3)], 1)
TARGET, DRAFTER = _logits + 0.2 * torch.randn(_logits.shape, generator=torch.Generator().manual_seed(0))  # [3,V,V] by index % 3, token
BUSHY = StaticTree.from_paths([(0,), (1,), (2,), (0, 0), (1, 0), (1, 1)])
WIDE = StaticTree.from_paths([(0,), (1,), (2,), (3,), (0, 0), (0, 1)])
SETTINGS = {
    "rejection": (Sampling(1.0, seed=1, rule="rejection"), BUSHY, V),
    "replacement": (Sampling(1.0, seed=2, rule="rejection-replacement"), BUSHY, V),
    "chain": (Sampling(0.9, seed=3, rule="rejection"), StaticTree.chain(2), V),
    "top-k": (Sampling(0.8, top_k=3, seed=4, rule="rejection"), WIDE, V),  # four children, drawn from three tokens
    "top-k, replacement": (Sampling(1.3, top_k=3, seed=5, rule="rejection-replacement"), BUSHY, V),
    "draft vocabulary": (Sampling(1.0, seed=6, rule="rejection"), BUSHY, D),
    "target-sample": (Sampling(1.0, seed=7, rule="target-sample"), BUSHY, V),
    "shared-noise": (Sampling(0.7, top_k=4, seed=8, rule="shared-noise"), BUSHY, V),
}


def rounds(how: Sampling, shape: StaticTree, vocab: int = V, count: int = COUNT, tokens: int = 3, root: Tensor | None = None):
    """Draft and verify with keyed noise until every request has its tokens -> tokens [count,tokens], lengths [count] of the first round."""
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
            emitted = j <= verdict.length
            node = verdict.path[:, min(j, shape.max_depth)].clamp(min=0)
            token = torch.where(j < verdict.length, tree.tokens.gather(1, node[:, None])[:, 0], verdict.next_token)
            out[busy[emitted], done[busy[emitted]] + j] = token[emitted]
        done[busy] += verdict.length
        lengths = verdict.length if lengths is None else lengths
        busy = (done < tokens).nonzero()[:, 0]
    return out[:, 1 : tokens + 1], lengths


def test_p_value():
    """Two cells are a normal deviate squared; a cell of probability 0; rare cells, which are merged."""
    cells = torch.tensor([0] * 1060 + [1] * 940)
    assert p_value(cells, torch.tensor([0.5, 0.5]).double()) == pytest.approx(math.erfc(3.6**0.5))
    assert p_value(cells, torch.tensor([0.5, 0.45, 0.05]).double()) < RED and p_value(cells, torch.tensor([1.0, 0.0])) == 0
    cells = torch.tensor([0] * 1060 + [1] * 920 + [3] * 20)
    assert p_value(cells, torch.tensor([0.53, 0.46, 0.009, 0.001]).double()) == pytest.approx(1.0), "the last two are one cell of 20"


def joint_distributions(how: Sampling) -> list[Tensor]:
    """The target's joint distributions of the first one, two and three tokens after a 0 at index FIRST."""
    steps = [warp(TARGET[(FIRST + k) % 3], how).double().softmax(-1) for k in (1, 2, 3)]
    joint = [steps[0][0]]
    for step in steps[1:]:
        joint.append((joint[-1].view(-1, V, 1) * step).flatten())
    return joint


def sampled(name: str, values: dict | None = None) -> float:
    """The least p-value of the joint distributions of one, two and three tokens."""
    how, shape, vocab = SETTINGS[name]
    tokens, lengths = rounds(how, shape, vocab)
    assert lengths.unique().tolist() == list(range(1, shape.max_depth + 2))
    code, p_values = torch.zeros(len(tokens), dtype=torch.int64), []
    for k, distribution in enumerate(joint_distributions(how)):
        code = code * V + tokens[:, k]
        p_values.append(p_value(code, distribution))
    if values is not None:
        values[name] = p_values
    return min(p_values)


def test_distribution_of_keyed_rounds():
    """Several rounds per request, so that noise used twice would be seen as well."""
    values: dict[str, list[float]] = {}
    assert all(sampled(name, values) > GREEN for name in SETTINGS), values
    assert len(values) == 8 and all(len(p_values) == 3 for p_values in values.values())


def children(kind: str, values: list[float] | None = None) -> float:
    """Children drawn without replacement follow Plackett-Luce, with replacement they are independent; neighbouring indices are independent."""
    how = Sampling(0.8, seed=len(kind), rule="rejection" if kind == "drawn" else "rejection-replacement")
    logits = DRAFTER[0, :2].expand(COUNT, 2, V)
    index = torch.tensor([4, 5]).expand(COUNT, 2)
    request = torch.arange(COUNT)
    round = RoundContext([], request, request * 0, request * 0 + 3, request, how, 1)
    ids, _, q_logits = expand.choose(logits, 3, round, index, False)
    assert ids.shape == (COUNT, 2, 3) and q_logits is not None
    q = (logits[0].double() / 0.8).softmax(-1)
    assert (q_logits[0].double().softmax(-1) - q).abs().max() < 1e-6
    triples = torch.tensor([[0, *x] for x in itertools.product(range(V), repeat=3)])
    expected = [draw_probability(triples, [-1, 0, 0, 0], 4, row.expand(len(triples), 4, -1), kind == "replaced")[0] for row in q]
    p_values = [p_value(ids[:, k] @ torch.tensor([V * V, V, 1]), expected[k]) for k in range(2)]
    p_values.append(p_value(ids[:, 0, 0] * V + ids[:, 1, 0], (q[0, :, None] * q[1]).flatten()))
    if values is not None:
        values += p_values
    return min(p_values)


def test_distribution_of_children():
    values: list[float] = []
    assert children("drawn", values) > GREEN and children("replaced", values) > GREEN, values
    assert len(values) == 6


def test_children_that_are_not_drawn():
    """Children of the other rules are the drafter's best tokens, without or with the target's noise; no distribution is reported."""
    request = torch.arange(9)
    round = RoundContext([], request, request * 0, request, request, Sampling(0.8, seed=1, rule="shared-noise"), 1)
    logits, index = DRAFTER[0, :1].expand(9, 1, V), torch.arange(9)[:, None] + 1
    ids, _, q_logits = expand.choose(logits, 2, round, index, False)
    assert q_logits is None and torch.equal(ids[:, :, 0], sample(logits, round.sampling, round.noise_keys[:, None], index))
    assert len(ids.unique(dim=0)) > 3
    for how in (Sampling(0.8, rule="target-sample"), Sampling(), Sampling(rule="rejection"), Sampling(0.8, rule="typical")):
        ids, scores, q_logits = expand.choose(logits, 2, replace(round, sampling=how), index, True)
        assert q_logits is None and torch.equal(ids, logits.topk(2).indices) and torch.equal(scores, logits.log_softmax(-1).gather(-1, ids))


def plain(how: Sampling, count: int, tokens: int) -> Tensor:
    last, request, out = torch.zeros(count, dtype=torch.int64), torch.arange(count), []
    for k in range(1, tokens + 1):
        last = sample(TARGET[(FIRST + k) % 3, last], how, request, torch.full_like(last, FIRST + k))
        out.append(last)
    return torch.stack(out, 1)


def same_as_plain() -> float:
    """Target-sample matching, with shared noise or without, and every rule at temperature 0 give the tokens of plain sampling, whatever was drafted."""
    equal = []
    for how in (*(SETTINGS[name][0] for name in ("target-sample", "shared-noise")), *(Sampling(rule=rule, top_k=2) for rule in RULES)):
        tokens, lengths = rounds(how, BUSHY, count=2000, tokens=4)
        equal.append(torch.equal(tokens, plain(how, 2000, 4)))
        assert how.greedy or lengths.unique().tolist() == [1, 2, 3]
    return float(len(equal) == 8 and all(equal))


def test_tokens_of_plain_sampling():
    assert same_as_plain()
    request = torch.arange(300)
    tree, logits = StaticTree.chain(1).tree(request % V, (request % 3)[:, None, None]), TARGET[0, :2].expand(300, 2, V)
    matched, rejected = (verify.verify(tree, logits, Sampling(1.0, rule=rule), request, request) for rule in ("target-sample", "rejection"))
    assert torch.equal(matched.path, rejected.path) and torch.equal(matched.next_token, rejected.next_token), "children that were not drawn"
    assert matched.length.unique().tolist() == [1, 2]
    root = DraftTree.root(request % V)
    root.q_logits = logits[:, :1]
    alone = verify.verify(root, logits[:, :1], Sampling(1.0, rule="rejection"), request, request)
    assert torch.equal(alone.next_token, sample(logits[:, 0], Sampling(1.0), request, request + 1)), "no children"


def test_acceptance_of_keyed_rules():
    """A chain of one node, for each of five distributions.

    Rejection accepts with probability 1 − TV, shared noise Σ 1/Σ max(p_y/p_x, q_y/q_x), which is at least (1 − TV)/(1 + TV) (Daliri et al.
    2024), target-sample matching p of the drafter's best token. 8000 requests each: 4.5 standard deviations, 20 trials.
    """
    per = COUNT // V
    root = torch.arange(V).repeat_interleave(per)
    p, q = (table[(FIRST + 1) % 3].double().softmax(-1) for table in (TARGET, DRAFTER))
    distance = 1 - torch.minimum(p, q).sum(-1)
    both = torch.maximum(p[:, None] / p[:, :, None], q[:, None] / q[:, :, None]).sum(-1)  # [distribution, x]
    expected = {
        "rejection": 1 - distance,
        "rejection-replacement": 1 - distance,
        "shared-noise": (1 / both).sum(-1),
        "target-sample": p.gather(1, q.argmax(-1, keepdim=True))[:, 0],
    }
    assert (expected["shared-noise"] > (1 - distance) / (1 + distance)).all() and (expected["shared-noise"] < 1 - distance).all()
    for rule, probability in expected.items():
        _, lengths = rounds(Sampling(1.0, seed=9, rule=rule), StaticTree.chain(1), tokens=1, root=root)
        rate = (lengths == 2).double().view(V, per).mean(1)
        error = (rate - probability).abs() / (probability * (1 - probability) / per).sqrt()
        assert error.max() < 4.5, rule
        assert rule != "shared-noise" or (rate > (1 - distance) / (1 + distance) - 4.5 * (0.25 / per) ** 0.5).all()


LOSSY = [
    Sampling(0.8, seed=1, rule="typical"),
    Sampling(1.0, top_k=3, seed=2, rule="typical", epsilon=0.15, delta=0.6),
    Sampling(1.0, seed=3, rule="membership", top_k=2),
    Sampling(0.7, seed=4, rule="membership", top_p=0.7),
    Sampling(1.3, seed=5, rule="membership", top_k=4, top_p=0.9, min_p=0.2),
]


def accepted_tokens(logits: list[float], how: Sampling, seen: Counter) -> set[int]:
    """The tokens that a lossy rule accepts at a node with these logits, by a plain loop."""
    weight = [math.exp(x / how.temperature) for x in logits]
    if how.rule == "typical":
        p = [w / sum(weight) for w in weight]
        threshold = how.delta * math.exp(sum(x * math.log(x) for x in p))
        seen["epsilon" if threshold > how.epsilon else "delta"] += 1
        return {x for x, p_x in enumerate(p) if p_x > min(how.epsilon, threshold)}
    best = sorted(range(len(logits)), key=lambda x: -logits[x])[: how.top_k or None]
    total, before, in_set = sum(weight[x] for x in best), 0.0, []
    for x in best:  # the fewest that reach top_p
        if before < how.top_p * total:
            in_set.append(x)
        before += weight[x]
    return {x for x in in_set if weight[x] >= how.min_p * weight[best[0]]}


def longest_path(tokens: list[int], parents: list[int], size: int, accepts: list[set[int]], seen: Counter) -> list[int]:
    """The longest path of accepted tokens; of equally long ones the first."""
    paths: dict[int, list[int]] = {0: [0]} if size else {}
    for i in range(1, size):
        if parents[i] in paths and tokens[i] in accepts[parents[i]]:
            paths[i] = [*paths[parents[i]], i]
    best = max(paths.values(), key=len, default=[])
    seen["equals"] += sum(len(path) == len(best) for path in paths.values()) > 1
    seen["past an accepted sibling"] += any(j in paths and parents[j] == parents[i] for i in best for j in range(1, i))
    siblings = Counter((parents[i], tokens[i]) for i in paths)
    seen["accepted equal siblings"] += max(siblings.values(), default=0) > 1
    return best


def lossy(seen: Counter | None = None) -> float:
    rng, seen, rows, nodes, vocab = random.Random(7), Counter() if seen is None else seen, 150, 11, 5
    for case, how in enumerate(LOSSY):
        trees = [random_tree(rng, nodes, vocab) for _ in range(rows)]
        tree = padded(trees, static=case % 2 == 0)
        logits = 1.5 * torch.randn(rows, nodes, vocab, generator=torch.Generator().manual_seed(case))
        request, position = torch.arange(rows), torch.arange(rows) % 7
        verdict = verify.verify(tree, logits, how, request, position)
        for b, rows_of_logits in enumerate(logits.tolist()):
            path = longest_path(*trees[b], [accepted_tokens(row, how, seen) for row in rows_of_logits], seen)
            if verdict.path[b].tolist() != path + [-1] * (nodes - len(path)) or verdict.length[b] != len(path):
                return 0.0
            if path and verdict.next_token[b] != sample(logits[b, path[-1]], how, request[b], position[b] + len(path)):
                return 0.0
            seen[f"length {len(path)}"] += 1
            seen["padded"] += 0 < trees[b][2] < nodes
    return 1.0


def test_lossy_rules_equal_plain_loops():
    seen = Counter()
    assert lossy(seen)
    for name in ("length 0", "length 1", "length 2", "length 4", "equals", "past an accepted sibling", "accepted equal siblings", "padded"):
        assert seen[name] > 20, (name, seen)
    assert seen["epsilon"] > 500 and seen["delta"] > 500


def test_which_rules_are_lossless():
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


def loop_reference(fault: str = ""):
    """`rules.acceptance_probability` node after node, with one fault. Index −1 reads the last row, as advanced indexing does."""

    def acceptance_probability(tree: DraftTree, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        rows, first, real, p, q = torch.arange(len(p)), p, tree.size, p.clone(), q.clone()
        probability, nodes = torch.zeros_like(p[:, :, 0]), range(1, tree.tokens.shape[1])
        if fault == "siblings in reverse":
            nodes = reversed(nodes)
        if fault == "the root is a child of the last row":
            nodes = [0, *nodes]
        for i in nodes:
            x, parent = tree.tokens[:, i : i + 1], tree.parents[:, i]
            target, draft = p[rows, parent], q[rows, parent]
            p_x, q_x = (draft, target) if fault == "p and q swapped" else (target, draft)
            p_x, q_x = p_x.gather(1, x), q_x.gather(1, x)
            drawn = (i < real[:, None]) & (q_x > 0)
            if fault == "padding is a child":
                drawn = q_x > 0
            ratio = p_x / q_x
            probability[:, i] = torch.where(drawn, ratio if fault == "a probability above one" else ratio.clamp(max=1), 0.0)[:, 0]
            if fault == "accepted though q cannot have drawn it":
                probability[:, i] = torch.where(i < real, ratio.clamp(max=1).nan_to_num(0.0)[:, 0], 0.0)
            residual = (target - draft).clamp(min=0)
            if fault == "p and q swapped in the residual":
                residual = (draft - target).clamp(min=0)
            if fault == "only the rejected token leaves p":
                residual = target.scatter(1, x, 0.0)
            total = residual.sum(-1, keepdim=True)
            residual = residual if fault == "the residual is not renormalised" else residual / total
            changed = drawn & (total > 0) & (fault != "p stays among siblings")
            p[rows, parent] = torch.where(changed, residual, target)
            if fault == "rejected though q cannot have drawn it":
                p[rows, parent] = torch.where(drawn, p[rows, parent], target.scatter(1, x, 0.0))
            if not tree.replacement or fault == "q changes though drawn with replacement":
                remaining = draft.scatter(1, x, 0.0)
                total = remaining.sum(-1, keepdim=True)
                if fault == "q is not renormalised":
                    total = torch.ones_like(total)
                empty = 1 / q.shape[-1] if fault == "an empty q is uniform" else 0.0
                changed = drawn & (fault != "q stays among siblings")
                q[rows, parent] = torch.where(changed, torch.where(total > 0, remaining / total, empty), draft)
        if fault == "the residual of the node before":
            p = p.roll(1, 1)
        return probability, first if fault == "always emits from p" else p

    return acceptance_probability


def drawn_for_each_child(tree, y):
    """Every second child compares with another draw of its parent's token, as if every path drew its own."""
    child = torch.arange(y.shape[1])
    same_draw = y.gather(1, tree.parents.clamp(min=0))
    other_draw = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(0))].gather(1, tree.parents.clamp(min=0))
    return torch.where(child % 2 == 0, other_draw, same_draw) == tree.tokens


def last_of_equals(tree, accepted):
    nodes = accepted.shape[1]
    rejected = ((~accepted) | (torch.arange(nodes) >= tree.size[:, None])) & (torch.arange(nodes) > 0)
    reachable = ~(tree.visible() & rejected[:, None]).any(-1)
    best = nodes - 1 - torch.where(reachable, tree.depth, -1).flip(1).argmax(1)
    return tree.visible()[torch.arange(len(best)), best]


plain_judge, plain_choose, plain_longest = verify.judge, expand.choose, rules._longest_path
plain_probability, plain_typical, plain_membership = rules.acceptance_probability, rules.typical, rules.membership
enumeration_holds = functools.partial(exact, SHAPES[3:], (3, 4), ("random", "narrow", "mixed"), 2)
textbook_holds = functools.partial(by_the_book, 60)
rejection_holds, chain_holds, cut_holds = (functools.partial(sampled, name) for name in ("rejection", "chain", "top-k"))
drawn_holds, replaced_holds = functools.partial(children, "drawn"), functools.partial(children, "replaced")

PROBABILITY_FAULTS = (
    "the residual is not renormalised",
    "always emits from p",
    "p stays among siblings",
    "q stays among siblings",
    "q is not renormalised",
    "only the rejected token leaves p",
    "p and q swapped",
    "p and q swapped in the residual",
    "a probability above one",
    "accepted though q cannot have drawn it",
    "rejected though q cannot have drawn it",
    "an empty q is uniform",
    "the root is a child of the last row",
    "padding is a child",
    "the residual of the node before",
    "siblings in reverse",
)
# Changing q is lossless with replacement too, but it is another rule than the named one and accepts less.
LOSSLESS_FAULT = "q changes though drawn with replacement"
# name -> module, attribute, faulty function, and the check that must fail
FAULTS = {
    f"{name}, by enumeration": (rules, "acceptance_probability", loop_reference(name), enumeration_holds) for name in PROBABILITY_FAULTS
}
FAULTS |= {
    f"{name}, by the textbook": (rules, "acceptance_probability", loop_reference(name), textbook_holds)
    for name in (*PROBABILITY_FAULTS, LOSSLESS_FAULT)
}
FAULTS |= {f"{name}, sampled": (rules, "acceptance_probability", loop_reference(name), rejection_holds) for name in PROBABILITY_FAULTS[:4]}
FAULTS |= {
    "the last sibling is left out": (
        rules,
        "acceptance_probability",
        lambda t, *pq: plain_probability(replace(t, width=t.width - 1), *pq),
        textbook_holds,
    ),
    "the bonus of the root": (
        verify,
        "judge",
        lambda tree, m, y, k=None: plain_judge(tree, m, y[:, :1].expand_as(y), k),
        enumeration_holds,
    ),
    "one uniform draw for all siblings": (
        rules,
        "uniform",
        lambda seed, row, index, number: uniform(seed, row, index, number * 0),
        rejection_holds,
    ),
    "one uniform draw for all depths": (
        rules,
        "uniform",
        lambda seed, row, index, number: uniform(seed, row, index * 0, number),
        chain_holds,
    ),
    "the drafter draws with the target's noise": (expand, "PURPOSE_DRAFT", sampler.PURPOSE_TOKEN, rejection_holds),
    "uniform draws are the drafter's numbers": (sampler, "PURPOSE_UNIFORM", sampler.PURPOSE_DRAFT, chain_holds),
    "the distribution before temperature": (expand, "choose", lambda logits, *rest: (*plain_choose(logits, *rest)[:2], logits), cut_holds),
    "the best instead of draws": (expand, "gumbel", lambda seed, row, *_: torch.zeros(*row.shape, V), drawn_holds),
    "one draw for all copies": (expand, "gumbel", lambda *key: gumbel(*key[:5]), replaced_holds),
    "one noise for all indices": (expand, "gumbel", lambda seed, row, index, *rest: gumbel(seed, row, index * 0, *rest), drawn_holds),
    "a node's token drawn for each child": (rules, "match", drawn_for_each_child, same_as_plain),
    "children judged by their own distribution": (
        rules,
        "_at_parent",
        lambda tree, v: v.gather(2, tree.tokens[:, :, None])[:, :, 0],
        lossy,
    ),
    "not the longest path": (rules, "_longest_path", lambda tree, accepted: accepted, lossy),
    "the last of equals": (rules, "_longest_path", last_of_equals, lossy),
    "padding is accepted": (
        rules,
        "_longest_path",
        lambda t, m: plain_longest(replace(t, size=torch.full_like(t.size, m.shape[1])), m),
        lossy,
    ),
    "epsilon for delta": (rules, "typical", lambda t, x, how, *k: plain_typical(t, x, replace(how, delta=how.epsilon), *k), lossy),
    "typical of the filtered distribution": (
        rules,
        "typical",
        lambda t, x, how, *k: plain_typical(t, warp(x, how) * how.temperature, how, *k),
        lossy,
    ),
    "membership without min-p": (rules, "membership", lambda t, x, how, *k: plain_membership(t, x, replace(how, min_p=0.0), *k), lossy),
}


@pytest.mark.faults
def test_every_fault_is_seen(monkeypatch):
    for check in {id(check): check for *_, check in FAULTS.values()}.values():
        assert check() > GREEN, check
    monkeypatch.setattr(rules, "acceptance_probability", loop_reference())
    assert enumeration_holds() and textbook_holds(), "the loop is right without a fault"
    monkeypatch.undo()
    p_values = {}
    for name, (owner, attribute, fault, check) in FAULTS.items():
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, fault)
            p_values[name] = check()
    assert {name: value for name, value in p_values.items() if value >= RED} == {}
    assert len(p_values) == len(FAULTS) == 55
