"""The draft vocabulary against a dict oracle; maps that are wrong; the ceiling that OOV tokens put on τ, counted round by round."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.models import vocab
from draftsmith.models.vocab import DraftVocabulary, ceiling, choose, count, coverage, from_tensors, full, sweep

V = 97


def counts_of(seed=0, vocab_size=V):
    """Skewed, with ties and zeros."""
    gen = torch.Generator().manual_seed(seed)
    return (torch.rand(vocab_size, generator=gen) ** 6 * 50).long()


def chosen(size=40, seed=0, vocab_size=V):
    return choose(counts_of(seed, vocab_size), size)


def oracle(vocabulary: DraftVocabulary, counts, always=()) -> dict[int, int]:
    """Target id of each draft id, the slow way."""
    others = sorted((t for t in range(len(counts)) if t not in set(always)), key=lambda t: (-int(counts[t]), t))
    kept = sorted([*set(always), *others][: vocabulary.size])
    return dict(enumerate(kept))


def agrees(vocabulary: DraftVocabulary, expected: dict[int, int]) -> bool:
    """Whether every conversion says what the dict says."""
    back = {target: draft for draft, target in expected.items()}
    every = torch.arange(vocabulary.vocab_size)
    try:
        return (
            vocabulary.targets.tolist() == list(expected.values())
            and vocabulary.to_draft(every).tolist() == [back.get(t, -1) for t in every.tolist()]
            and vocabulary.t2d.nonzero().squeeze(1).tolist() == sorted(back)
        )
    except IndexError:
        return False


@pytest.mark.parametrize("size", [1, 2, 40, V - 1, V])
@pytest.mark.parametrize("always", [(), (96,), (0, 50, 96, 50)])
def test_the_most_frequent_ties_to_the_lower_id(size, always):
    if size < len(set(always)):
        pytest.skip("refused, see below")
    for seed in range(5):
        counts = counts_of(seed)
        vocabulary = choose(counts, size, always)
        assert agrees(vocabulary, oracle(vocabulary, counts, always))
        assert vocabulary.ascending and vocabulary.d2t.dtype == torch.int64
        assert (vocabulary.d2t >= 0).all() and (vocabulary.d2t.diff() >= 0).all()
    assert len(set(counts.tolist())) < V / 2, "there were ties to break"


def test_the_full_vocabulary_is_the_identity():
    for vocabulary in (choose(counts_of(), V), full(V)):
        assert not vocabulary.d2t.any() and vocabulary.t2d.all()
        assert vocabulary.tensors() == {}, "engines refuse a d2t where D = V"
        assert vocabulary.digest() == full(V).digest()


def test_there_and_back():
    vocabulary = chosen()
    inside = vocabulary.t2d.nonzero().squeeze(1)
    assert torch.equal(vocabulary.targets[vocabulary.to_draft(inside)], inside)
    ids = torch.tensor([[[-100, -1, V]], [[V + 55, int(inside[3]), int((~vocabulary.t2d).nonzero()[0])]]])
    drafts = vocabulary.to_draft(ids)
    assert drafts.tolist() == [[[-1, -1, -1]], [[-1, 3, -1]]], "no id outside 0..V-1 is read from the end of the table"
    assert torch.equal(vocabulary.to_draft(ids.int()), drafts)


def test_logits_are_spread_with_their_gradients():
    vocabulary = chosen(7)
    small = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    wide = vocabulary.spread(small)
    assert torch.equal(wide[..., vocabulary.targets], small) and (wide[..., ~vocabulary.t2d] == -math.inf).all()
    assert torch.equal(vocabulary.spread(small, 0.5)[0, 0][~vocabulary.t2d], torch.full((V - 7,), 0.5, dtype=torch.float64))
    wide[..., vocabulary.t2d].sum().backward()
    assert torch.equal(small.grad, torch.ones_like(small))
    with pytest.raises(ValueError, match="D = 7"):
        vocabulary.spread(torch.zeros(2, V))


@pytest.mark.parametrize("size,always,message", [(0, (), "of 0"), (V + 1, (), "1..97"), (2, (3, 4, 5), "3..97"), (5, (V,), "token id 97")])
def test_choose_refuses(size, always, message):
    with pytest.raises(ValueError, match=message) as error:
        choose(counts_of(), size, always)
    assert "\n" not in str(error.value)


def test_a_checkpoint_gives_the_same_vocabulary():
    vocabulary = chosen()
    stored = vocabulary.tensors()
    for d2t, t2d in ((stored["d2t"], stored["t2d"]), (stored["d2t"], None), (stored["d2t"].int(), stored["t2d"])):
        again = from_tensors(d2t, t2d, V, 40)
        assert again.digest() == vocabulary.digest() and torch.equal(again.t2d, vocabulary.t2d) and again.d2t.dtype == torch.int64
    assert from_tensors(None, None, V, V).digest() == full(V).digest()
    unsorted = torch.tensor([5, 2, 9])
    again = from_tensors(unsorted - torch.arange(3), None, V)
    assert again.targets.tolist() == [5, 2, 9] and not again.ascending
    assert again.to_draft(torch.tensor([9, 5, 2])).tolist() == [2, 0, 1]


def test_the_digest_tells_vocabularies_apart():
    digests = {
        v.digest() for v in (chosen(40), chosen(39), chosen(40, seed=1), full(V), full(V + 1), choose(counts_of(vocab_size=V + 1), 40))
    }
    assert len(digests) == 6
    assert chosen().to("cpu").digest() == chosen().digest() and len(chosen().digest()) == 64


def off_by_one(v):
    return {"d2t": v.d2t + 1, "t2d": v.t2d}


def mask_off_by_one(v):
    return {"d2t": v.d2t, "t2d": v.t2d.roll(1)}


def direct_ids(v):
    return {"d2t": v.targets, "t2d": v.t2d}


def direct_ids_alone(v):
    return {"d2t": v.targets, "t2d": None}


def another_model(v):
    return {"d2t": v.d2t + V, "t2d": v.t2d}


def duplicates(v):
    d2t = v.d2t.clone()
    d2t[1] = d2t[0] - 1
    return {"d2t": d2t, "t2d": None}


MAPS = {
    "offsets wrong by one": (off_by_one, "disagree on|another model"),
    "mask wrong by one": (mask_off_by_one, "disagree on"),
    "mask of another run": (lambda v: {"d2t": v.d2t, "t2d": chosen(40, seed=9).t2d}, "disagree on"),
    "ids for offsets": (direct_ids, "holds target ids"),
    "ids for offsets, no mask": (direct_ids_alone, "holds target ids"),
    "past V": (another_model, "another model"),
    "negative": (lambda v: {"d2t": v.d2t - V, "t2d": None}, "another model"),
    "one token twice": (duplicates, "39 different ones of 40"),
    "mask too short": (lambda v: {"d2t": v.d2t, "t2d": v.t2d[:-1]}, r"expected \[97\] bool"),
    "mask as integers": (lambda v: {"d2t": v.d2t, "t2d": v.t2d.long()}, r"expected \[97\] bool"),
    "floating offsets": (lambda v: {"d2t": v.d2t.float(), "t2d": v.t2d}, "int64"),
    "boolean offsets": (lambda v: {"d2t": v.d2t.bool(), "t2d": v.t2d}, "int64"),
    "two dimensions": (lambda v: {"d2t": v.d2t[None], "t2d": v.t2d}, r"\[1, 40\]"),
    "empty": (lambda v: {"d2t": v.d2t[:0], "t2d": v.t2d}, "D in 1..97"),
    "longer than V": (lambda v: {"d2t": torch.zeros(V + 1).long(), "t2d": None}, "D in 1..97"),
    "fewer than the head": (lambda v: {"d2t": v.d2t, "t2d": v.t2d, "size": 41}, "head of 41 rows"),
    "left out": (lambda v: {"d2t": None, "t2d": None, "size": 40}, "no d2t"),
    "left out, mask there": (lambda v: {"d2t": None, "t2d": v.t2d}, "no d2t"),
}


@pytest.mark.parametrize("name", MAPS)
def test_a_wrong_map_is_refused_by_name(name):
    fault, message = MAPS[name]
    for seed in range(4):
        with pytest.raises(ValueError, match=message) as error:
            from_tensors(**({"vocab_size": V} | fault(chosen(seed=seed))))
        assert "\n" not in str(error.value)


def test_ids_for_offsets_are_recognised_in_a_large_vocabulary_without_the_mask():
    low = choose(torch.arange(20_000).flip(0), 2_000)  # ids 0..1999: taken as offsets they stay inside V
    with pytest.raises(ValueError, match="holds target ids"):
        from_tensors(low.targets, None, 20_000)
    sparse = choose(torch.tensor([1, 0, 1, 0, 1, 0]), 3)  # offsets 0, 1, 2 could be ids too: with the mask they are what they say
    assert from_tensors(sparse.d2t, sparse.t2d, 6).targets.tolist() == [0, 2, 4]
    assert from_tensors(sparse.d2t, None, 6).targets.tolist() == [0, 2, 4]


def offsets_plus_one(v):
    return DraftVocabulary(v.d2t + 1, v.t2d)


def offsets_minus_one(v):
    return DraftVocabulary(v.d2t - 1, v.t2d)


def ids_as_offsets(v):
    return DraftVocabulary(v.targets, v.t2d)


def offsets_of_the_neighbour(v):
    return DraftVocabulary(v.d2t.roll(1), v.t2d)


def mask_of_the_neighbour(v):
    return DraftVocabulary(v.d2t, v.t2d.roll(1))


def one_token_swapped(v):
    d2t = v.d2t.clone()
    d2t[4], d2t[5] = d2t[5] + 1, d2t[4] - 1
    return DraftVocabulary(d2t, v.t2d)


FAULTS = [offsets_plus_one, offsets_minus_one, ids_as_offsets, offsets_of_the_neighbour, mask_of_the_neighbour, one_token_swapped]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_sees_planted_faults(fault):
    vocabulary = chosen()
    expected = oracle(vocabulary, counts_of())
    assert agrees(vocabulary, expected), "red before a fault was planted"
    assert not agrees(fault(vocabulary), expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint16])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.uint8])
def test_count(monkeypatch, dtype, mask_dtype):
    monkeypatch.setattr(vocab, "CHUNK", 10)
    gen = torch.Generator().manual_seed(0)
    ids, mask = torch.randint(0, V, (3, 41), generator=gen), torch.rand(3, 41, generator=gen) < 0.5
    expected = [0] * V
    for token, supervised in zip(ids.flatten().tolist(), mask.flatten().tolist(), strict=True):
        expected[token] += supervised
    counts = count(ids.to(dtype), mask.to(mask_dtype), V)
    assert counts.tolist() == expected and counts.dtype == torch.int64
    assert count(ids.T, mask.T, V).tolist() == expected, "any layout in memory"
    assert count(ids.to(dtype), mask.to(torch.int16) * 3, V).tolist() == [3 * times for times in expected]
    assert not count(torch.zeros(0, dtype=dtype), torch.zeros(0), V).any()


def test_count_refuses(monkeypatch):
    monkeypatch.setattr(vocab, "CHUNK", 2)
    for bad in (V, -1):
        with pytest.raises(ValueError, match=rf"token id {bad}, expected 0..96 \(V = 97\).*another tokenizer"):
            count(torch.tensor([0, 1, 2, bad]), torch.tensor([1, 1, 1, 0]), V)
    with pytest.raises(ValueError, match="equal shapes"):
        count(torch.zeros(3).long(), torch.ones(2), V)
    with pytest.raises(ValueError, match="expected integers"):
        count(torch.zeros(3), torch.ones(3), V)


def test_count_never_copies_its_input_in_full(monkeypatch):
    monkeypatch.setattr(vocab, "CHUNK", 1000)
    ids, mask = torch.zeros(3, 1000, dtype=torch.int32), torch.ones(3, 1000, dtype=torch.bool)
    given = {x.untyped_storage().data_ptr() for x in (ids, mask)}

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in given:
                self.elements = max(self.elements, out.numel())
            return out

    with Largest() as largest:
        assert count(ids, mask, V)[0] == 3000
    assert largest.elements == 1000


@pytest.mark.parametrize("shape", [(6,), ()])
def test_rows_are_re_indexed(shape):
    old, new = chosen(40, seed=1), chosen(30, seed=2)
    rows = torch.randn(40, *shape)
    moved, known_rows = new.re_index(rows, old)
    known = oracle(old, counts_of(1))
    where = {target: draft for draft, target in known.items()}
    for draft, target in oracle(new, counts_of(2)).items():
        assert bool(known_rows[draft]) == (target in where)
        assert torch.equal(moved[draft], rows[where[target]] if target in where else torch.zeros(shape))
    assert 0 < known_rows.sum() < 30
    same, all_known = old.re_index(rows, old)
    assert torch.equal(same, rows) and all_known.all()
    with pytest.raises(ValueError, match="got 39 rows"):
        new.re_index(rows[1:], old)
    with pytest.raises(ValueError, match="same target vocabulary"):
        new.re_index(rows, choose(counts_of(1, V + 1), 40))


def test_coverage_overall_and_by_domain():
    counts = {"code": counts_of(1), "prose": counts_of(2), "none": torch.zeros(V, dtype=torch.int64)}
    vocabulary = choose(counts["code"] + counts["prose"], 20)
    result = coverage(counts, vocabulary)
    inside = {name: sum(int(one[t]) for t in vocabulary.targets.tolist()) for name, one in counts.items()}
    total = {name: int(one.sum()) for name, one in counts.items()}
    assert result.size == 20 and result.overall == sum(inside.values()) / sum(total.values())
    assert result.domains["code"] == inside["code"] / total["code"] and math.isnan(result.domains["none"])
    alone = coverage(counts["prose"], vocabulary)
    assert alone.overall == result.domains["prose"] and alone.domains == {}
    assert coverage(counts, full(V)).overall == 1.0
    with pytest.raises(ValueError, match="no supervised token"):
        coverage(counts["none"], vocabulary)
    with pytest.raises(ValueError, match="V = 97"):
        coverage(counts_of(0, V + 1), vocabulary)


def test_the_sweep_is_one_row_a_size():
    counts = {"code": counts_of(1), "prose": counts_of(2)}
    table = sweep(counts, [1, 10, 50, V])
    assert [row.size for row in table] == [1, 10, 50, V] and table[-1].overall == 1.0
    assert table == [coverage(counts, choose(counts["code"] + counts["prose"], size)) for size in (1, 10, 50, V)]
    assert all(a.overall <= b.overall for a, b in zip(table, table[1:], strict=False))


def walked(ids, mask, vocabulary, depth, documents) -> tuple[float, float]:
    """The best τ of all ways to cut the text into rounds, and the mean over positions."""
    inside = set(vocabulary.targets.tolist())
    tokens = rounds = emitted = 0
    for row, (row_ids, row_mask) in enumerate(zip(ids.tolist(), mask.tolist(), strict=True)):
        spans, last = [], None
        for place, (token, bears_loss) in enumerate(zip(row_ids, row_mask, strict=True)):
            document = int(documents[row, place])
            if bears_loss and last == document:
                spans[-1].append(token)
            elif bears_loss:
                spans.append([token])
            last = document if bears_loss else None
        for span in spans:

            def emits(at, span=span):
                run = 0
                while run < depth and at + run < len(span) and span[at + run] in inside:
                    run += 1
                return min(run + 1, len(span) - at)

            # The fewest rounds, whatever a drafter leaves out: no step longer than `emits`, any shorter one.
            fewest = [0]
            for at in reversed(range(len(span))):
                fewest.insert(0, 1 + min(fewest[: emits(at)]))
            rounds += fewest[0]
            tokens, emitted = tokens + len(span), emitted + sum(map(emits, range(len(span))))
    return tokens / rounds, emitted / tokens


@pytest.mark.parametrize("depth", [0, 1, 3, 50])
@pytest.mark.parametrize("chunk", [1, 100, 1 << 20])
def test_the_ceiling_is_the_best_that_decoding_round_by_round_can_do(monkeypatch, depth, chunk):
    monkeypatch.setattr(vocab, "CHUNK", chunk)
    gen = torch.Generator().manual_seed(depth)
    vocabulary = chosen(70)
    ids, mask = torch.randint(0, V, (9, 37), generator=gen), torch.rand(9, 37, generator=gen) < 0.85
    ids[3, 5] = V + 4  # a padded head's token: OOV
    documents = (torch.rand(9, 37, generator=gen) < 0.1).cumsum(1)
    for name in (documents, documents * 0):
        best = ceiling(ids, mask, vocabulary, depth, name)
        assert (best.tau, best.positions) == pytest.approx(walked(ids, mask, vocabulary, depth, name), abs=1e-12)
    assert ceiling(ids, mask.to(torch.uint8), vocabulary, depth) == best
    assert 1.0 <= best.tau <= depth + 1


def test_the_ceiling_at_document_ends():
    ids, mask = torch.zeros(1, 16, dtype=torch.int32), torch.ones(1, 16)
    assert ceiling(ids, mask, full(V), 7).tau == 8.0, "two full rounds"
    documents = torch.tensor([[0] * 7 + [1] * 9])
    assert ceiling(ids, mask, full(V), 7, documents).tau == 16 / 3, "no round crosses into the next document"
    assert ceiling(ids, mask, choose(torch.arange(V), 1), 7).tau == 1.0, "every token is OOV"
    mask[0, 0] = 0
    assert ceiling(ids[0], mask[0], full(V), 7).tau == 15 / 2, "tokens past the end are not counted; one dimension is one row"


def test_the_ceiling_of_spread_and_clustered_oov_tokens():
    gen = torch.Generator().manual_seed(0)
    vocabulary = choose(torch.tensor([1, 0]), 1)  # token 0 is in, token 1 is OOV
    ids = (torch.rand(64, 512, generator=gen) < 0.1).long()
    mask = torch.ones_like(ids)
    # Of a drafter that is never wrong inside the vocabulary, where OOV tokens are independent of each other.
    predicted = sum(coverage(count(ids, mask, 2), vocabulary).overall ** k for k in range(8))
    independent = ceiling(ids, mask, vocabulary, 7)
    assert independent.tau == pytest.approx(predicted, rel=0.02) == pytest.approx(independent.positions, rel=0.02)
    clustered = ceiling(ids.flatten().sort().values.view(64, 512), mask, vocabulary, 7)
    assert clustered.tau < 0.95 * predicted < 0.95 * clustered.positions
    even = torch.zeros(64, 512, dtype=torch.int64)
    even[:, 7::8] = 1
    shares = coverage(count(even, mask, 2), vocabulary)
    assert ceiling(even, mask, vocabulary, 7).tau == 8.0 == 1 / (1 - shares.overall)


def test_the_ceiling_refuses():
    ids = torch.zeros(2, 3).long()
    with pytest.raises(ValueError, match="no supervised token"):
        ceiling(ids, ids, full(V), 3)
    with pytest.raises(ValueError, match="equal shapes"):
        ceiling(ids, ids[:1], full(V), 3)
    with pytest.raises(ValueError, match="depth -1"):
        ceiling(ids, ids + 1, full(V), -1)
