"""Prompt lookup and suffix decoding against slow references that search the text itself, and through the decoder against plain decoding."""

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
from draftsmith.inference.lookup import END, MAX_MATCH, MAX_OCCURRENCES, ORDERS, Ngram, NgramIndex, Suffix
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import DraftTree, StaticTree
from draftsmith.inference.verify import HostResult, Verdict
from draftsmith.models.target import Target

SPARSE = StaticTree.from_paths([(0,), (1,), (2,), (0, 0), (0, 2), (1, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0), (0, 0, 0, 0)])
SHAPES = {
    "chain": StaticTree.chain(6),
    "full": StaticTree.cartesian((3, 2, 2)),
    "sparse": SPARSE,
    "dynamic": DynamicTree(5, 3, 12),
    "narrow": DynamicTree(4, 1, 12),
    "small": DynamicTree(8, 4, 5),
}


def bound(drafter, slots: int = 1, vocab: int = 100):
    drafter.bind(SimpleNamespace(vocab_size=vocab), slots, 1000)
    return drafter


def round_of(slots: list[int], last_tokens: list[int], depth: int) -> RoundContext:
    last = torch.tensor(last_tokens)
    return RoundContext(slots, torch.tensor(slots), last, torch.zeros_like(last), torch.zeros_like(last), Sampling(), depth)


def emit(drafter, slot: int, tokens: list[int]) -> None:
    """A round with the root alone that emitted `tokens`."""
    tree, last = DraftTree.root(torch.tensor([0])), torch.tensor([tokens[-1]])
    results = [HostResult(len(tokens), 1, 0, True, list(tokens))]
    drafter.accept(round_of([slot], [0], 1), tree, Verdict(tree.parents, tree.size, last, results), None)


def begin(drafter, slot: int, text: list[int]) -> None:
    """Give the first half of `text` as a prompt and the rest as rounds of one and of three tokens."""
    half = (len(text) + 1) // 2
    drafter.start([slot], [text[:half]], None)
    while half < len(text):
        emit(drafter, slot, text[half : half + 1 + 2 * (half % 2)])
        half += 1 + 2 * (half % 2)


def propose(drafter, slots: list[int], texts: list[list[int]], depth: int) -> list[list[tuple[int, ...]]]:
    """Check the round's tree for what holds of any tree -> the token paths of each slot's nodes after the root, in node order."""
    tree = drafter.propose(round_of(slots, [text[-1] for text in texts], depth))
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


def follow(text: list[int], position: int, depth: int) -> list[int]:
    """A copy from `position` on, token by token, which continues with its own tokens."""
    text = list(text)
    count = len(text)
    for step in range(depth):
        text.append(text[position + step])
    return text[count:]


def ranks(runs: list[list[int]], depth: int) -> tuple[Counter, dict]:
    """For every prefix of the runs: how many have it, and its rank path, by count and then by the first run that has it."""
    counts, first = Counter(), {}
    for number, run in enumerate(runs):
        for k in range(1, min(depth, len(run)) + 1):
            counts[tuple(run[:k])] += 1
            first.setdefault(tuple(run[:k]), number)
    path = {(): ()}
    for prefix in sorted(counts, key=lambda prefix: (len(prefix), -counts[prefix], first[prefix])):
        siblings = sum(len(ranked) == len(prefix) and ranked[:-1] == prefix[:-1] for ranked in path)
        path[prefix] = (*path[prefix[:-1]], siblings)
    return counts, path


def allowed(shape, counts: Counter, path: dict, total: int, min_probability: float) -> set:
    if isinstance(shape, DynamicTree):
        fits = {prefix for prefix in counts if max(path[prefix]) < shape.width and len(prefix) <= shape.depth}
    else:
        fits = {prefix for prefix in counts if path[prefix] in shape.paths}
    return {prefix for prefix in fits if counts[prefix] >= min_probability * total - 1e-9}


def check_trie(nodes: list[tuple[int, ...]], runs: list[list[int]], shape, depth: int, budget: int, min_probability: float = 0.0) -> int:
    """The nodes are the likeliest of the trie that the shape allows -> the sum of their counts."""
    counts, path = ranks(runs, min(depth, shape.max_depth))
    fits = allowed(shape, counts, path, len(runs), min_probability)
    assert set(nodes) <= fits and len(nodes) == min(budget, len(fits))
    assert sorted(counts[node] for node in nodes) == sorted(counts[prefix] for prefix in fits)[len(fits) - len(nodes) :]
    left = [not any(path[node]) for node in nodes]
    assert left == sorted(left, reverse=True), "the leftmost chain comes first"
    for i, node in enumerate(nodes):
        earlier = [path[sibling][-1] for sibling in nodes[:i] if sibling[:-1] == node[:-1]]
        assert all(rank < path[node][-1] for rank in earlier), "siblings by rank"
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
    """Positions after an earlier occurrence of the last `size` tokens, the most recent first."""
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
        position = occurrences(text, sizes[0])[0] if sizes else 0
        length = min(depth, 6, int(factor * shared(text, position, text)))
        seen["cut by the match"] += 0 < length < min(depth, 6)
        expected = follow(text, position, length) if sizes else []
        (nodes,) = propose(drafter, [0], [text], depth)
        assert nodes == [tuple(expected[: k + 1]) for k in range(len(expected))], f"trial {trial}"
        seen[sizes[0] if sizes else 0] += 1
        seen["over"] += bool(sizes) and position + length > len(text)
        seen["short"] += depth < 6
    assert set(range(shortest, longest + 1)) | {0} <= set(seen) and min(seen.values()) >= 5


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_ngram_merges_the_last_few_matches(name):
    shape, rng, seen = SHAPES[name], random.Random(7), Counter()
    few = 1 if name in ("chain", "narrow") else lookup.MAX_MERGED
    for _ in range(120):
        text = make_text(rng, rng.choice((2, 3, 5)), rng.randint(1, 70))
        depth = rng.randint(1, 9)
        drafter = bound(Ngram(shape))
        begin(drafter, 0, text)
        positions = next(filter(None, (occurrences(text, size) for size in (3, 2, 1))), [])
        (nodes,) = propose(drafter, [0], [text], depth)
        length = min(depth, 2 * shared(text, positions[0], text)) if positions else 0
        check_trie(nodes, [follow(text, position, length) for position in positions[:few]], shape, depth, shape.num_nodes - 1)
        seen["cut"] += len(positions) > few
        seen["branches"] += len({node[0] for node in nodes}) > 1
        seen["nothing"] += not nodes
        seen["full"] += len(nodes) == shape.num_nodes - 1
    assert min(seen["cut"], seen["nothing"], seen["full"] + 5 * (name in ("full", "sparse"))) >= 5
    assert seen["branches"] >= 20 or few == 1


def shared(text: list[int], position: int, end: list[int]) -> int:
    """How many tokens before `position` are the last of `end`."""
    size = 0
    while size < min(MAX_MATCH, position, len(end)) and text[position - 1 - size] == end[len(end) - 1 - size]:
        size += 1
    return size


def candidates(text: list[int], memory: list[list[int]], depth: int) -> list[list[tuple[int, list[int]]]]:
    """(match length, run) of the slot's own text and of memory, the most recent first; of too many, those of the rarer n-grams."""
    own = [(shared(text, end, text), follow(text, end, depth)) for end in range(len(text) - 1, 0, -1)]
    old = [(shared(answer, end, text), answer[end : end + depth]) for answer in reversed(memory) for end in range(len(answer) - 1, 0, -1)]
    out = []
    for matches in (own, old):
        numbered = [(number, size, run) for number, (size, run) in enumerate(matches) if size]
        numbered.sort(key=lambda match: (-max(order for order in ORDERS if order <= match[1]), match[0]))
        out.append([(size, run) for _, size, run in sorted(numbered[:MAX_OCCURRENCES])])
    return out


def best_match(sources, shape, depth: int, factor: float, offset: float, min_probability: float):
    """Over all sources and match lengths: the best score, the longest length that has it, its runs and budget, and its source."""
    best = (Fraction(0), 0, [], 0, -1)
    for source, matches in enumerate(sources):
        for length in range(MAX_MATCH, 0, -1):
            runs = [run for size, run in matches if size >= length]
            if not runs:
                continue
            budget = max(0, min(shape.num_nodes - 1, int(factor * length + offset)))
            counts, path = ranks(runs, min(depth, shape.max_depth))
            fits = sorted((counts[prefix] for prefix in allowed(shape, counts, path, len(runs), min_probability)), reverse=True)
            score = Fraction(sum(fits[:budget]), len(runs))
            if score > best[0]:
                best = (score, length, runs, budget, source)
    return best


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_suffix_proposes_the_draft_of_the_highest_score(name):
    shape, rng, seen = SHAPES[name], random.Random(3), Counter()
    for trial in range(300):
        factor, offset, min_probability = rng.choice(((1.0, 0.0, 0.1), (2.0, 1.0, 0.01), (0.5, 9.0, 0.6), (1.5, -1.0, 0.3)))
        letters, limit = rng.choice((2, 3, 5, 9)), rng.choice((0, 40, 90))
        drafter = bound(Suffix(shape, limit, factor, offset, min_probability), 2)
        memory: list[list[int]] = []
        source = make_text(rng, letters, 100)
        for _ in range(rng.randint(0, 5)):
            start, size = rng.randrange(90), rng.randint(1, 30)
            answer = source[start : start + size]
            drafter.start([1], [[letters]], None)  # a prompt of a letter of its own
            emit(drafter, 1, answer)
            drafter.drop([1])
            memory.append([letters, *answer])
        while sum(len(answer) + 1 for answer in memory) > limit:
            memory.pop(0)
            seen["forgotten"] += limit > 0
        text = make_text(rng, letters, rng.randint(1, 70)) + rng.choice(([], source[40 : rng.randint(41, 60)]))
        depth = rng.randint(1, 9)
        begin(drafter, 0, text)
        sources = candidates(text, memory, depth)
        score, length, runs, budget, source_number = best_match(sources, shape, depth, factor, offset, min_probability)
        (nodes,) = propose(drafter, [0], [text], depth)
        if score:
            assert Fraction(check_trie(nodes, runs, shape, depth, budget, min_probability), len(runs)) == score, f"trial {trial}"
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
    rng, capped, longest, below_cap = random.Random(4), 0, 0, 0
    for _ in range(150):
        text = make_text(rng, rng.choice((2, 3, 8)), rng.randint(1, 150)) + rng.choice(([], [0, 1] * rng.randint(1, 30)))
        depth, (own, memory) = rng.randint(1, 6), (NgramIndex(ORDERS), NgramIndex(ORDERS))
        answers = [make_text(rng, 3, rng.randint(1, 60)) for _ in range(3)]
        own.extend(text)
        for answer in answers:
            memory.extend(answer)
            memory.close()
        expected = candidates(text, answers, depth)
        assert [own.matches(text, depth), memory.matches(text, depth)] == expected
        capped += any(len(matches) == MAX_OCCURRENCES for matches in expected)
        longest += any(size == MAX_MATCH for matches in expected for size, _ in matches)
        below_cap += any(0 < len(matches) < MAX_OCCURRENCES for matches in expected)
    assert min(capped, longest, below_cap) >= 20


def test_copies_continue_past_the_end():
    text = [9, 1, 2, 3, 1, 2, 3, 1, 2]
    for drafter in (Ngram(StaticTree.chain(8)), Suffix(StaticTree.chain(8), factor=8.0)):
        begin(bound(drafter), 0, text)
        assert propose(drafter, [0], [text], 8)[0][-1] == (3, 1, 2, 3, 1, 2, 3, 1)
        assert propose(drafter, [0], [text], 3)[0][-1] == (3, 1, 2)


def test_slots_are_padded_and_independent():
    texts = {4: [1, 2, 3, 4, 1, 2], 0: [5, 6], 2: [7, 7, 7, 7, 7], 1: [3]}
    for drafter in (Ngram(StaticTree.chain(5)), Ngram(DynamicTree(5, 2, 6)), Suffix(factor=5.0)):
        assert isinstance(drafter, Drafter) and not drafter.capturable and drafter.taps == ()
        assert (drafter.max_nodes, drafter.max_depth) == (drafter.tree_spec.num_nodes, drafter.tree_spec.max_depth)
        bound(drafter, 5)
        for slot, text in texts.items():
            begin(drafter, slot, text)
        slots = [0, 1, 2, 4]
        nodes = propose(drafter, slots, [texts[slot] for slot in slots], 4)
        assert [len(paths) for paths in nodes] == [0, 0, 4, 4]
        assert nodes[2][-1] == (7, 7, 7, 7) and nodes[3][-1] == (3, 4, 1, 2)
        alone = drafter.propose(round_of([0, 1], [6, 3], 4))
        assert alone.tokens.tolist() == [[6], [3]] and alone.size.tolist() == [1, 1]
        drafter.drop([4, 2])
        begin(drafter, 4, [8, 9])  # another prompt takes the slot: no state of the old one is left
        emit(drafter, 4, [1, 2])
        assert propose(drafter, [0, 4], [texts[0], [8, 9, 1, 2]], 4) == [[], []]


def test_another_tree_spec_counts_from_bind_on():
    text = [1, 2, 3, 1, 2, 4, 1, 2]
    for drafter in (Ngram(), Suffix(factor=9.0)):
        for shape, count in (
            (StaticTree.chain(1), 1),
            (StaticTree.cartesian((2,)), 2),
            (StaticTree.chain(3), 3),
            (DynamicTree(2, 2, 4), 3),
        ):
            drafter.tree_spec = shape
            assert bound(drafter)._texts == {}
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
    drafter, remembered, dropped = bound(Suffix(memory=120), 3), [], 0
    for _ in range(60):
        prompt, answer = ([rng.randrange(9) for _ in range(rng.randint(1, size))] for size in (60, 50))
        slot = rng.randrange(3)
        drafter.start([slot], [prompt], None)
        emit(drafter, slot, answer)
        drafter.drop([slot])
        remembered.append((prompt[-MAX_MATCH:] + answer)[-119:])
        while sum(len(text) + 1 for text in remembered) > 120:
            remembered.pop(0)
            dropped += 1
        assert drafter._finished.tokens == [token for text in remembered for token in (*text, END)]
    assert dropped >= 30 and len(remembered) >= 1
    drafter.start([0], [[1]], None)
    emit(drafter, 0, list(range(200)))  # longer than the memory
    drafter.drop([0])
    assert drafter._finished.tokens == [*range(81, 200), END]


def test_an_index_drops_its_oldest_sequences():
    """The rest gives the matches of a fresh index of the remaining sequences, and is no larger."""
    rng = random.Random(2)
    for _ in range(40):
        texts = [make_text(rng, 3, rng.randint(1, 30)) for _ in range(6)]
        dropped = rng.randint(1, 5)
        old, new = NgramIndex((3, 2, 1)), NgramIndex((3, 2, 1))
        for number, text in enumerate(texts):
            for index in (old, new)[: 1 + (number >= dropped)]:
                index.extend(text)
                index.close()
        for _ in range(dropped):
            old.drop_oldest()
        assert old.tokens == new.tokens and old.first == sum(len(text) + 1 for text in texts[:dropped])
        query = make_text(rng, 3, 12)
        assert old.matches(query, 5) == new.matches(query, 5)
        for order in (3, 2, 1):
            positions = [position + old.first for position in new.occurrences(query, order)]
            assert list(old.occurrences(query, order)) == positions
            (last, before), (fresh, links) = old._index[order], new._index[order]
            assert last.keys() == fresh.keys() and len(before) == len(links) == len(old.tokens)
            old_ngrams = [[text[i : i + order] for i in range(len(text) - order)] for text in texts[dropped:]]
            assert len(positions) == sum(ngrams.count(query[-order:]) for ngrams in old_ngrams)


def test_arguments_are_checked():
    for make, message in (
        (lambda: Ngram(longest=2, shortest=3), "3 to 2"),
        (lambda: Ngram(shortest=0), "0 to 3"),
        (lambda: Suffix(memory=-1), "memory -1"),
        (lambda: Suffix(factor=-0.5), "factor -0.5"),
        (lambda: Suffix(min_probability=0.0), "min_probability 0.0"),
        (lambda: Suffix(min_probability=1.5), "min_probability 1.5"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


NEW = 40
SAMPLED = Sampling(temperature=0.9, top_k=20, top_p=0.95, min_p=0.01, seed=11)
DECODED = {"chain": StaticTree.chain(7), "static": StaticTree.cartesian((3, 2, 1, 1)), "dynamic": DynamicTree(6, 3, 14)}


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [(torch.randint(VOCAB, (count,), generator=generator).tolist() * 2)[:25] for count in (1, 5, 19, 3, 11)]


PROMPTS = make_prompts()


class Spy:
    """Counts accepted tokens, drafted rounds, and rounds whose accepted path was not 0, 1, 2, …; puts a hint before each prompt."""

    def __init__(self, *args, hints=(), **options) -> None:
        super().__init__(*args, **options)
        self.hints = {tuple(prompt): text for prompt, text in hints}
        self.clear()

    def clear(self) -> None:
        self.accepted, self.drafted, self.moved, self.rounds = 0, 0, 0, 0

    def start(self, slots, prompts, out):
        super().start(slots, [self.hints.get(tuple(prompt), []) + prompt for prompt in prompts], out)

    def propose(self, round):
        tree = super().propose(round)
        tree.validate()
        return tree

    def accept(self, round, tree, verdict, out):
        super().accept(round, tree, verdict, out)
        for result in verdict.on_host(tree):
            self.rounds += 1
            self.accepted += result.length - 1
            self.drafted += result.size > 1
            self.moved += not result.in_place


class SpiedNgram(Spy, Ngram):
    pass


class SpiedSuffix(Spy, Suffix):
    pass


@pytest.fixture(scope="module")
def decoded():
    """A target and, by sampling, its plain answers with the noise keys 0–4 and with two other sets of keys."""
    target = Target.wrap(tiny("qwen3"))
    out = {}
    for sampling in (Sampling(), SAMPLED):
        plain = Decoder(target, slots=5)
        out[sampling] = [
            [answer.tokens for answer in plain.generate(PROMPTS, sampling, NEW, (), requests=[key + 5 * keys for key in range(5)])]
            for keys in range(3)
        ]
    assert out[SAMPLED][0] != out[SAMPLED][1]
    return target, out


@pytest.mark.parametrize("slots", [1, 5])
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", sorted(DECODED))
def test_lookup_equals_plain(decoded, name, sampling, slots):
    target, answers = decoded[0], decoded[1][sampling]
    # Samples of a random model hardly repeat. So the answers are read beforehand, and those of other keys, so that trees branch.
    hints = [(prompt, sum((prompt + answers[key][i] for key in (1, 0, 2)), [])) for i, prompt in enumerate(PROMPTS)]
    makers = [lambda: SpiedNgram(DECODED[name], hints=hints), lambda: SpiedSuffix(DECODED[name], hints=hints, offset=2.0)]
    if sampling.greedy:  # greedy answers loop and need no hint
        makers += [lambda: SpiedNgram(DECODED[name]), lambda: SpiedSuffix(DECODED[name])]
    for make in makers:
        drafter = make()
        out = Decoder(target, drafter, slots=slots).generate(PROMPTS, sampling, NEW, ())
        assert [answer.tokens for answer in out] == answers[0]
        assert drafter.accepted >= 40 and drafter.drafted >= 20, (drafter.accepted, drafter.drafted)
        assert drafter.rounds == sum(len(answer.rounds) for answer in out) <= 5 * NEW - 40
        assert drafter.moved == 0 if name == "chain" else drafter.moved >= 1 or sampling.greedy
        assert max(round.size for answer in out for round in answer.rounds) > 2
        assert drafter._texts == {}, "every slot was dropped"


@pytest.mark.parametrize("slots", [1, 5])
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", sorted(DECODED))
def test_suffix_remembers_what_it_decoded(decoded, name, sampling, slots):
    target, answers = decoded[0], decoded[1][sampling]
    drafter = SpiedSuffix(DECODED[name], memory=1000)
    decoder = Decoder(target, drafter, slots=slots)
    first: list[int] = []
    for again in range(2):
        drafter.clear()
        out = decoder.generate(PROMPTS, sampling, NEW, ())
        assert [answer.tokens for answer in out] == answers[0]
        if not again:
            first = [drafter.accepted, drafter.rounds]
    deepest = DECODED[name].max_depth
    assert drafter.accepted > first[0] and drafter.rounds < first[1] / 2
    assert sum(round.accepted == deepest + 1 for answer in out for round in answer.rounds) > drafter.rounds / 2, "most rounds accept all"


def test_other_keys_make_branches(decoded):
    """Memory of the same prompts under other noise: the right token need not be the likeliest."""
    target, answers = decoded
    drafter = SpiedSuffix(DECODED["dynamic"], memory=2000, offset=3.0)
    decoder = Decoder(target, drafter, slots=2)
    for number, key in enumerate((0, 1, 2, 0, 1, 2)):
        if number == 3:
            drafter.clear()
        out = decoder.generate(PROMPTS, SAMPLED, NEW, (), requests=[i + 5 * key for i in range(5)])
        assert [answer.tokens for answer in out] == answers[SAMPLED][key]
    assert drafter.moved >= 2 and drafter.accepted >= 300


def test_a_closed_stream_and_a_stop_token(decoded):
    """Slots that end early, in the middle of an accepted path, are remembered and do no harm."""
    target, answers = decoded[0], decoded[1][Sampling()][0]
    drafter = SpiedSuffix(DECODED["chain"], memory=1000)
    decoder = Decoder(target, drafter, slots=2)
    stream = decoder.stream(PROMPTS, max_new_tokens=NEW, stop_ids=())
    for _ in range(3):
        next(stream)
    stream.close()
    assert drafter._texts == {} and drafter._finished.tokens.count(END) == 2
    for _ in range(2):
        out = decoder.generate(PROMPTS, max_new_tokens=NEW, stop_ids={answers[0][9]})
        for got, answer in zip(out, answers, strict=True):
            assert got.tokens == answer[: len(got.tokens)] and len(got.tokens) == NEW or got.tokens[-1] == answers[0][9]
