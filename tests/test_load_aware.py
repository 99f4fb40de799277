"""Load-aware verification: what pays, by hand; plain decoding's output; the output distribution by enumeration; costs, options, refusals."""

from collections import Counter
from itertools import pairwise

import pytest
import torch
from decoding_cases import PROMPTS, SHAPES, relative, texts
from planted import Planted
from zoo import VOCAB, tiny

from draftsmith.eval import loading
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.drafter import NodeOutput, RoundContext
from draftsmith.inference.expand import choose
from draftsmith.inference.level_heads import draft_levels
from draftsmith.inference.load_aware import Admitted, LoadAware, nodes_that_pay
from draftsmith.inference.lookup import Ngram
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import DraftTree, StaticTree
from draftsmith.inference.verify import HostResult, Verdict, verify
from draftsmith.models.drafter import new_drafter
from draftsmith.models.target import Target


@pytest.mark.parametrize(
    ("survival", "seconds", "nodes"),
    [
        ([[1.0, 0.9, 0.5, 0.1]], [1.0, 1.0, 1.0, 1.0], 4),  # free nodes
        ([[1.0, 0.9, 0.5, 0.1]], [1.0, 1.3, 1.6, 1.9], 2),  # 1, 1.46, 1.5 > but …
        ([[1.0, 0.2, 0.1, 0.0]], [1.0, 1.3, 1.6, 1.9], 1),
        ([[1.0, 0.9, 0.0, 0.0], [1.0, 0.8, 0.7, 0.0]], [1.0, 1.5, 1.9, 2.0], 2),
        ([[1.0, 0.1, 0.1, 0.9]], [1.0, 1.5, 1.6, 1.7], 2),  # the likeliest first
        ([[1.0, 0.4, 0.39, 0.38]], [1.0, 1.5, 1.5, 1.5], 1),  # the first that gains nothing ends it
    ],
)
def test_what_pays(survival, seconds, nodes):
    rows = torch.tensor(survival)
    sums = [sum(sum(sorted(row, reverse=True)[:n]) for row in survival) for n in range(1, 5)]
    rates = [total / second for total, second in zip(sums, seconds, strict=True)]
    slow = next((n for n, (now, more) in enumerate(pairwise(rates), 1) if more <= now), 4)
    assert nodes_that_pay(rows, seconds) == slow
    assert slow == nodes or rates[nodes - 1] < rates[slow - 1]


def test_admitted_nodes_form_trees_and_go_back():
    """The likeliest nodes of each row with their parents; path and features come back at the drafted tree's nodes."""
    spec = StaticTree.from_paths([(0,), (0, 0), (1,), (0, 1), (1, 0)])
    drafted = spec.fill(torch.arange(12).view(2, 6))
    scores = torch.tensor([[0.0, 0.5, 0.9, 0.4, 0.05, 0.5], [0.0, 0.1, 0.5, 0.8, 0.4, 0.9]]).clamp(min=1e-9).log()
    drafted.survive(scores)
    by_path = {path: i for i, path in enumerate([(), *spec.paths])}
    expected = torch.ones(2, 6)
    for path, i in by_path.items():
        for end in range(1, len(path) + 1):
            expected[:, i] *= scores[:, by_path[path[:end]]].exp()
    torch.testing.assert_close(drafted.survival, expected)
    for nodes in range(1, 6):
        admitted = Admitted(drafted, nodes)
        admitted.tree.validate()
        for b in range(2):
            best = sorted(range(6), key=lambda i: (-expected[b, i].item(), i))[:nodes]
            assert admitted.tree.tokens[b].tolist() == drafted.tokens[b, sorted(best)].tolist()
            for i, own in enumerate(sorted(best)):
                parent = int(drafted.parents[b, own])
                assert int(admitted.tree.parents[b, i]) == (-1 if parent < 0 else sorted(best).index(parent))
    admitted = Admitted(drafted, 3)
    last = admitted.index[:, 2:]
    path = torch.cat((torch.zeros_like(last), torch.full_like(last, 2)), 1)
    hidden = torch.randn(2, 3, 4)
    verdict, out = admitted.for_drafter(Verdict(path, torch.tensor([2, 2]), torch.tensor([7, 8])), NodeOutput(hidden, hidden[:, :, None]))
    assert verdict.path.tolist() == torch.cat((torch.zeros_like(last), last), 1).tolist()
    torch.testing.assert_close(out.along(verdict.path).hidden, hidden[:, [0, 2]])
    torch.testing.assert_close(out.taps.sum(1), hidden.sum(1, keepdim=True))
    assert [result.tokens for result in verdict.on_host(drafted)] == [[int(admitted.tree.tokens[b, 2]), 7 + b] for b in (0, 1)]


def emitted(p, q, tested):
    """The distribution of the next token: a draft x ~ q is tested against p where tested[x], else the token is drawn from p."""
    chances = torch.zeros_like(p)
    for x, chance in enumerate(q):
        if not tested[x]:
            chances += chance * p
            continue
        accept = min(1.0, float(p[x] / q[x]))
        residual = (p - q).clamp(min=0)
        chances[x] += chance * accept
        chances += chance * (1 - accept) * (residual / residual.sum() if residual.sum() > 0 else 0)
    return chances


def best_of_all(survival, seconds):
    """What must not be: the best number of nodes, with the survival of later tokens in hand."""
    rates = [float(survival[0].sort(descending=True).values[:n].sum()) / seconds[n - 1] for n in range(1, survival.shape[1] + 1)]
    return rates.index(max(rates)) + 1


def test_the_output_distribution_by_enumeration():
    """DSpark's counter-example: the second draft's confidence reads the first draft. Who looks at it before testing the first is lossy."""
    p, q = torch.tensor([[0.7, 0.3], [0.5, 0.5]], dtype=torch.float64).unbind()
    seconds = [1.0, 1.52, 1.6]  # a first node of survival 0.5 does not pay alone, with a sure second one both do
    outcomes = {}
    for name, rule in (("ours", nodes_that_pay), ("leaky", best_of_all)):
        tested = [rule(torch.tensor([[1.0, 0.5, 0.5 * second]]), seconds) > 1 for second in (1.0, 0.0)]
        outcomes[name] = emitted(p, q, tested), tested
    chances, tested = outcomes["ours"]
    torch.testing.assert_close(chances, p, atol=1e-12, rtol=0)
    assert tested[0] == tested[1]
    chances, tested = outcomes["leaky"]
    assert tested == [True, False] and (chances - p).abs().max() > 0.1
    torch.testing.assert_close(chances, torch.tensor([0.85, 0.15], dtype=torch.float64), atol=1e-12, rtol=0)  # the paper's numbers


DISTRIBUTIONS = {  # distributions over six tokens
    "0 to 2": [1, 1, 1, 0, 0, 0], "0 or 1": [1, 1, 0, 0, 0, 0], "4 or 5": [0, 0, 0, 0, 1, 1], "3": [0, 0, 0, 1, 0, 0], "4": [0, 0, 0, 0, 1, 0],
    "5": [0, 0, 0, 0, 0, 1], "any": [1, 1, 1, 1, 1, 1],
}  # fmt: skip


def distributions(names):
    """[len(names),6] logits."""
    return torch.tensor([DISTRIBUTIONS[name] for name in names], dtype=torch.float32).log().clamp(min=-1e9)


def decode_round(spec, texts, keys, q, p, seconds, together, aware):
    """One round of `together` rows at a time, by rejection: each text grows by what is accepted and one token.

    Args:
        q, p: name the drafter's and the target's distribution after row and text.
    """
    rows, positions = torch.arange(len(texts)), torch.tensor([len(text) - 1 for text in texts])
    roots, sampling = torch.tensor([text[-1] for text in texts]), Sampling(1.0, seed=3, rule="rejection")
    round = RoundContext(rows.tolist(), rows, roots, positions, keys, sampling, spec.max_depth, scored=True)
    drafted = [[list(text)] for text in texts]

    def logits_of(k, level):
        if level is not None:
            for b, (tokens, parents) in enumerate(
                zip(level.tokens.tolist(), level.parent_index.expand(len(texts), -1).tolist(), strict=True)
            ):
                drafted[b] = [[*drafted[b][parent], token] for token, parent in zip(tokens, parents, strict=True)]
        return distributions([q(b, text) for b, nodes in enumerate(drafted) for text in nodes]).view(len(texts), -1, 6)

    tree = draft_levels(spec, spec.max_depth, round, logits_of)
    by_width = {}
    for first in range(0, len(texts), together):
        group = list(range(first, first + together))
        width = nodes_that_pay(tree.survival[group], seconds) if aware else len(spec.paths) + 1
        by_width.setdefault(width, []).extend(group)
    for width, group in by_width.items():
        parents = tree.parents.expand(len(texts), -1)[group]
        part = DraftTree.build(tree.tokens[group], parents, tree.size[group], tree.q_logits[group])
        part.survival = tree.survival[group]
        admitted = Admitted(part, width).tree if width <= len(spec.paths) else part
        names = []
        for i, b in enumerate(group):
            nodes = [list(texts[b])]
            for node in range(1, admitted.tokens.shape[1]):
                nodes.append([*nodes[int(admitted.parents.expand(len(group), -1)[i, node])], int(admitted.tokens[i, node])])
            names += [p(b, text) for text in nodes]
        verdict = verify(admitted, distributions(names).view(len(group), -1, 6), sampling, keys[group], positions[group], spec.max_depth)
        for i, b in enumerate(group):
            texts[b] += [int(admitted.tokens[i, node]) for node in verdict.path[i].tolist() if node > 0] + [int(verdict.next_token[i])]
    return Counter({width: len(group) for width, group in by_width.items()})


@pytest.mark.parametrize("aware", [False, True])
def test_draws_elsewhere_in_a_tree_say_nothing_of_a_draft(aware):
    """A node's child may make more nodes pay, another node's child among them. If both were drawn with one noise, the second would be tested
    for what it is."""
    spec = StaticTree.from_paths([(0,), (1,), (0, 0), (1, 0), (1, 0, 0)])

    def q(b, text):
        return {1: "4 or 5", 2: "0 to 2" if text[-1] == 4 else "0 or 1"}.get(len(text)) or ("3" if text[1:] == [5, 0] else "any")

    def p(b, text):
        return "any" if len(text) > 2 else q(b, text)

    texts = [[0] for _ in range(3000)]
    widths = decode_round(spec, texts, torch.arange(3000), q, p, [1.0, 1.01, 1.02, 1.03, 1.04, 9.0], 1, aware)
    second = Counter(text[2] for text in texts if text[1] == 4 and len(text) > 2)
    assert second.total() > 1000 and widths == {5 if aware else 6: 3000}  # which five of the six nodes, survival decides
    assert (
        sum((count - second.total() / 3) ** 2 for count in second.values()) / (second.total() / 3) < 13.8
    )  # χ², 2 degrees of freedom: 0.1 %


@pytest.mark.parametrize("aware", [False, True])
def test_what_was_drawn_in_vain_says_nothing_of_later_draws(aware):
    """Row 0's unverified third draft decides how many of row 1's nodes are verified, and so whether the same index is tested a round later."""
    spec = StaticTree.chain(3)

    def q(b, text):
        if b % 2:
            return "5" if len(text) % 4 else "any"
        return {1: "5", 2: "0 or 1"}.get(len(text)) or ("5" if text[2] == 0 else "any")

    def p(b, text):
        return "5" if b % 2 else {1: "4", 2: "0 or 1"}.get(len(text), "any")

    texts, widths = [[2] for _ in range(3000)], Counter()
    for _ in range(2):
        widths += decode_round(spec, texts, torch.arange(3000), q, p, [1.0, 1.5, 1.9, 2.35], 2, aware)
    second = Counter(text[2] for text in texts[::2])
    assert second.total() == 1500 and set(second) == {0, 1} and (len(widths) > 1) == aware
    assert abs(second[0] - 750) < 3.3 * 1500**0.5 / 2  # 0.1 %


@pytest.mark.parametrize("rule", ["rejection", "rejection-replacement", "target-sample"])
def test_survival_says_nothing_of_what_is_drawn(rule):
    """Scores of drawn children are those of the likeliest tokens, whatever was drawn; of ranked ones their own."""
    logits, index, ids = torch.randn(1, 1, 9, generator=torch.Generator().manual_seed(0)), torch.zeros(1, 1, dtype=torch.int64), set()
    for seed in range(5):
        round = RoundContext([0], index[0], index[0], index[0], index[0], Sampling(1.0, seed=seed, rule=rule), 3, scored=True)
        drawn, scores, _ = choose(logits, 3, round, index, True)
        ids.add(tuple(drawn.flatten().tolist()))
        torch.testing.assert_close(scores, logits.log_softmax(-1).topk(3).values)
    assert len(ids) > 1 or rule == "target-sample"


class Varying(LoadAware):
    """Admits 1, 2, 3, … nodes in turn, whatever the clock says."""

    def depth(self, slots):
        return self.max_depth

    def admit(self, tree, drafted_s):
        super().admit(tree, drafted_s) if any(times.get(0) for times in self._seconds.values()) else None
        self.turn = getattr(self, "turn", 0) + 1
        nodes = 1 + self.turn % tree.tokens.shape[1]
        return Admitted(tree, nodes) if nodes < tree.tokens.shape[1] else None


SAMPLINGS = [Sampling(), Sampling(0.9, top_k=20, seed=11, rule="target-sample"), Sampling(0.8, seed=5, rule="shared-noise")]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["draft model", "eagle", "dspark", "medusa"])
def test_output_is_plain_decodings(kind, shape):
    """Every width in turn, and by the clock; drafters with caches of their own, features, one forward or several."""
    target, seen = Target.wrap(tiny("llama")), Counter()
    for sampling in SAMPLINGS:
        plain = texts(Decoder(target).generate(PROMPTS, sampling, 22, ()))
        for adaptive in (Varying(), LoadAware()):
            if kind == "draft model":
                drafter = DraftModel(relative("llama"), SHAPES[shape], chunk=5)
            else:
                sizes = {"eagle": {"taps": [0, 1], "num_heads": 4}, "dspark": {"taps": [0], "num_heads": 4, "block_size": 4}}
                torch.manual_seed(0)
                drafter = new_drafter(kind, target, **sizes.get(kind, {"num_heads": 4})).eval()
                drafter.tree_spec = SHAPES[shape]
                drafter.propose = Planted(drafter.propose, PROMPTS, plain, VOCAB)
            out = Decoder(target, drafter, slots=2, adaptive=adaptive).generate(PROMPTS, sampling, 22, ())
            assert texts(out) == plain
            seen.update((type(adaptive).__name__, round.size, round.accepted) for text in out for round in text.rounds)
    assert len({size for name, size, _ in seen if name == "Varying"}) == SHAPES[shape].num_nodes
    assert {accepted for _, _, accepted in seen} >= {1, 2, 3}


def test_costs_are_measured_without_drafting():
    """Plain rounds come first; afterwards c(N) says how many nodes pay."""
    load = LoadAware()
    load.bind(4)
    drafted = StaticTree.chain(4).fill(torch.arange(5)[None])
    drafted.survive(torch.tensor([[0.0, 0.9, 0.8, 0.7, 0.6]]).clamp(min=1e-9).log())

    def result(size):
        return [HostResult(1, size, size - 1, True, [0])]

    for _ in range(3):
        assert load.depth([0]) == 0
        load.learn([0], result(1), 1.0)
        if not load.needs_plain_round:
            break
    assert load.depth([0]) == 4
    assert load.admit(drafted, 0.5) is None  # nodes are thought cheap at first
    for size, seconds in ((5, 3.0), (3, 1.1), (2, 1.05)):
        for _ in range(4):
            load._drafted_s = 0.5
            load.learn([0], result(size), seconds + 0.5)
    assert load.costs(1, 4) == pytest.approx([1.0, 1.05, 1.1, 2.05, 3.0])
    admitted = load.admit(drafted, 0.5)
    assert admitted is not None and admitted.tree.tokens.shape == (1, 3)
    assert load.admit(drafted, 10.0) is None, "beside so long a draft verifying is cheap"
    for scores in (torch.full((1, 5), 1e-3), torch.tensor([[0.0, 0.0, 1e-3, -1.0, 1e-3]])):
        drafted.survive(scores)  # rounding above 0 lifts no child above its parent
        assert (drafted.survival.diff(dim=1) <= 0).all() and drafted.survival.max() <= 1


def test_refusals():
    target = Target.wrap(tiny("llama"))
    with pytest.raises(ValueError, match="got trees without probabilities, as a look-up's are; expected a drafter with weights"):
        Decoder(target, Ngram(StaticTree.chain(3)), adaptive=LoadAware()).generate([[1, 2, 3] * 5], max_new_tokens=20, stop_ids=())
    with pytest.raises(ValueError, match="--load-aware: .* has no probabilities of its drafts"):
        loading.check_load_aware(Ngram(StaticTree.chain(3)))
    loading.check_load_aware(DraftModel(relative("llama"), StaticTree.chain(2)))


def test_with_one_request_it_is_the_width_rule_of_cast():
    """Nodes in the order of their marginal mass, as a best-first tree has them; verifying takes first + slope · (N − 1)."""
    sizes = set()
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        mass = torch.rand(15, generator=generator, dtype=torch.float64).sort(descending=True).values ** 2
        first, slope = 1.0, 0.3 * torch.rand((), generator=generator, dtype=torch.float64).item()
        nodes, tokens = 1, 1.0
        while nodes < 16 and mass[nodes - 1] > slope * tokens / (first + slope * (nodes - 1)):
            tokens += mass[nodes - 1].item()
            nodes += 1
        survival = torch.cat((torch.ones(1, dtype=torch.float64), mass[torch.randperm(15, generator=generator)]))
        assert nodes_that_pay(survival[None], [first + slope * extra for extra in range(16)]) == nodes
        sizes.add(nodes)
    assert len(sizes) > 8
