"""Prompt lookup and suffix decoding against slow forms that search the text itself, and through the decoder against plain decoding."""

import random
from collections import Counter
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from zoo import VOCAB, tiny

from draftsmith.inference import lookup
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.drafter import Drafter, RoundContext
from draftsmith.inference.expand import DynamicTree
from draftsmith.inference.lookup import END, LONGEST, MOST, ORDERS, Corpus, Ngram, Suffix
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import DraftTree, StaticTree
from draftsmith.inference.verify import HostResult, Verdict
from draftsmith.models.target import Target

SPARSE = StaticTree.from_paths([(0,), (1,), (2,), (0, 0), (0, 2), (1, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0), (0, 0, 0, 0)])
SHAPES = {
    "chain": StaticTree.chain(6),
    "full": StaticTree.cartesian((3, 2, 2)),
    "sparse": SPARSE,
    "beam": DynamicTree(5, 3, 12),
    "narrow": DynamicTree(4, 1, 12),
    "small": DynamicTree(8, 4, 5),
}


def bound(drafter, rows: int = 1, vocab: int = 100):
    drafter.bind(SimpleNamespace(vocab_size=vocab), rows, 1000)
    return drafter


def asking(rows: list[int], roots: list[int], depth: int) -> RoundContext:
    root = torch.tensor(roots)
    return RoundContext(rows, torch.tensor(rows), root, torch.zeros_like(root), torch.zeros_like(root), Sampling(), depth)


def say(drafter, row: int, tokens: list[int]) -> None:
    """A round with the root alone that emitted `tokens`."""
    tree, last = DraftTree.root(torch.tensor([0])), torch.tensor([tokens[-1]])
    told = [HostResult(len(tokens), 1, 0, True, list(tokens))]
    drafter.accept(asking([row], [0], 1), tree, Verdict(tree.parents, tree.size, last, told), None)


def begin(drafter, row: int, text: list[int]) -> None:
    """Give `text` as a prompt and, from its half on, as rounds of one and of three tokens."""
    half = (len(text) + 1) // 2
    drafter.start([row], [text[:half]], None)
    while half < len(text):
        say(drafter, row, text[half : half + 1 + 2 * (half % 2)])
        half += 1 + 2 * (half % 2)


def propose(drafter, rows: list[int], texts: list[list[int]], depth: int) -> list[list[tuple[int, ...]]]:
    """The round's tree, checked for what holds of any tree -> the token paths of each row's nodes after the root, in node order."""
    tree = drafter.propose(asking(rows, [text[-1] for text in texts], depth))
    tree.validate()
    assert tree.tokens[:, 0].tolist() == [text[-1] for text in texts]
    sizes = tree.size.tolist()
    assert tree.tokens.shape[1] == max(sizes) <= drafter.max_nodes and int(tree.depth.max()) <= min(depth, drafter.max_depth)
    out = []
    for size, tokens, parents in zip(sizes, tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths: list[tuple[int, ...]] = [()]
        for i in range(1, size):
            paths.append((*paths[parents[i]], tokens[i]))
        assert len(set(paths)) == size, "siblings carry different tokens"
        out.append(paths[1:])
    return out


def follow(text: list[int], place: int, depth: int) -> list[int]:
    """What a copy that starts at `place` gives, a token at a time, its own tokens included."""
    text = list(text)
    count = len(text)
    for step in range(depth):
        text.append(text[place + step])
    return text[count:]


def ranks(runs: list[list[int]], depth: int) -> tuple[Counter, dict]:
    """Of every prefix of the runs: how many have it, and its rank path, by count and then by the first run that has it."""
    counts, first = Counter(), {}
    for number, run in enumerate(runs):
        for k in range(1, min(depth, len(run)) + 1):
            counts[tuple(run[:k])] += 1
            first.setdefault(tuple(run[:k]), number)
    path = {(): ()}
    for prefix in sorted(counts, key=lambda prefix: (len(prefix), -counts[prefix], first[prefix])):
        siblings = sum(len(other) == len(prefix) and other[:-1] == prefix[:-1] for other in path)
        path[prefix] = (*path[prefix[:-1]], siblings)
    return counts, path


def allowed(shape, counts: Counter, path: dict, total: int, least: float) -> set:
    if isinstance(shape, DynamicTree):
        fits = {prefix for prefix in counts if max(path[prefix]) < shape.width and len(prefix) <= shape.depth}
    else:
        fits = {prefix for prefix in counts if path[prefix] in shape.paths}
    return {prefix for prefix in fits if counts[prefix] >= least * total - 1e-9}


def check_trie(nodes: list[tuple[int, ...]], runs: list[list[int]], shape, depth: int, budget: int, least: float = 0.0) -> int:
    """The nodes are the likeliest of the trie that the shape allows -> the sum of their counts."""
    counts, path = ranks(runs, min(depth, shape.max_depth))
    fits = allowed(shape, counts, path, len(runs), least)
    assert set(nodes) <= fits and len(nodes) == min(budget, len(fits))
    assert sorted(counts[node] for node in nodes) == sorted(counts[prefix] for prefix in fits)[len(fits) - len(nodes) :]
    left = [not any(path[node]) for node in nodes]
    assert left == sorted(left, reverse=True), "the leftmost chain comes first"
    for i, node in enumerate(nodes):
        rank = [path[other][-1] for other in nodes[:i] if other[:-1] == node[:-1]]
        assert all(other < path[node][-1] for other in rank), "siblings by rank"
    return sum(counts[node] for node in nodes)


def make_text(rng: random.Random, letters: int, size: int) -> list[int]:
    """Random letters and copies of earlier pieces, so that long matches occur."""
    text = [rng.randrange(letters)]
    while len(text) < size:
        if rng.random() < 0.3:
            start = rng.randrange(len(text))
            text += text[start : start + rng.randint(2, 12)]
        else:
            text.append(rng.randrange(letters))
    return text[:size]


def occurrences(text: list[int], size: int) -> list[int]:
    """Places after an earlier occurrence of the last `size` tokens, the most recent first."""
    return [end for end in range(len(text) - 1, size - 1, -1) if text[end - size : end] == text[len(text) - size :]]


@pytest.mark.parametrize("longest, shortest", [(3, 2), (3, 1), (1, 1), (5, 3)])
def test_ngram_chain_copies_the_last_longest_match(longest, shortest):
    rng, seen = random.Random(longest), Counter()
    for trial in range(250):
        text = make_text(rng, rng.choice((2, 3, 6, 20)), rng.randint(1, 60))
        depth = rng.randint(1, 8)
        factor = rng.choice((1.0, 1.5, 2.0, 9.0))
        drafter = bound(Ngram(StaticTree.chain(6), longest, shortest, factor))
        begin(drafter, 0, text)
        sizes = [size for size in range(longest, shortest - 1, -1) if occurrences(text, size)]
        place = occurrences(text, sizes[0])[0] if sizes else 0
        length = min(depth, 6, int(factor * shared(text, place, text)))
        seen["cut by the match"] += 0 < length < min(depth, 6)
        expected = follow(text, place, length) if sizes else []
        (nodes,) = propose(drafter, [0], [text], depth)
        assert nodes == [tuple(expected[: k + 1]) for k in range(len(expected))], f"trial {trial}"
        seen[sizes[0] if sizes else 0] += 1
        seen["over"] += bool(sizes) and place + length > len(text)
        seen["short"] += depth < 6
    assert set(range(shortest, longest + 1)) | {0} <= set(seen) and min(seen.values()) >= 5


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_ngram_merges_the_last_few_matches(name):
    shape, rng, seen = SHAPES[name], random.Random(7), Counter()
    few = 1 if name in ("chain", "narrow") else lookup.FEW
    for _ in range(120):
        text = make_text(rng, rng.choice((2, 3, 5)), rng.randint(1, 70))
        depth = rng.randint(1, 9)
        drafter = bound(Ngram(shape))
        begin(drafter, 0, text)
        places = next((found for size in (3, 2, 1) if (found := occurrences(text, size))), [])
        (nodes,) = propose(drafter, [0], [text], depth)
        length = min(depth, 2 * shared(text, places[0], text)) if places else 0
        check_trie(nodes, [follow(text, place, length) for place in places[:few]], shape, depth, shape.num_nodes - 1)
        seen["cut"] += len(places) > few
        seen["branches"] += len({node[0] for node in nodes}) > 1
        seen["nothing"] += not nodes
        seen["full"] += len(nodes) == shape.num_nodes - 1
    assert min(seen["cut"], seen["nothing"], seen["full"] + 5 * (name in ("full", "sparse"))) >= 5
    assert seen["branches"] >= 20 or few == 1


def shared(text: list[int], place: int, end: list[int]) -> int:
    """How many tokens before `place` are the last of `end`."""
    size = 0
    while size < min(LONGEST, place, len(end)) and text[place - 1 - size] == end[len(end) - 1 - size]:
        size += 1
    return size


def candidates(text: list[int], memory: list[list[int]], depth: int) -> list[list[tuple[int, list[int]]]]:
    """(match length, run) of the row's own text and of memory, the most recent first, of too many those of the rarer n-grams."""
    own = [(shared(text, end, text), follow(text, end, depth)) for end in range(len(text) - 1, 0, -1)]
    old = [(shared(answer, end, text), answer[end : end + depth]) for answer in reversed(memory) for end in range(len(answer) - 1, 0, -1)]
    out = []
    for found in (own, old):
        found = [(number, *one) for number, one in enumerate(found) if one[0]]
        found.sort(key=lambda one: (-max(order for order in ORDERS if order <= one[1]), one[0]))
        out.append([(size, run) for _, size, run in sorted(found[:MOST])])
    return out


def best_match(sources, shape, depth: int, factor: float, offset: float, least: float):
    """Every source and every match length -> the best score, the longest length that has it, its runs and budget, and its source."""
    best = (Fraction(0), 0, [], 0, -1)
    for source, found in enumerate(sources):
        for length in range(LONGEST, 0, -1):
            runs = [run for size, run in found if size >= length]
            if not runs:
                continue
            budget = max(0, min(shape.num_nodes - 1, int(factor * length + offset)))
            counts, path = ranks(runs, min(depth, shape.max_depth))
            fits = sorted((counts[prefix] for prefix in allowed(shape, counts, path, len(runs), least)), reverse=True)
            score = Fraction(sum(fits[:budget]), len(runs))
            if score > best[0]:
                best = (score, length, runs, budget, source)
    return best


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_suffix_takes_the_draft_that_promises_most(name):
    shape, rng, seen = SHAPES[name], random.Random(3), Counter()
    for trial in range(300):
        factor, offset, least = rng.choice(((1.0, 0.0, 0.1), (2.0, 1.0, 0.01), (0.5, 9.0, 0.6), (1.5, -1.0, 0.3)))
        letters, limit = rng.choice((2, 3, 5, 9)), rng.choice((0, 40, 90))
        drafter = bound(Suffix(shape, limit, factor, offset, least), 2)
        memory: list[list[int]] = []
        source = make_text(rng, letters, 100)
        for _ in range(rng.randint(0, 5)):
            start, size = rng.randrange(90), rng.randint(1, 30)
            answer = source[start : start + size]
            drafter.start([1], [[letters]], None)  # a prompt of a letter of its own
            say(drafter, 1, answer)
            drafter.drop([1])
            memory.append([letters, *answer])
        while sum(len(answer) + 1 for answer in memory) > limit:
            memory.pop(0)
            seen["forgotten"] += limit > 0
        text = make_text(rng, letters, rng.randint(1, 70)) + rng.choice(([], source[40 : rng.randint(41, 60)]))
        depth = rng.randint(1, 9)
        begin(drafter, 0, text)
        sources = candidates(text, memory, depth)
        score, length, runs, budget, source_number = best_match(sources, shape, depth, factor, offset, least)
        (nodes,) = propose(drafter, [0], [text], depth)
        if score:
            assert Fraction(check_trie(nodes, runs, shape, depth, budget, least), len(runs)) == score, f"trial {trial}"
        else:
            assert nodes == []
        seen["memory"] += source_number == 1
        seen["own"] += source_number == 0
        seen["shorter"] += 0 < length < max((size for size, _ in sources[source_number]), default=0)
        seen["over"] += any(len(text) - end < depth for end in range(len(text)) if source_number == 0 and shared(text, end, text) >= length)
        seen["nothing"] += not nodes
        if score:
            seen["unlikely"] += len(nodes) < min(budget, len(allowed(shape, *ranks(runs, min(depth, shape.max_depth)), len(runs), 0.0)))
    assert min(seen[what] for what in ("memory", "own", "forgotten", "over", "nothing", "unlikely")) >= 5, seen
    assert seen["shorter"] >= 1


def test_matches_are_all_up_to_the_cap():
    rng, capped, longest, some = random.Random(4), 0, 0, 0
    for _ in range(150):
        text = make_text(rng, rng.choice((2, 3, 8)), rng.randint(1, 150)) + rng.choice(([], [0, 1] * rng.randint(1, 30)))
        depth, (own, memory) = rng.randint(1, 6), (Corpus(ORDERS), Corpus(ORDERS))
        answers = [make_text(rng, 3, rng.randint(1, 60)) for _ in range(3)]
        own.extend(text)
        for answer in answers:
            memory.extend(answer)
            memory.close()
        expected = candidates(text, answers, depth)
        assert [own.matches(text, depth), memory.matches(text, depth)] == expected
        capped += any(len(found) == MOST for found in expected)
        longest += any(size == LONGEST for found in expected for size, _ in found)
        some += any(0 < len(found) < MOST for found in expected)
    assert min(capped, longest, some) >= 20


def test_copies_run_over_the_end():
    text = [9, 1, 2, 3, 1, 2, 3, 1, 2]
    for drafter in (Ngram(StaticTree.chain(8)), Suffix(StaticTree.chain(8), factor=8.0)):
        begin(bound(drafter), 0, text)
        assert propose(drafter, [0], [text], 8)[0][-1] == (3, 1, 2, 3, 1, 2, 3, 1)
        assert propose(drafter, [0], [text], 3)[0][-1] == (3, 1, 2)


def test_rows_are_padded_and_independent():
    texts = {4: [1, 2, 3, 4, 1, 2], 0: [5, 6], 2: [7, 7, 7, 7, 7], 1: [3]}
    for drafter in (Ngram(StaticTree.chain(5)), Ngram(DynamicTree(5, 2, 6)), Suffix(factor=5.0)):
        assert isinstance(drafter, Drafter) and not drafter.capturable and drafter.taps == ()
        assert (drafter.max_nodes, drafter.max_depth) == (drafter.tree_spec.num_nodes, drafter.tree_spec.max_depth)
        bound(drafter, 5)
        for row, text in texts.items():
            begin(drafter, row, text)
        rows = [0, 1, 2, 4]
        nodes = propose(drafter, rows, [texts[row] for row in rows], 4)
        assert [len(one) for one in nodes] == [0, 0, 4, 4]
        assert nodes[2][-1] == (7, 7, 7, 7) and nodes[3][-1] == (3, 4, 1, 2)
        alone = drafter.propose(asking([0, 1], [6, 3], 4))
        assert alone.tokens.tolist() == [[6], [3]] and alone.size.tolist() == [1, 1]
        drafter.drop([4, 2])
        begin(drafter, 4, [8, 9])  # another prompt takes the row: nothing of the old one is left
        say(drafter, 4, [1, 2])
        assert propose(drafter, [0, 4], [texts[0], [8, 9, 1, 2]], 4) == [[], []]


def test_another_shape_counts_from_bind_on():
    text = [1, 2, 3, 1, 2, 4, 1, 2]
    for drafter in (Ngram(), Suffix(factor=9.0)):
        for shape, count in (
            (StaticTree.chain(1), 1),
            (StaticTree.cartesian((2,)), 2),
            (StaticTree.chain(3), 3),
            (DynamicTree(2, 2, 4), 3),
        ):
            drafter.tree_spec = shape
            assert bound(drafter)._rows == {}
            begin(drafter, 0, text)
            assert len(propose(drafter, [0], [text], 9)[0]) == count and drafter.max_nodes >= count + 1


def test_memory_outlives_calls_but_not_the_vocabulary():
    for memory in (0, 100):
        drafter = bound(Suffix(StaticTree.chain(4), memory))
        begin(drafter, 0, [1, 2, 3, 4, 5, 6])
        drafter.drop([0])
        for vocab, nodes in ((100, 3), (100, 3), (101, 0), (100, 0)):
            begin(bound(drafter, vocab=vocab), 0, [2, 3])
            expected = [(4,), (4, 5), (4, 5, 6)][: nodes if memory else 0]
            assert propose(drafter, [0], [[2, 3]], 4)[0] == expected


def test_memory_holds_answers_in_order_and_within_its_bound():
    rng = random.Random(1)
    drafter, kept, dropped = bound(Suffix(memory=120), 3), [], 0
    for _ in range(60):
        prompt, answer = ([rng.randrange(9) for _ in range(rng.randint(1, size))] for size in (60, 50))
        row = rng.randrange(3)
        drafter.start([row], [prompt], None)
        say(drafter, row, answer)
        drafter.drop([row])
        kept.append((prompt[-LONGEST:] + answer)[-119:])
        while sum(len(one) + 1 for one in kept) > 120:
            kept.pop(0)
            dropped += 1
        assert drafter._finished.tokens == [token for one in kept for token in (*one, END)]
    assert dropped >= 30 and len(kept) >= 1
    drafter.start([0], [[1]], None)
    say(drafter, 0, list(range(200)))  # longer than all of memory
    drafter.drop([0])
    assert drafter._finished.tokens == [*range(81, 200), END]


def test_corpus_forgets_without_a_trace():
    """What is left answers as a fresh corpus of the rest does, and no larger."""
    rng = random.Random(2)
    for _ in range(40):
        texts = [make_text(rng, 3, rng.randint(1, 30)) for _ in range(6)]
        gone = rng.randint(1, 5)
        old, new = Corpus((3, 2, 1)), Corpus((3, 2, 1))
        for number, text in enumerate(texts):
            for corpus in (old, new)[: 1 + (number >= gone)]:
                corpus.extend(text)
                corpus.close()
        for _ in range(gone):
            old.forget()
        assert old.tokens == new.tokens and old.first == sum(len(text) + 1 for text in texts[:gone])
        query = make_text(rng, 3, 12)
        assert old.matches(query, 5) == new.matches(query, 5)
        for order in (3, 2, 1):
            places = [place + old.first for place in new.places(query, order)]
            assert list(old.places(query, order)) == places
            (last, before), (fresh, links) = old._index[order], new._index[order]
            assert last.keys() == fresh.keys() and len(before) == len(links) == len(old.tokens)
            old_text = [[text[i : i + order] for i in range(len(text) - order)] for text in texts[gone:]]
            assert len(places) == sum(found.count(query[-order:]) for found in old_text)


def test_arguments_are_checked():
    for make, message in (
        (lambda: Ngram(longest=2, shortest=3), "3 to 2"),
        (lambda: Ngram(shortest=0), "0 to 3"),
        (lambda: Suffix(memory=-1), "memory -1"),
        (lambda: Suffix(factor=-0.5), "factor -0.5"),
        (lambda: Suffix(least=0.0), "least 0.0"),
        (lambda: Suffix(least=1.5), "least 1.5"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


NEW = 40
SAMPLED = Sampling(temperature=0.9, top_k=20, top_p=0.95, min_p=0.01, seed=11)
GROWN = {"chain": StaticTree.chain(7), "static": StaticTree.cartesian((3, 2, 1, 1)), "dynamic": DynamicTree(6, 3, 14)}


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [(torch.randint(VOCAB, (count,), generator=generator).tolist() * 2)[:25] for count in (1, 5, 19, 3, 11)]


PROMPTS = make_prompts()


class Spy:
    """What was accepted, and in how many rounds the accepted path was not 0, 1, 2, …; gives a row text to read before its prompt."""

    def __init__(self, *args, hints=(), **options) -> None:
        super().__init__(*args, **options)
        self.hints = {tuple(prompt): text for prompt, text in hints}
        self.clear()

    def clear(self) -> None:
        self.accepted, self.drafted, self.moved, self.rounds = 0, 0, 0, 0

    def start(self, rows, prompts, out):
        super().start(rows, [self.hints.get(tuple(prompt), []) + prompt for prompt in prompts], out)

    def propose(self, round):
        tree = super().propose(round)
        tree.validate()
        return tree

    def accept(self, round, tree, verdict, out):
        super().accept(round, tree, verdict, out)
        for told in verdict.on_host(tree):
            self.rounds += 1
            self.accepted += told.length - 1
            self.drafted += told.size > 1
            self.moved += not told.in_place


class SpiedNgram(Spy, Ngram):
    pass


class SpiedSuffix(Spy, Suffix):
    pass


@pytest.fixture(scope="module")
def decoded():
    """By sampling: a target, its plain answers, and those of two other keys."""
    target = Target.wrap(tiny("qwen3"))
    out = {}
    for sampling in (Sampling(), SAMPLED):
        plain = Decoder(target, slots=5)
        out[sampling] = [
            [answer.tokens for answer in plain.generate(PROMPTS, sampling, NEW, (), requests=[key + 5 * other for key in range(5)])]
            for other in range(3)
        ]
    assert out[SAMPLED][0] != out[SAMPLED][1]
    return target, out


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", sorted(GROWN))
def test_lookup_equals_plain(decoded, name, sampling, rows):
    target, answers = decoded[0], decoded[1][sampling]
    # What a random model samples hardly repeats: let it be read beforehand, and what other keys gave, so that trees branch.
    hints = [(prompt, sum((prompt + answers[key][i] for key in (1, 0, 2)), [])) for i, prompt in enumerate(PROMPTS)]
    makers = [lambda: SpiedNgram(GROWN[name], hints=hints), lambda: SpiedSuffix(GROWN[name], hints=hints, offset=2.0)]
    if sampling.greedy:  # loops, and needs no hint
        makers += [lambda: SpiedNgram(GROWN[name]), lambda: SpiedSuffix(GROWN[name])]
    for make in makers:
        drafter = make()
        out = Decoder(target, drafter, slots=rows).generate(PROMPTS, sampling, NEW, ())
        assert [one.tokens for one in out] == answers[0]
        assert drafter.accepted >= 40 and drafter.drafted >= 20, (drafter.accepted, drafter.drafted)
        assert drafter.rounds == sum(len(one.rounds) for one in out) <= 5 * NEW - 40
        assert drafter.moved == 0 if name == "chain" else drafter.moved >= 1 or sampling.greedy
        assert max(round.size for one in out for round in one.rounds) > 2
        assert drafter._rows == {}, "every row was dropped"


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", sorted(GROWN))
def test_suffix_remembers_what_it_decoded(decoded, name, sampling, rows):
    target, answers = decoded[0], decoded[1][sampling]
    drafter = SpiedSuffix(GROWN[name], memory=1000)
    decoder = Decoder(target, drafter, slots=rows)
    first: list[int] = []
    for again in range(2):
        drafter.clear()
        out = decoder.generate(PROMPTS, sampling, NEW, ())
        assert [one.tokens for one in out] == answers[0]
        if not again:
            first = [drafter.accepted, drafter.rounds]
    deepest = GROWN[name].max_depth
    assert drafter.accepted > first[0] and drafter.rounds < first[1] / 2
    assert sum(round.accepted == deepest + 1 for one in out for round in one.rounds) > drafter.rounds / 2, "most rounds accept all"


def test_other_keys_make_branches(decoded):
    """Memory of the same prompts under other noise: what is right need not be the likeliest."""
    target, answers = decoded
    drafter = SpiedSuffix(GROWN["dynamic"], memory=2000, offset=3.0)
    decoder = Decoder(target, drafter, slots=2)
    for number, key in enumerate((0, 1, 2, 0, 1, 2)):
        if number == 3:
            drafter.clear()
        out = decoder.generate(PROMPTS, SAMPLED, NEW, (), requests=[i + 5 * key for i in range(5)])
        assert [one.tokens for one in out] == answers[SAMPLED][key]
    assert drafter.moved >= 2 and drafter.accepted >= 300


def test_a_stream_that_is_left_and_a_stop_token(decoded):
    """Rows that end early, in the middle of what was accepted, are remembered and do no harm."""
    target, answers = decoded[0], decoded[1][Sampling()][0]
    drafter = SpiedSuffix(GROWN["chain"], memory=1000)
    decoder = Decoder(target, drafter, slots=2)
    stream = decoder.stream(PROMPTS, max_new_tokens=NEW, stop_ids=())
    for _ in range(3):
        next(stream)
    stream.close()
    assert drafter._rows == {} and drafter._finished.tokens.count(END) == 2
    for _ in range(2):
        out = decoder.generate(PROMPTS, max_new_tokens=NEW, stop_ids={answers[0][9]})
        for one, answer in zip(out, answers, strict=True):
            assert one.tokens == answer[: len(one.tokens)] and len(one.tokens) == NEW or one.tokens[-1] == answers[0][9]
