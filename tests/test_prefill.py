"""Which prompts go through the target together."""

import pytest
import torch
from regeneration import make_target

from draftsmith.inference import prefill
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.sampler import Sampling

NEW = 12


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture
def forwards(target, monkeypatch):
    """The prompts of each forward of a prefill, by their lengths: those of its rows in the order of their slots."""
    forwards, run_batch = [], prefill.Prefill._run_batch

    def watched(self, requests):
        forwards.append([(request.slot, len(request.prompt)) for request in requests])
        run_batch(self, requests)

    monkeypatch.setattr(prefill.Prefill, "_run_batch", watched)
    return forwards


def prompts_of(*lengths):
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(40, 250, (length,), generator=generator).tolist() for length in lengths]


def answers(target, prompts, stop_ids=frozenset(range(80)), **more):
    decoder = Decoder(target, **more)
    return [completion.tokens for completion in decoder.generate(prompts, Sampling(1.0, seed=4), NEW, stop_ids)], decoder.counters


def alone(target, prompts):
    each = [
        Decoder(target).generate([prompt], Sampling(1.0, seed=4), NEW, frozenset(range(80)), [n])[0] for n, prompt in enumerate(prompts)
    ]
    return [completion.tokens for completion in each]


@pytest.mark.parametrize("together", [1, 3])
def test_prompts_of_slots_apart_go_through_the_target_in_one_forward(target, forwards, together):
    prompts = prompts_of(*range(3, 43))
    completed, counters = answers(target, prompts, slots=6, together=together)
    rows = [[slot for slot, _ in row] for row in forwards]
    assert completed == alone(target, prompts)
    assert len(rows) == counters.prefill_chunks and sum(map(len, rows)) == len(prompts)
    assert all(row == sorted(row) and len(row) >= together for row in rows[:-1])
    assert any(row[-1] - row[0] >= len(row) for row in rows)


def test_a_forward_on_a_cpu_has_prompts_of_similar_length_and_no_more_positions_than_its_caches_take(target, forwards, monkeypatch):
    monkeypatch.setattr(prefill, "CPU_POSITIONS", 40)
    prompts = prompts_of(30, 3, 21, 4, 60, 5, 20, 6)
    completed, _ = answers(target, prompts, slots=8)
    batches = [sorted(length for _, length in row) for row in forwards[:4]]
    assert batches == [[3, 4, 5, 6], [20], [21], [30]] and forwards[4] == [(4, 60)]
    monkeypatch.undo()
    assert completed == alone(target, prompts)


def test_prompts_of_many_chunks_do_not_go_with_short_ones_and_count_by_a_chunk(target, forwards, monkeypatch):
    monkeypatch.setattr(prefill, "CPU_POSITIONS", 24)
    prompts = prompts_of(100, 90, 8, 7)
    completed, counters = answers(target, prompts, slots=4, chunk=8)
    assert [sorted(length for _, length in row) for row in forwards] == [[7, 8], [90, 100]]
    assert counters.prefill_chunks == 1 + 13
    monkeypatch.undo()
    assert completed == alone(target, prompts)
