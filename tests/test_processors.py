"""Logits processors in trees: every node against transformers' own processors on its explicit history, the books of the rows against plain
lists, refusals by name, planted faults, and decoding against transformers' generate."""

import functools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from planting import PlantingDrafter
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AlternatingCodebooksLogitsProcessor,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    WatermarkLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)
from transformers.generation import logits_process
from transformers.models.higgs_audio_v2 import generation_higgs_audio_v2
from zoo import VOCAB, tiny

from draftsmith.inference.decoder import Decoder
from draftsmith.inference.drafter import RoundContext
from draftsmith.inference.processors import IMPURE, History
from draftsmith.inference.sampler import Sampling, sample
from draftsmith.inference.tree import DraftTree
from draftsmith.inference.verify import Verdict
from draftsmith.models.target import Target

CPU = torch.device("cpu")
WORDS, ROWS = 19, 5  # few tokens, so that paths repeat tokens of their history
PENALISED = Sampling(repetition_penalty=1.3)


class OrderBias(LogitsProcessor):
    """A user's own: depends on every token of the history and on their order, and writes into the scores it is given."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = torch.arange(1, input_ids.shape[1] + 1, device=input_ids.device)
        key = (input_ids * place * place).sum(1, keepdim=True) * 7919
        scores += (key + torch.arange(scores.shape[1], device=scores.device)) % 13 * 0.25
        return scores


BIASES = [[[3], -2.0], [[4, 5], 3.5], [[1, 2, 3], 5.0], [[2, 2], 1.25]]
CASES: dict[str, tuple[Sampling, list[LogitsProcessor]]] = {
    "penalty": (PENALISED, []),
    "reward": (Sampling(repetition_penalty=0.6), []),
    "ngram": (Sampling(), [NoRepeatNGramLogitsProcessor(2)]),
    "bias": (Sampling(), [SequenceBiasLogitsProcessor(BIASES)]),
    "bad-words": (PENALISED, [NoBadWordsLogitsProcessor([[1], [2, 3], [4, 4, 4], [7, 1]], 1)]),
    "min-length": (Sampling(), [MinLengthLogitsProcessor(11, [2, 5])]),
    "decay": (Sampling(), [logits_process.ExponentialDecayLengthPenalty((2, 1.4), [3, 6], 6)]),
    "user": (Sampling(), [OrderBias()]),
    "several": (PENALISED, [NoRepeatNGramLogitsProcessor(1), SequenceBiasLogitsProcessor(BIASES), OrderBias(), TopKLogitsWarper(9)]),
}


@dataclass
class Report:
    """What a play saw. wrong: nodes whose logits are not the oracle's, and rows whose books are not."""

    wrong: int = 0
    nodes: int = 0
    padding: int = 0
    twins: int = 0
    repeats: int = 0  # nodes whose path below the root repeats a token of the history
    cousins: int = 0  # nodes with a token that some other, not an ancestor, carries as well
    starts: int = 0
    depths: Counter[int] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)


def grow(rng: random.Random, root: int, nodes: int) -> tuple[list[int], list[int], int]:
    """A random tree of depth 4 at most, with twins, padded with what must not matter."""
    size, tokens, parents, depth = rng.randint(1, nodes), [root], [-1], [0]
    while len(tokens) < size:
        parent = rng.choice([i for i, d in enumerate(depth) if d < 4])
        siblings = [token for token, other in zip(tokens, parents, strict=True) if other == parent]
        tokens.append(rng.choice(siblings) if siblings and rng.random() < 0.2 else rng.randrange(WORDS))
        parents.append(parent)
        depth.append(depth[parent] + 1)
    while len(tokens) < nodes:
        tokens.append(rng.randrange(WORDS))
        parents.append(rng.choice((-1, 0, rng.randrange(nodes))))
    return tokens, parents, size


def lines(parents: list[int], size: int) -> list[list[int]]:
    """Nodes from the root to each node, both included."""
    found: list[list[int]] = []
    for i in range(size):
        found.append([*found[parents[i]], i] if i else [0])
    return found


def asked(rows: Sequence[int], tree: DraftTree, sampling: Sampling) -> RoundContext:
    index = torch.tensor(rows)
    return RoundContext(list(rows), index, tree.tokens[:, 0], index * 0, index, sampling, 4)


def truth(sampling: Sampling, processors: list[LogitsProcessor], history: list[int], logits: torch.Tensor) -> torch.Tensor:
    """What transformers makes of one position: logits [V] -> [V]."""
    every = LogitsProcessorList(processors)
    if sampling.repetition_penalty != 1.0:
        every.insert(0, RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    return every(torch.tensor([history]), logits.to(torch.float32, copy=True)[None])[0]


def play(
    sampling: Sampling, processors: list[LogitsProcessor], make: type[History] = History, rounds: int = 12, nodes: int = 10, seed: int = 0
) -> Report:
    """Rounds of random trees, logits and verdicts over rows that come and go, beside plain lists."""
    rng, generator, report = random.Random(seed), torch.Generator().manual_seed(seed), Report()
    history = make(sampling, processors, ROWS, WORDS, CPU)
    books: dict[int, list[int]] = {}
    for number in range(rounds):
        gone = [row for row in books if rng.random() < 0.2]
        history.drop(gone)
        for row in gone:
            del books[row]
        fresh = [row for row in range(ROWS) if row not in books and (rng.random() < 0.7 or not books)]
        prompts = [[rng.randrange(WORDS) for _ in range(rng.randint(1, 9))] for _ in fresh]
        history.start(fresh, prompts)
        books |= {row: list(prompt) for row, prompt in zip(fresh, prompts, strict=True)}
        report.starts += len(fresh)
        rows = sorted(rng.sample(sorted(books), rng.randint(1, len(books))))  # not every row need be asked for
        drawn = [grow(rng, books[row][-1], nodes) for row in rows]
        tokens, parents, size = (list(column) for column in zip(*drawn, strict=True))
        tree = DraftTree.build(torch.tensor(tokens), torch.tensor(parents), torch.tensor(size))
        ask = asked(rows, tree, sampling)
        logits = torch.randn(len(rows), nodes, WORDS, generator=generator).to(torch.bfloat16 if number % 2 else torch.float32)
        given = logits.clone()
        out = history.apply(ask, tree, logits)
        assert out.dtype == torch.float32 and torch.equal(logits, given), "the model's logits are left alone"
        path, length, following = [], [], []
        for b, row in enumerate(rows):
            found = lines(parents[b], size[b])
            report.twins += len(set(zip(parents[b][: size[b]], tokens[b], strict=False))) < size[b]
            for i in range(nodes):
                if i >= size[b]:
                    report.padding += 1
                    report.wrong += not torch.equal(out[b, i], logits[b, i].float())
                    continue
                below = [tokens[b][j] for j in found[i][1:]]
                expected = truth(sampling, processors, books[row] + below, logits[b, i])
                report.wrong += not torch.equal(out[b, i], expected)
                report.nodes += 1
                report.depths[len(below)] += 1
                report.repeats += len(set(books[row] + below)) < len(set(books[row])) + len(below)
                report.cousins += any(tokens[b][j] == tokens[b][i] for j in range(size[b]) if j not in found[i])
            kept = found[rng.randrange(size[b])]
            path.append(kept + [-1] * (nodes - len(kept)))
            length.append(len(kept))
            following.append(rng.randrange(WORDS))
            report.lengths[len(kept)] += 1
            books[row] += [tokens[b][j] for j in kept[1:]] + following[-1:]
        history.commit(ask, tree, Verdict(torch.tensor(path), torch.tensor(length), torch.tensor(following)))
        for row, book in books.items():
            if processors:
                report.wrong += history._tokens[row] != book
            if sampling.repetition_penalty != 1.0:
                report.wrong += history._seen[row].nonzero()[:, 0].tolist() != sorted(set(book))
        report.wrong += set(history._tokens) != (set(books) if processors else set())
    return report


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_node_and_the_books(name):
    """Bit for bit what transformers' processors give on the explicit history; the rows' books are the plain lists."""
    report = play(*CASES[name], rounds=30, seed=len(name))
    assert report.wrong == 0
    assert report.nodes >= 250 and report.padding >= 100 and report.twins >= 10 and report.starts >= ROWS + 10
    assert report.repeats >= 80 and report.cousins >= 40
    assert set(report.depths) == set(range(5)) and set(report.lengths) >= {1, 2, 3, 4}


def test_the_processors_do_something():
    """Each case changes logits, and at some depth below the root otherwise than at the root, or the comparison above says nothing."""
    for name, (sampling, processors) in CASES.items():
        history = History(sampling, processors, 1, WORDS, CPU)
        history.start([0], [[9, 10, 11, 12, 13, 14, 4, 1, 2]])
        tree = DraftTree.build(torch.tensor([[2, 3, 2, 8, 4]]), torch.arange(-1, 4)[None], torch.tensor([5]))
        logits = torch.linspace(-2, 2, WORDS).roll(3).expand(1, 5, WORDS)
        out = history.apply(asked([0], tree, sampling), tree, logits)
        assert not torch.equal(out, logits), name
        assert any(not torch.equal(out[0, 0], out[0, i]) for i in range(1, 5)), name


def test_a_wide_tree():
    """More than a word of nodes, several of every depth."""
    assert play(*CASES["several"], rounds=3, nodes=70).wrong == 0


def test_idle_rows_learn_nothing():
    history = History(PENALISED, [OrderBias()], 2, WORDS, CPU)
    history.start([0, 1], [[1, 2], [3]])
    tree = DraftTree.build(torch.tensor([[2, 4], [9, 9]]), torch.tensor([[-1, 0], [-1, 0]]), torch.tensor([2, 0]))
    ask, logits = asked([0, 1], tree, PENALISED), torch.randn(2, 2, WORDS)
    assert torch.equal(history.apply(ask, tree, logits)[1], logits[1])
    history.commit(ask, tree, Verdict(torch.tensor([[0, 1], [-1, -1]]), torch.tensor([2, 0]), torch.tensor([5, 9])))
    assert history._tokens == {0: [1, 2, 4, 5], 1: [3]}
    assert [row.nonzero()[:, 0].tolist() for row in history._seen] == [[1, 2, 4, 5], [3]]


def test_needed():
    assert not History.needed(Sampling(0.7, top_k=3), [])
    assert History.needed(PENALISED, []) and History.needed(Sampling(), [OrderBias()])


def test_what_is_given_twice():
    """As in `generate`: once is enough of the same object, and one penalty of two; which of them is meant is for the user to say."""
    bias = SequenceBiasLogitsProcessor(BIASES)
    for given in ([bias], [bias, bias]):
        history = History(Sampling(), given, 1, WORDS, CPU)
        history.start([0], [[4]])
        tree = DraftTree.root(torch.tensor([4]))
        out = history.apply(asked([0], tree, Sampling()), tree, torch.zeros(1, 1, WORDS))
        assert out[0, 0, 5] == 3.5 and out[0, 0, 3] == -2
    with pytest.raises(ValueError, match="got RepetitionPenaltyLogitsProcessor and repetition_penalty 1.3; expected one"):
        History(PENALISED, [RepetitionPenaltyLogitsProcessor(1.2)], 1, WORDS, CPU)
    assert play(Sampling(), [RepetitionPenaltyLogitsProcessor(1.2)], rounds=3).wrong == 0


def test_logits_of_another_device():
    """A model may be spread over devices: the history moves to the logits, not they to it."""
    history = History(PENALISED, [], 2, WORDS, CPU)
    history.start([0, 1], [[1, 2], [3]])
    tree = DraftTree.root(torch.tensor([2, 3]))
    out = history.apply(asked([0, 1], tree, PENALISED), tree, torch.empty(2, 1, WORDS, device="meta", dtype=torch.float16))
    assert out.device.type == "meta" and out.shape == (2, 1, WORDS) and out.dtype == torch.float32


# Refusals


@pytest.mark.parametrize("name", sorted(IMPURE))
def test_refused_by_name(name):
    """Before anything is called; classes derived from them as well. Each name is one that transformers has."""
    module = generation_higgs_audio_v2 if name.startswith("Higgs") else logits_process
    kind = getattr(module, name)
    derived = type("Derived", (kind,), {})
    for one in (kind, derived):
        with pytest.raises(ValueError, match=f"^got {one.__name__}: it .*; expected a pure function .*; leave it out$"):
            History(Sampling(), [object.__new__(one)], 1, WORDS, CPU)


def whisper() -> WhisperTimeStampLogitsProcessor:
    config = GenerationConfig(eos_token_id=10)
    config.no_timestamps_token_id = 11
    return WhisperTimeStampLogitsProcessor(config, begin_index=2)


PURE: list[Callable[[], LogitsProcessor]] = [
    whisper,
    lambda: AlternatingCodebooksLogitsProcessor(3, 8, 5),
    lambda: logits_process.BarkEosPrioritizerLogitsProcessor(3, 0.1),
    lambda: logits_process.EpsilonLogitsWarper(0.05),
    lambda: logits_process.EtaLogitsWarper(0.05),
    lambda: logits_process.ExponentialDecayLengthPenalty((2, 1.4), 3, 2),
    lambda: ForcedBOSTokenLogitsProcessor(2),
    lambda: ForcedEOSTokenLogitsProcessor(9, 2),
    lambda: logits_process.InfNanRemoveLogitsProcessor(),
    lambda: logits_process.LogitNormalization(),
    lambda: MinLengthLogitsProcessor(8, 2),
    lambda: MinNewTokensLengthLogitsProcessor(4, 3, 2),
    lambda: logits_process.MinPLogitsWarper(0.1),
    lambda: NoBadWordsLogitsProcessor([[3], [1, 2]]),
    lambda: NoRepeatNGramLogitsProcessor(1),
    lambda: RepetitionPenaltyLogitsProcessor(1.2, prompt_ignore_length=3),
    lambda: SequenceBiasLogitsProcessor(BIASES),
    lambda: SuppressTokensAtBeginLogitsProcessor([1, 2], 6),
    lambda: SuppressTokensLogitsProcessor([1, 2]),
    lambda: TemperatureLogitsWarper(0.7),
    lambda: logits_process.TopHLogitsWarper(0.5),
    lambda: TopKLogitsWarper(4),
    lambda: TopPLogitsWarper(0.8),
    lambda: logits_process.TypicalLogitsWarper(0.8),
    lambda: WatermarkLogitsProcessor(WORDS, "cpu"),
    lambda: OrderBias(),
]


def test_every_class_of_transformers_is_accounted_for():
    """The rest of transformers' classes pass the probe, and are exact at every node."""
    names = set()
    for make in PURE:
        assert play(Sampling(), [make()], rounds=2).wrong == 0, make()
        names.add(type(make()).__name__)
    ours = {name for name, kind in vars(logits_process).items() if isinstance(kind, type) and issubclass(kind, LogitsProcessor)}
    assert len(names & ours) == 25 and len(set(IMPURE) & ours) == 10
    assert not names & set(IMPURE)


class Counting(LogitsProcessor):
    """Bans a token until the fiftieth call: no result of the probe shows it."""

    calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores if self.calls > 50 else scores.index_fill(1, torch.tensor([2]), -torch.inf)


class Prompted(LogitsProcessor):
    """Takes the first history that it sees for the prompt, as many do."""

    prompt: int | None = None

    def __call__(self, input_ids, scores):
        if self.prompt is None:
            self.prompt = input_ids.shape[1]
        return scores.index_fill(1, torch.tensor([2]), -torch.inf) if input_ids.shape[1] - self.prompt < 50 else scores


class Remembering(LogitsProcessor):
    """State in a list, not in an attribute."""

    def __init__(self):
        self.past = []

    def __call__(self, input_ids, scores):
        self.past.append(scores.mean())
        return scores - sum(self.past)


class Memo(LogitsProcessor):
    """Pure all the same: what it keeps is a function of the history."""

    def __init__(self):
        self.table = {}

    def __call__(self, input_ids, scores):
        rows = [tuple(row) for row in input_ids.tolist()]
        return scores + torch.tensor([[self.table.setdefault(row, sum(row) / 7)] for row in rows])


def noisy(input_ids, scores):
    return scores + torch.randn_like(scores)


def centred(input_ids, scores):
    return scores - scores.mean()


def placed(input_ids, scores):
    return scores + torch.arange(len(scores))[:, None]


def neighbour(input_ids, scores):
    return torch.where(input_ids[:, -1:] == input_ids[0, -1], scores, scores * 2)


@pytest.mark.parametrize(
    ("processor", "trouble"),
    [
        (Counting(), "got Counting: it changes its attributes when called"),
        (Prompted(), "got Prompted: it changes its attributes when called"),
        (Remembering(), "got Remembering: its result depends on other rows or on earlier calls"),
        (noisy, "got noisy: its result depends"),
        (centred, "got centred: its result depends"),
        (placed, "got placed: its result depends"),
        (neighbour, "got neighbour: its result depends"),
        (lambda ids, scores: scores[:, 1:], r"<lambda>: got \[2, 18\] back; expected scores \[2, 19\]"),
        (lambda ids, scores: scores[:1], r"<lambda>: got \[1, 19\] back; expected scores \[2, 19\]"),
        (lambda ids, scores: None, "<lambda>: got NoneType back; expected scores"),
    ],
    ids=["counting", "prompted", "remembering", "noisy", "centred", "placed", "neighbour", "narrow", "one-row", "none"],
)
def test_refused_by_the_probe(processor, trouble):
    with pytest.raises(ValueError, match=f"^{trouble}"):
        History(Sampling(), [Memo(), processor], 1, WORDS, CPU)


def test_the_probe_leaves_the_processor_as_it_was():
    counting, prompted, memo = Counting(), Prompted(), Memo()
    for one in (counting, prompted):
        with pytest.raises(ValueError):
            History(Sampling(), [one], 1, WORDS, CPU)
    assert counting.calls == 0 and prompted.prompt is None
    assert play(Sampling(), [memo], rounds=3).wrong == 0 and len(memo.table) > 20


def test_an_error_of_the_processor_is_its_own():
    """Neither the probe nor a round hides it; and one that goes wrong later is refused when it does."""
    with pytest.raises(IndexError):
        History(Sampling(), [lambda ids, scores: scores[:, ids[0, 99]]], 1, WORDS, CPU)
    with pytest.raises(ValueError, match="vocabulary size is 19, but"):
        History(Sampling(), [NoBadWordsLogitsProcessor([[WORDS]])], 1, WORDS, CPU)
    history = History(Sampling(), [lambda ids, scores: scores[:1] if ids.shape[1] == 4 else scores], 1, WORDS, CPU)
    history.start([0], [[1, 2, 3]])
    tree = DraftTree.build(torch.tensor([[3, 1, 2]]), torch.tensor([[-1, 0, 0]]), torch.tensor([3]))
    with pytest.raises(ValueError, match=r"<lambda>: got \[1, 19\] back; expected scores \[2, 19\]; return a row for each row given"):
        history.apply(asked([0], tree, Sampling()), tree, torch.zeros(1, 3, WORDS))


# Host syncs


class Watch(TorchDispatchMode):
    """Counts what reads the device from the host, and shapes that depend on values."""

    SYNCS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::is_nonzero", "aten::equal", "aten::unique")

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.syncs = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        name = func._schema.name
        if name.startswith(self.SYNCS):
            self.syncs.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("processors", [[], [OrderBias()]], ids=["penalty", "processor"])
def test_the_penalty_reads_nothing(processors, monkeypatch):
    """Apply and commit of the penalty stay on the device; the user's processors cost one transfer, beside the verdict's own."""
    history = History(PENALISED, processors, 3, WORDS, CPU)
    history.start([0, 2], [[1, 2, 3], [4]])
    tree = DraftTree.build(torch.tensor([[3, 5, 6], [4, 4, 4]]), torch.tensor([[-1, 0, 1], [-1, 0, 0]]), torch.tensor([3, 2]))
    ask, logits = asked([0, 2], tree, PENALISED), torch.randn(2, 3, WORDS)
    verdict = Verdict(torch.tensor([[0, 1, 2], [0, -1, -1]]), torch.tensor([3, 1]), torch.tensor([7, 8]))
    transfers = []
    plain = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: transfers.append(tensor.shape) or plain(tensor))
    with Watch() as watch:
        history.apply(ask, tree, logits)
        applied = len(transfers)
        history.commit(ask, tree, verdict)
    assert watch.syncs == [] and watch.calls > 10
    assert (applied, len(transfers)) == ((1, 2) if processors else (0, 0))
    assert history._seen.sum(1).tolist() == [6, 0, 2]
    with Watch() as watch:
        torch.ones(3)[0].item(), torch.ones(3).nonzero()
    assert watch.syncs == ["aten::_local_scalar_dense", "aten::nonzero"], "the watch sees what it looks for"


# Planted faults


def seeing(change: Callable[[torch.Tensor], torch.Tensor]) -> type[History]:
    """A History that takes change(visible) for who is whose ancestor."""

    class Faulty(History):
        def _penalise(self, seen, tree, scores):
            return super()._penalise(seen, replace(tree, _visible=change(tree.visible())), scores)

    return Faulty


class HistoryOfTheRoot(History):
    """The penalty of the batch row, for all its nodes."""

    def _penalise(self, seen, tree, scores):
        root = super()._penalise(seen, tree, torch.ones_like(scores))[:, :1]
        return torch.where(root != 1, torch.where(scores < 0, scores * self._penalty, scores / self._penalty), scores)


class NothingCommitted(History):
    def commit(self, ask, tree, verdict): ...


class NextTokenForgotten(History):
    def commit(self, ask, tree, verdict):
        super().commit(ask, tree, replace(verdict, next_token=tree.tokens[:, 0], _host_results=None))


class PathForgotten(History):
    def commit(self, ask, tree, verdict):
        super().commit(ask, tree, replace(verdict, path=verdict.path.clamp(max=0), _host_results=None))


class RowOfTheBatch(History):
    """Indexed by the place in the batch."""

    def apply(self, ask, tree, logits):
        return super().apply(replace(ask, slots=list(range(len(ask.slots))), slot_index=torch.arange(len(ask.slots))), tree, logits)


class NeverCleared(History):
    def start(self, rows, prompts):
        kept = self._seen.clone()
        super().start(rows, prompts)
        self._seen |= kept


class PaddingToo(History):
    def apply(self, ask, tree, logits):
        return super().apply(ask, replace(tree, size=tree.size * 0 + tree.tokens.shape[1]), logits)


class Flattened(History):
    """Every node a child of the root: histories of one length, and wrong ones."""

    def _process(self, rows, tree, scores):
        super()._process(rows, replace(tree, parents=tree.parents.clamp(max=0)), scores)


class PenaltyLast(History):
    """The processors first, then the penalty."""

    def apply(self, ask, tree, logits):
        scores = logits.to(torch.float32, copy=True)
        self._process(ask.slots, tree, scores)
        return self._penalise(self._seen.index_select(0, ask.slot_index), tree, scores)


FAULTS: dict[str, type[History]] = {
    "the penalty ignores ancestors": seeing(lambda visible: torch.eye(visible.shape[1], dtype=torch.bool).expand_as(visible)),
    "all nodes are ancestors": seeing(lambda visible: torch.ones_like(visible)),
    "descendants for ancestors": seeing(lambda visible: visible.mT),
    "the node's own token is missing": seeing(lambda visible: visible & ~torch.eye(visible.shape[1], dtype=torch.bool)),
    "the penalty of the row, not of the node": HistoryOfTheRoot,
    "nothing is committed": NothingCommitted,
    "next_token is not committed": NextTokenForgotten,
    "the accepted path is not committed": PathForgotten,
    "rows are places in the batch": RowOfTheBatch,
    "a replaced row keeps its tokens": NeverCleared,
    "padding is processed": PaddingToo,
    "all nodes are children of the root": Flattened,
    "the penalty comes last": PenaltyLast,
}


def red(make: type[History]) -> bool:
    """Whether a play finds nodes or books wrong; a crash counts."""
    try:
        return play(PENALISED, [SequenceBiasLogitsProcessor(BIASES), OrderBias()], make, rounds=6).wrong > 0
    except (AssertionError, IndexError, KeyError, RuntimeError):
        return True


def test_planted_faults():
    assert not red(History)
    found = [fault for fault, make in FAULTS.items() if red(make)]
    assert found == list(FAULTS) and len(found) == 13


# Decoding

PROMPTS = [[5, 9, 1, 30, 22, 7, 7, 2, 40], [3], [11, 12, 13, 14], [8, 0, 8, 1, 8, 2]]
NEW = 18
GIVEN: list[LogitsProcessor] = [NoRepeatNGramLogitsProcessor(2), SequenceBiasLogitsProcessor([[[7], -1.0], [[9, 9], 4.0]]), OrderBias()]
SETTINGS = {"penalty": (1.3, []), "processors": (1.0, GIVEN), "both": (1.3, GIVEN)}
SAMPLED = Sampling(temperature=0.9, top_k=20, top_p=0.95, seed=4)


@functools.cache
def generated(name: str, setting: str) -> list[list[int]]:
    """transformers' own greedy answers."""
    model, (penalty, processors) = tiny(name), SETTINGS[setting]
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        how = {"max_new_tokens": NEW + 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "repetition_penalty": penalty}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), logits_processor=LogitsProcessorList(processors), **how)
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def slowly(name: str, setting: str, sampling: Sampling) -> list[list[int]]:
    """Sampled answers, a whole forward and transformers' processors for every token."""
    model, processors = tiny(name), SETTINGS[setting][1]
    answers = []
    with torch.inference_mode():
        for key, prompt in enumerate(PROMPTS):
            ids = list(prompt)
            for _ in range(NEW + 6):
                scores = truth(sampling, processors, ids, model(torch.tensor([ids])).logits[0, -1])
                ids.append(int(sample(scores, sampling, torch.tensor(key), torch.tensor(len(ids)))))
            answers.append(ids[len(prompt) :])
    return answers


def check_decoding(name: str, setting: str, sampling: Sampling, answers: list[list[int]]) -> None:
    """Plain and speculative decoding give these answers, alone and in batches whose rows are replaced."""
    processors, target = SETTINGS[setting][1], Target.wrap(tiny(name))
    expected = [answer[:NEW] for answer in answers]
    plain = Decoder(target, slots=3).generate(PROMPTS, sampling, NEW, (), processors=processors)
    assert [one.tokens for one in plain] == expected
    for rows in (1, 3):
        drafter = PlantingDrafter(PROMPTS, answers, VOCAB, duplicates=True, seed=rows)
        decoder = Decoder(target, drafter, slots=rows, chunk=4)
        out = decoder.generate(PROMPTS, sampling, NEW, (), processors=processors)
        assert [one.tokens for one in out] == expected
        assert drafter.mismatches == 0 and drafter.moves >= 3 and set(drafter.accepted) >= {0, 1, 2, 3}
    # The same decoder without them: nothing of the processors stays behind.
    without = replace(sampling, repetition_penalty=1.0)
    bare = [one.tokens for one in Decoder(target).generate(PROMPTS, without, NEW, ())]
    drafter.known = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, bare, strict=True)}
    assert [one.tokens for one in decoder.generate(PROMPTS, without, NEW, ())] == bare != expected


@pytest.mark.parametrize("setting", sorted(SETTINGS))
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_greedy_decoding_is_transformers_generate(name, setting):
    check_decoding(name, setting, Sampling(repetition_penalty=SETTINGS[setting][0]), generated(name, setting))


@pytest.mark.parametrize("setting", sorted(SETTINGS))
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_sampled_decoding_is_plain_sampling(name, setting):
    sampling = replace(SAMPLED, repetition_penalty=SETTINGS[setting][0])
    answers = slowly(name, setting, sampling)
    assert answers != generated(name, setting)
    check_decoding(name, setting, sampling, answers)


def test_stream_takes_processors():
    target, answers = Target.wrap(tiny("llama")), generated("llama", "both")
    decoder = Decoder(target, PlantingDrafter(PROMPTS, answers, VOCAB, seed=2), slots=2)
    out: list[list[int]] = [[] for _ in PROMPTS]
    for steps in decoder.stream(PROMPTS, PENALISED, NEW, (), processors=GIVEN):
        for step in steps:
            out[step.prompt_index] += step.tokens
    assert out == [answer[:NEW] for answer in answers]
    with pytest.raises(ValueError, match="got Counting"):
        next(decoder.stream(PROMPTS, PENALISED, NEW, (), processors=[Counting()]))
