"""The memory of suffix decoding on disk, and the choice between a trained drafter and a look-up."""

import json
import os
from collections import Counter
from typing import Any

import pytest
from decoding_cases import PROMPTS, relative, texts
from zoo import VOCAB, tiny

from draftsmith.eval import interleaved, loading
from draftsmith.inference import durable
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.drafter import Drafter
from draftsmith.inference.drafts import forget
from draftsmith.inference.expand import DynamicTree
from draftsmith.inference.hybrid import Hybrid
from draftsmith.inference.lookahead import Lookahead
from draftsmith.inference.lookup import END, Suffix
from draftsmith.inference.recycling import Recycling
from draftsmith.inference.suffix_memory import FORMAT, StoredSuffix
from draftsmith.inference.tree import StaticTree
from draftsmith.models.target import Target

NEW = 30


@pytest.fixture(scope="module")
def plain(target):
    return texts(Decoder(target).generate(PROMPTS, None, NEW, ()))


def test_a_memory_on_disk_is_that_of_one_process(target, plain, tmp_path):
    """Two processes one after the other draft as one does that goes on."""
    going_on, rounds = Suffix(memory=400), []
    for prompts in (PROMPTS, PROMPTS[::-1]):
        stored = StoredSuffix(tmp_path / "memory", VOCAB, "hash", memory=400)
        assert stored._finished.tokens == going_on._finished.tokens
        answers = [Decoder(target, drafter).generate(prompts, None, NEW, ()) for drafter in (stored, going_on)]
        assert texts(answers[0]) == texts(answers[1]) == (plain if prompts is PROMPTS else plain[::-1])
        counts = [[round.accepted for answer in each for round in answer.rounds] for each in answers]
        assert counts[0] == counts[1]
        rounds.append(len(counts[0]))
    assert rounds[1] < rounds[0] / 2 and [file.name for file in tmp_path.iterdir()] == ["memory"]
    assert json.loads((tmp_path / "memory").read_text())["tokens"] == going_on._finished.tokens


def test_a_smaller_memory_takes_the_last_answers(tmp_path):
    (tmp_path / "memory").write_text(facts(tokens=[1, 2, END, 3, END, 4, 5, 6, END]))
    kept = {memory: StoredSuffix(tmp_path / "memory", VOCAB, "hash", memory)._finished.tokens for memory in (9, 8, 6, 4, 3)}
    assert kept == {9: [1, 2, END, 3, END, 4, 5, 6, END], 8: [3, END, 4, 5, 6, END], 6: [3, END, 4, 5, 6, END], 4: [4, 5, 6, END], 3: []}


def facts(**changed: object) -> str:
    return json.dumps({"format": FORMAT, "tokenizer_hash": "hash", "tokens": [1, END]} | changed)


def test_what_is_no_memory_is_refused_in_one_line_and_left_as_it_is(tmp_path, target):
    contents = {
        "tokenizer": facts(tokenizer_hash="else"),
        "format": facts(format="2"),
        "large": facts(tokens=[VOCAB, END]),
        "negative": facts(tokens=[-2, END]),
        "open": facts(tokens=[1, 2]),
        "kind": facts(tokens=[1.0, END]),
        "shape": facts(tokens=[[1, END]]),
        "name": json.dumps({"other": [1, END]}),
        "cut": facts()[:-4],
        "good": facts(),
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "text").write_text("my notes")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="folder' is a folder; expected a file"):
        StoredSuffix(tmp_path / "folder", VOCAB, "hash")
    (tmp_path / "link").symlink_to(tmp_path / "good")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    names = sorted(os.listdir(tmp_path))
    assert len(names) == 14
    for name in [*names, "missing/file"]:
        if name == "good":
            continue
        with pytest.raises(ValueError, match=f"suffix memory .*{name}") as error:
            StoredSuffix(tmp_path / name, VOCAB, "hash")
        assert "\n" not in str(error.value)
    assert sorted(os.listdir(tmp_path)) == names and (tmp_path / "text").read_text() == "my notes"
    with pytest.raises(ValueError, match=f"got a target of {VOCAB} tokens, expected {VOCAB + 1}"):
        Decoder(target, StoredSuffix(tmp_path / "good", VOCAB + 1, "hash")).generate(PROMPTS[:1], None, 2, ())


def test_a_full_disk_leaves_the_old_memory_and_costs_no_answer(tmp_path, target, plain, monkeypatch):
    Decoder(target, StoredSuffix(tmp_path / "memory", VOCAB, "hash")).generate(PROMPTS[:2], None, 5, ())
    before = (tmp_path / "memory").read_bytes()
    drafter = StoredSuffix(tmp_path / "memory", VOCAB, "hash")

    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable, "sync", full)
    with pytest.warns(UserWarning, match="memory' cannot be written any more .No space left on device.; it stays as it is") as warned:
        assert texts(Decoder(target, drafter).generate(PROMPTS, None, NEW, ())) == plain
    assert len(warned) == 1
    assert os.listdir(tmp_path) == ["memory"] and (tmp_path / "memory").read_bytes() == before


@pytest.mark.parametrize("name", ["suffix", "stored", "recycling", "hybrid"])
def test_a_drafter_forgets_what_requests_taught_it(target, plain, tmp_path, name):
    """The same prompts again take the rounds of the first time; before, they take fewer. An evaluation writes no file, and none is read back."""
    (tmp_path / "memory").write_text(facts(tokens=[*plain[0], END]))
    drafter: Any = {
        "suffix": lambda: Suffix(memory=400),
        "stored": lambda: StoredSuffix(tmp_path / "memory", VOCAB, "hash", memory=400, write=False),
        "recycling": Recycling,
        "hybrid": lambda: Hybrid(DraftModel(relative("llama", 0.05), StaticTree.chain(2)), Suffix(memory=400)),
    }[name]()
    before = (tmp_path / "memory").read_bytes()

    def rounds() -> list[int]:
        answers = Decoder(target, drafter).generate(PROMPTS, None, NEW, ())
        assert texts(answers) == plain
        return [len(answer.rounds) for answer in answers]

    first, second = rounds(), rounds()
    forget(drafter)
    assert rounds() == first and sum(second) < sum(first)
    assert (tmp_path / "memory").read_bytes() == before


def test_timing_forgets_the_warm_up_and_earlier_repeats():
    """What a drafter has learned where each batch begins."""

    class Learning:
        remembers = True

        def __init__(self):
            self.known = []

        def forget(self):
            self.known = []

    drafter, seen = Learning(), []
    batches: Any = [["a"], ["b"], ["a"], ["b"]]

    def answer(batch):
        seen.append(list(drafter.known))
        drafter.known += batch
        return []

    assert len(list(interleaved.interleave({"drafted": answer}, batches, drafter.forget, again=2))) == 4
    assert seen == [[], [], ["a"], [], ["a"]]


def test_a_memory_that_cannot_be_written_is_refused_when_it_is_opened(tmp_path, monkeypatch):
    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable, "sync", full)
    with pytest.raises(ValueError, match="memory' cannot be written .No space left on device.; give another file"):
        StoredSuffix(tmp_path / "memory", VOCAB, "hash")
    assert not os.listdir(tmp_path)


class Spy(Hybrid):
    """Counts which drafter was chosen, and checks that it was the one of which more was expected."""

    seen: Counter = Counter()

    def propose(self, round):
        promised = sum(self.lookup.draft(slot, min(round.depth, self._lookup_depth)).score for slot in round.slots)
        more = promised * self._kept_score / self._score > len(round.slots) * self._accepted / self._rounds
        tree = super().propose(round)
        tree.validate()
        assert more == (self._chosen is not None)
        self.seen["look-up" if more else "trained"] += 1
        return tree


@pytest.mark.parametrize("slots", [1, 3])
def test_a_hybrid_takes_the_one_that_promises_more(target, plain, slots):
    """A draft model as good as chance, then one that is the target: with the good one, look-ups are taken less."""
    shares = {}
    for name, noise in (("bad", 1.0), ("good", 0.0)):
        drafter = Spy(DraftModel(relative("llama", noise), StaticTree.chain(6)), Suffix(DynamicTree(12, 3, 24), memory=500))
        assert isinstance(drafter, Drafter) and (drafter.max_nodes, drafter.max_depth) == (24, 12)
        Spy.seen.clear()
        decoder = Decoder(target, drafter, slots=slots)
        for _ in range(2):
            assert texts(decoder.generate(PROMPTS, None, NEW, ())) == plain
        shares[name] = Spy.seen["look-up"] / Spy.seen.total()
        assert min(Spy.seen["look-up"], Spy.seen["trained"]) >= 1
    assert shares["good"] < shares["bad"]


def test_lookups_stay_within_the_targets_positions():
    """At the end of the context a look-up may not be accepted further than a trained drafter has space for."""
    target = Target.wrap(tiny("llama"))
    target.max_positions = 40
    drafter = Hybrid(DraftModel(relative("llama", 0.01), StaticTree.chain(2)))
    prompts = [[1, 2, 3] * 6, [4] * 9]
    expected = texts(Decoder(target, slots=2, context=40).generate(prompts, None, 40, ()))
    assert texts(Decoder(target, drafter, slots=2, context=40).generate(prompts, None, 40, ())) == expected
    assert drafter._lookup_depth == 2
    Decoder(target, drafter, context=35).generate(prompts, None, 4, ())
    assert drafter._lookup_depth == 7
    drafter.trained.model.max_positions = 37  # a draft model may have fewer
    Decoder(target, drafter, context=35).generate(prompts, None, 4, ())
    assert drafter._lookup_depth == 4


def test_a_hybrid_with_lookahead_learns_from_its_own_trees_only(target, plain):
    drafter = Hybrid(DraftModel(relative("llama", 0.05), StaticTree.chain(2)), Lookahead())
    answers = Decoder(target, drafter, slots=2).generate(PROMPTS, None, NEW, ())
    assert texts(answers) == plain
    new_tokens, taken = drafter.lookup._new_tokens, Counter()

    def checked(slots, out):
        taken[drafter.lookup._ends != {}] += 1
        assert all(node < out.hidden.shape[1] for slot in slots for node in drafter.lookup._ends.get(slot, {}).values())
        return new_tokens(slots, out)

    drafter.lookup._new_tokens = checked
    assert texts(Decoder(target, drafter, slots=2).generate(PROMPTS, None, NEW, ())) == plain
    assert min(taken[True], taken[False]) >= 3


def test_a_hybrid_forgets_what_its_drafter_learnt(target):
    drafter = Hybrid(Recycling())
    measured = []
    for _ in range(2):
        forget(drafter)
        (answer,) = Decoder(target, drafter).generate(PROMPTS[:1], None, NEW, ())
        measured.append((answer.tokens, len(answer.rounds)))
    assert measured[0] == measured[1] and drafter.trained.remembers
    (answer,) = Decoder(target, drafter).generate(PROMPTS[:1], None, NEW, ())
    assert answer.tokens == measured[0][0] and len(answer.rounds) < measured[0][1]


def test_the_names_open_them(tmp_path):
    target, (hybrid, stored) = loading.open_models("tiny", ["hybrid:tiny-draft", f"suffix:{tmp_path / 'memory'}"], "float32")
    assert isinstance(hybrid, Hybrid) and isinstance(hybrid.trained, DraftModel) and isinstance(stored, StoredSuffix)
    assert hybrid.tree_spec is hybrid.trained.tree_spec and hybrid.depth_limit == hybrid.trained.depth_limit
    assert loading.provenance("hybrid:tiny-draft")["hash"] == loading.provenance("tiny-draft")["hash"] != ""
    for drafter in (hybrid, stored):
        with pytest.raises(ValueError, match="rule rejection"):
            loading.check_rule("rejection", drafter)
    for name in ("rest", "hybrid:rest", "hybrid:"):
        with pytest.raises((ValueError, FileNotFoundError), match="rest:FOLDER|no folder"):
            loading.open_models("tiny", [name], "float32")
