"""Logits processors in trees.

Every node is compared with transformers' own processors on its explicit history, the stored histories with plain lists, decoding with
transformers' generate; refusals go by name; planted faults are seen.
"""

import functools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from planting import PlantingDrafter
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
from watching import Watch
from zoo import VOCAB, tiny

from draftsmith.inference.decoder import Decoder
from draftsmith.inference.drafter import RoundContext
from draftsmith.inference.processors import IMPURE, History, _on_host
from draftsmith.inference.sampler import Sampling, sample
from draftsmith.inference.tree import DraftTree
from draftsmith.inference.verify import Verdict
from draftsmith.models.target import Target

CPU = torch.device("cpu")
WORDS, SLOTS = 19, 5  # few tokens, so that paths repeat tokens of their history
PENALISED = Sampling(repetition_penalty=1.3)


class OrderBias(LogitsProcessor):
    """A user's processor: it depends on every token of the history and on their order, and writes into its argument."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        position = torch.arange(1, input_ids.shape[1] + 1, device=input_ids.device)
        key = (input_ids * position * position).sum(1, keepdim=True) * 7919
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
    """Counts of `simulate`.

    Attributes:
        wrong: nodes whose logits differ from transformers', and slots whose history differs.
        equal_siblings: trees in which siblings have equal tokens.
        repeats: nodes whose path below the root repeats a token of the history.
        cousins: nodes with a token that some node off their path has as well.
    """

    wrong: int = 0
    nodes: int = 0
    padding: int = 0
    equal_siblings: int = 0
    repeats: int = 0
    cousins: int = 0
    starts: int = 0
    depths: Counter[int] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)


def random_tree(rng: random.Random, root: int, nodes: int) -> tuple[list[int], list[int], int]:
    """A random tree of depth at most 4, with equal siblings; padding that must not matter."""
    size, tokens, parents, depth = rng.randint(1, nodes), [root], [-1], [0]
    while len(tokens) < size:
        parent = rng.choice([i for i, d in enumerate(depth) if d < 4])
        siblings = [token for token, of in zip(tokens, parents, strict=True) if of == parent]
        tokens.append(rng.choice(siblings) if siblings and rng.random() < 0.2 else rng.randrange(WORDS))
        parents.append(parent)
        depth.append(depth[parent] + 1)
    while len(tokens) < nodes:
        tokens.append(rng.randrange(WORDS))
        parents.append(rng.choice((-1, 0, rng.randrange(nodes))))
    return tokens, parents, size


def node_paths(parents: list[int], size: int) -> list[list[int]]:
    """Nodes from the root to each node, both included."""
    paths: list[list[int]] = []
    for i in range(size):
        paths.append([*paths[parents[i]], i] if i else [0])
    return paths


def round_of(slots: Sequence[int], tree: DraftTree, sampling: Sampling) -> RoundContext:
    index = torch.tensor(slots)
    return RoundContext(list(slots), index, tree.tokens[:, 0], index * 0, index, sampling, 4)


def expected_logits(sampling: Sampling, processors: list[LogitsProcessor], history: list[int], logits: torch.Tensor) -> torch.Tensor:
    """transformers' processors at one position: logits [V] -> [V]."""
    every = LogitsProcessorList(processors)
    if sampling.repetition_penalty != 1.0:
        every.insert(0, RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    return every(torch.tensor([history]), logits.to(torch.float32, copy=True)[None])[0]


def simulate(
    sampling: Sampling, processors: list[LogitsProcessor], make: type[History] = History, rounds: int = 12, nodes: int = 10, seed: int = 0
) -> Report:
    """Rounds of random trees, logits and verdicts over slots whose requests start and end, compared with plain lists."""
    rng, generator, report = random.Random(seed), torch.Generator().manual_seed(seed), Report()
    history = make(sampling, processors, SLOTS, WORDS, CPU)
    texts: dict[int, list[int]] = {}
    for number in range(rounds):
        ended = [slot for slot in texts if rng.random() < 0.2]
        history.drop(ended)
        for slot in ended:
            del texts[slot]
        fresh = [slot for slot in range(SLOTS) if slot not in texts and (rng.random() < 0.7 or not texts)]
        prompts = [[rng.randrange(WORDS) for _ in range(rng.randint(1, 9))] for _ in fresh]
        history.start(fresh, prompts)
        texts |= {slot: list(prompt) for slot, prompt in zip(fresh, prompts, strict=True)}
        report.starts += len(fresh)
        slots = sorted(rng.sample(sorted(texts), rng.randint(1, len(texts))))  # a round need not have every slot
        trees = [random_tree(rng, texts[slot][-1], nodes) for slot in slots]
        tokens, parents, size = (list(column) for column in zip(*trees, strict=True))
        tree = DraftTree.build(torch.tensor(tokens), torch.tensor(parents), torch.tensor(size))
        round = round_of(slots, tree, sampling)
        logits = torch.randn(len(slots), nodes, WORDS, generator=generator).to(torch.bfloat16 if number % 2 else torch.float32)
        before = logits.clone()
        out = history.apply(round, tree, logits)
        assert out.dtype == torch.float32 and torch.equal(logits, before), "the model's logits are left alone"
        path, length, following = [], [], []
        for b, slot in enumerate(slots):
            paths = node_paths(parents[b], size[b])
            report.equal_siblings += len(set(zip(parents[b][: size[b]], tokens[b], strict=False))) < size[b]
            for i in range(nodes):
                if i >= size[b]:
                    report.padding += 1
                    report.wrong += not torch.equal(out[b, i], logits[b, i].float())
                    continue
                below = [tokens[b][j] for j in paths[i][1:]]
                expected = expected_logits(sampling, processors, texts[slot] + below, logits[b, i])
                report.wrong += not torch.equal(out[b, i], expected)
                report.nodes += 1
                report.depths[len(below)] += 1
                report.repeats += len(set(texts[slot] + below)) < len(set(texts[slot])) + len(below)
                report.cousins += any(tokens[b][j] == tokens[b][i] for j in range(size[b]) if j not in paths[i])
            accepted = paths[rng.randrange(size[b])]
            path.append(accepted + [-1] * (nodes - len(accepted)))
            length.append(len(accepted))
            following.append(rng.randrange(WORDS))
            report.lengths[len(accepted)] += 1
            texts[slot] += [tokens[b][j] for j in accepted[1:]] + following[-1:]
        history.commit(round, tree, Verdict(torch.tensor(path), torch.tensor(length), torch.tensor(following)))
        for slot, text in texts.items():
            if processors:
                report.wrong += history._tokens[slot] != text
            if sampling.repetition_penalty != 1.0:
                report.wrong += history._seen[slot].nonzero()[:, 0].tolist() != sorted(set(text))
        report.wrong += set(history._tokens) != (set(texts) if processors else set())
    return report


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_node_and_every_history(name):
    """Bit for bit the results of transformers' processors on the explicit history; the stored histories equal plain lists."""
    report = simulate(*CASES[name], rounds=30, seed=len(name))
    assert report.wrong == 0
    assert report.nodes >= 250 and report.padding >= 100 and report.equal_siblings >= 10 and report.starts >= SLOTS + 10
    assert report.repeats >= 80 and report.cousins >= 40
    assert set(report.depths) == set(range(5)) and set(report.lengths) >= {1, 2, 3, 4}


def test_the_processors_do_something():
    """Each case changes logits, and at some depth differently than at the root; otherwise the comparison above shows nothing."""
    for name, (sampling, processors) in CASES.items():
        history = History(sampling, processors, 1, WORDS, CPU)
        history.start([0], [[9, 10, 11, 12, 13, 14, 4, 1, 2]])
        tree = DraftTree.build(torch.tensor([[2, 3, 2, 8, 4]]), torch.arange(-1, 4)[None], torch.tensor([5]))
        logits = torch.linspace(-2, 2, WORDS).roll(3).expand(1, 5, WORDS)
        out = history.apply(round_of([0], tree, sampling), tree, logits)
        assert not torch.equal(out, logits), name
        assert any(not torch.equal(out[0, 0], out[0, i]) for i in range(1, 5)), name


def test_a_wide_tree():
    """More than 64 nodes, several of every depth."""
    assert simulate(*CASES["several"], rounds=3, nodes=70).wrong == 0


def test_idle_slots_keep_their_history():
    history = History(PENALISED, [OrderBias()], 2, WORDS, CPU)
    history.start([0, 1], [[1, 2], [3]])
    tree = DraftTree.build(torch.tensor([[2, 4], [9, 9]]), torch.tensor([[-1, 0], [-1, 0]]), torch.tensor([2, 0]))
    round, logits = round_of([0, 1], tree, PENALISED), torch.randn(2, 2, WORDS)
    assert torch.equal(history.apply(round, tree, logits)[1], logits[1])
    history.commit(round, tree, Verdict(torch.tensor([[0, 1], [-1, -1]]), torch.tensor([2, 0]), torch.tensor([5, 9])))
    assert history._tokens == {0: [1, 2, 4, 5], 1: [3]}
    assert [row.nonzero()[:, 0].tolist() for row in history._seen] == [[1, 2, 4, 5], [3]]


def test_needed():
    assert not History.needed(Sampling(0.7, top_k=3), [])
    assert History.needed(PENALISED, []) and History.needed(Sampling(), [OrderBias()])


def test_processors_given_twice():
    """As in `generate`, the same object counts once. Of two penalties the user has to leave one out."""
    bias = SequenceBiasLogitsProcessor(BIASES)
    for given in ([bias], [bias, bias]):
        history = History(Sampling(), given, 1, WORDS, CPU)
        history.start([0], [[4]])
        tree = DraftTree.root(torch.tensor([4]))
        out = history.apply(round_of([0], tree, Sampling()), tree, torch.zeros(1, 1, WORDS))
        assert out[0, 0, 5] == 3.5 and out[0, 0, 3] == -2
    with pytest.raises(ValueError, match="got RepetitionPenaltyLogitsProcessor and repetition_penalty 1.3; expected one"):
        History(PENALISED, [RepetitionPenaltyLogitsProcessor(1.2)], 1, WORDS, CPU)
    assert simulate(Sampling(), [RepetitionPenaltyLogitsProcessor(1.2)], rounds=3).wrong == 0


def test_logits_of_another_device():
    """A model may be spread over devices: the history moves to the device of the logits."""
    history = History(PENALISED, [], 2, WORDS, CPU)
    history.start([0, 1], [[1, 2], [3]])
    tree = DraftTree.root(torch.tensor([2, 3]))
    out = history.apply(round_of([0, 1], tree, PENALISED), tree, torch.empty(2, 1, WORDS, device="meta", dtype=torch.float16))
    assert out.device.type == "meta" and out.shape == (2, 1, WORDS) and out.dtype == torch.float32


# Refusals


@pytest.mark.parametrize("name", sorted(IMPURE))
def test_refused_by_name(name):
    """Before any call; derived classes too. transformers has each of the names."""
    module = generation_higgs_audio_v2 if name.startswith("Higgs") else logits_process
    kind = getattr(module, name)
    derived = type("Derived", (kind,), {})
    for refused in (kind, derived):
        with pytest.raises(ValueError, match=f"^got {refused.__name__}: it .*; expected a pure function .*; leave it out$"):
            History(Sampling(), [object.__new__(refused)], 1, WORDS, CPU)


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
    """All other classes of transformers pass the probe and are exact at every node."""
    names = set()
    for make in PURE:
        assert simulate(Sampling(), [make()], rounds=2).wrong == 0, make()
        names.add(type(make()).__name__)
    ours = {name for name, kind in vars(logits_process).items() if isinstance(kind, type) and issubclass(kind, LogitsProcessor)}
    assert len(names & ours) == 25 and len(set(IMPURE) & ours) == 10
    assert not names & set(IMPURE)


class Counting(LogitsProcessor):
    """Changes its result after the fiftieth call, which no result of the probe shows."""

    calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores if self.calls > 50 else scores.index_fill(1, torch.tensor([2]), -torch.inf)


class Prompted(LogitsProcessor):
    """Takes its first history for the prompt, as many processors do."""

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
    """Pure nevertheless: its stored values are a function of the history."""

    def __init__(self):
        self.table = {}

    def __call__(self, input_ids, scores):
        rows = [tuple(row) for row in input_ids.tolist()]
        return scores + torch.tensor([[self.table.setdefault(row, sum(row) / 7)] for row in rows])


def noisy(input_ids, scores):
    return scores + torch.randn_like(scores)


def centred(input_ids, scores):
    return scores - scores.mean()


def by_row_index(input_ids, scores):
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
        (by_row_index, "got by_row_index: its result depends"),
        (neighbour, "got neighbour: its result depends"),
        (lambda ids, scores: scores[:, 1:], r"<lambda>: got \[2, 18\] back; expected scores \[2, 19\]"),
        (lambda ids, scores: scores[:1], r"<lambda>: got \[1, 19\] back; expected scores \[2, 19\]"),
        (lambda ids, scores: None, "<lambda>: got NoneType back; expected scores"),
    ],
    ids=["counting", "prompted", "remembering", "noisy", "centred", "by_row_index", "neighbour", "narrow", "one-row", "none"],
)
def test_refused_by_the_probe(processor, trouble):
    with pytest.raises(ValueError, match=f"^{trouble}"):
        History(Sampling(), [Memo(), processor], 1, WORDS, CPU)


def test_the_probe_leaves_the_processor_as_it_was():
    counting, prompted, memo = Counting(), Prompted(), Memo()
    for processor in (counting, prompted):
        with pytest.raises(ValueError):
            History(Sampling(), [processor], 1, WORDS, CPU)
    assert counting.calls == 0 and prompted.prompt is None
    assert simulate(Sampling(), [memo], rounds=3).wrong == 0 and len(memo.table) > 20


def test_an_error_of_the_processor_is_its_own():
    """Neither the probe nor a round hides it. A processor that fails later is refused then."""
    with pytest.raises(IndexError):
        History(Sampling(), [lambda ids, scores: scores[:, ids[0, 99]]], 1, WORDS, CPU)
    with pytest.raises(ValueError, match="vocabulary size is 19, but"):
        History(Sampling(), [NoBadWordsLogitsProcessor([[WORDS]])], 1, WORDS, CPU)
    history = History(Sampling(), [lambda ids, scores: scores[:1] if ids.shape[1] == 4 else scores], 1, WORDS, CPU)
    history.start([0], [[1, 2, 3]])
    tree = DraftTree.build(torch.tensor([[3, 1, 2]]), torch.tensor([[-1, 0, 0]]), torch.tensor([3]))
    with pytest.raises(ValueError, match=r"<lambda>: got \[1, 19\] back; expected scores \[2, 19\]; return a row for each row given"):
        history.apply(round_of([0], tree, Sampling()), tree, torch.zeros(1, 3, WORDS))


# Host syncs


@pytest.mark.parametrize("processors", [[], [OrderBias()]], ids=["penalty", "processor"])
def test_the_penalty_needs_no_host_sync(processors, monkeypatch):
    """Apply and commit of the penalty stay on the device. The user's processors need one transfer besides the verdict's own."""
    history = History(PENALISED, processors, 3, WORDS, CPU)
    history.start([0, 2], [[1, 2, 3], [4]])
    tree = DraftTree.build(torch.tensor([[3, 5, 6], [4, 4, 4]]), torch.tensor([[-1, 0, 1], [-1, 0, 0]]), torch.tensor([3, 2]))
    round, logits = round_of([0, 2], tree, PENALISED), torch.randn(2, 3, WORDS)
    verdict = Verdict(torch.tensor([[0, 1, 2], [0, -1, -1]]), torch.tensor([3, 1]), torch.tensor([7, 8]))
    transfers = []
    plain = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: transfers.append(tensor.shape) or plain(tensor))
    with Watch() as counter:
        history.apply(round, tree, logits)
        applied = len(transfers)
        history.commit(round, tree, verdict)
    assert counter.syncs == [] and counter.calls > 10
    assert (applied, len(transfers)) == ((1, 2) if processors else (0, 0))
    assert history._seen.sum(1).tolist() == [6, 0, 2]
    with Watch() as counter:
        torch.ones(3)[0].item(), torch.ones(3).nonzero()
    assert counter.syncs == ["aten::_local_scalar_dense", "aten::nonzero"], "the counter counts"


# Planted faults


def with_visible(change: Callable[[torch.Tensor], torch.Tensor]) -> type[History]:
    """A History whose penalty reads change(visible) in place of the ancestors."""

    class Faulty(History):
        def _penalise(self, seen, tree, scores):
            return super()._penalise(seen, replace(tree, _visible=change(tree.visible())), scores)

    return Faulty


class HistoryOfTheRoot(History):
    """The penalty of the root for all nodes of its row."""

    def _penalise(self, seen, tree, scores):
        root = super()._penalise(seen, tree, torch.ones_like(scores))[:, :1]
        return torch.where(root != 1, torch.where(scores < 0, scores * self._penalty, scores / self._penalty), scores)


class NothingCommitted(History):
    def commit(self, round, tree, verdict): ...


class NextTokenForgotten(History):
    def commit(self, round, tree, verdict):
        super().commit(round, tree, replace(verdict, next_token=tree.tokens[:, 0], _host_results=None))


class PathForgotten(History):
    def commit(self, round, tree, verdict):
        super().commit(round, tree, replace(verdict, path=verdict.path.clamp(max=0), _host_results=None))


class RowOfTheBatch(History):
    """Indexes the histories by row of the batch, not by slot."""

    def apply(self, round, tree, logits):
        return super().apply(replace(round, slots=list(range(len(round.slots))), slot_index=torch.arange(len(round.slots))), tree, logits)


class NeverCleared(History):
    def start(self, slots, prompts):
        before = self._seen.clone()
        super().start(slots, prompts)
        self._seen |= before


class PaddingToo(History):
    def apply(self, round, tree, logits):
        return super().apply(round, replace(tree, size=tree.size * 0 + tree.tokens.shape[1]), logits)


class Flattened(History):
    """Every node is a child of the root: histories of one length, and wrong ones."""

    def _process(self, slots, trees, scores):
        super()._process(slots, [(tokens, [min(parent, 0) for parent in parents]) for tokens, parents in trees], scores)


class PenaltyLast(History):
    """The processors first, then the penalty."""

    def apply(self, round, tree, logits):
        scores = logits.to(torch.float32, copy=True)
        self._process(round.slots, _on_host(tree), scores)
        return self._penalise(self._seen.index_select(0, round.slot_index), tree, scores)


FAULTS: dict[str, type[History]] = {
    "the penalty ignores ancestors": with_visible(lambda visible: torch.eye(visible.shape[1], dtype=torch.bool).expand_as(visible)),
    "all nodes are ancestors": with_visible(lambda visible: torch.ones_like(visible)),
    "descendants for ancestors": with_visible(lambda visible: visible.mT),
    "the node's own token is missing": with_visible(lambda visible: visible & ~torch.eye(visible.shape[1], dtype=torch.bool)),
    "the penalty of the row, not of the node": HistoryOfTheRoot,
    "nothing is committed": NothingCommitted,
    "next_token is not committed": NextTokenForgotten,
    "the accepted path is not committed": PathForgotten,
    "slots are rows of the batch": RowOfTheBatch,
    "a replaced slot keeps its tokens": NeverCleared,
    "padding is processed": PaddingToo,
    "all nodes are children of the root": Flattened,
    "the penalty comes last": PenaltyLast,
}


def is_seen(make: type[History]) -> bool:
    """Whether the simulation counts wrong nodes or histories; a crash counts too."""
    try:
        return simulate(PENALISED, [SequenceBiasLogitsProcessor(BIASES), OrderBias()], make, rounds=6).wrong > 0
    except (AssertionError, IndexError, KeyError, RuntimeError):
        return True


def test_planted_faults():
    assert not is_seen(History)
    seen = [fault for fault, make in FAULTS.items() if is_seen(make)]
    assert seen == list(FAULTS) and len(seen) == 13


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


def sampled_answers(name: str, setting: str, sampling: Sampling) -> list[list[int]]:
    """Sampled answers by a forward over the complete text and transformers' processors for every token."""
    model, processors = tiny(name), SETTINGS[setting][1]
    answers = []
    with torch.inference_mode():
        for key, prompt in enumerate(PROMPTS):
            ids = list(prompt)
            for _ in range(NEW + 6):
                scores = expected_logits(sampling, processors, ids, model(torch.tensor([ids])).logits[0, -1])
                ids.append(int(sample(scores, sampling, torch.tensor(key), torch.tensor(len(ids)))))
            answers.append(ids[len(prompt) :])
    return answers


def check_decoding(name: str, setting: str, sampling: Sampling, answers: list[list[int]]) -> None:
    """Plain and speculative decoding give these answers, with one slot and with slots that are reused."""
    processors, target = SETTINGS[setting][1], Target.wrap(tiny(name))
    expected = [answer[:NEW] for answer in answers]
    plain = Decoder(target, slots=3).generate(PROMPTS, sampling, NEW, (), processors=processors)
    assert [answer.tokens for answer in plain] == expected
    for slots in (1, 3):
        drafter = PlantingDrafter(PROMPTS, answers, VOCAB, duplicates=True, seed=slots)
        decoder = Decoder(target, drafter, slots=slots, chunk=4)
        out = decoder.generate(PROMPTS, sampling, NEW, (), processors=processors)
        assert [answer.tokens for answer in out] == expected
        assert drafter.mismatches == 0 and drafter.moves >= 3 and set(drafter.accepted) >= {0, 1, 2, 3}
    # The same decoder without processors: no state of theirs remains.
    without = replace(sampling, repetition_penalty=1.0)
    bare = [answer.tokens for answer in Decoder(target).generate(PROMPTS, without, NEW, ())]
    drafter.known = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, bare, strict=True)}
    assert [answer.tokens for answer in decoder.generate(PROMPTS, without, NEW, ())] == bare != expected


@pytest.mark.parametrize("setting", sorted(SETTINGS))
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_greedy_decoding_is_transformers_generate(name, setting):
    check_decoding(name, setting, Sampling(repetition_penalty=SETTINGS[setting][0]), generated(name, setting))


@pytest.mark.parametrize("setting", sorted(SETTINGS))
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_sampled_decoding_is_plain_sampling(name, setting):
    sampling = replace(SAMPLED, repetition_penalty=SETTINGS[setting][0])
    answers = sampled_answers(name, setting, sampling)
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
