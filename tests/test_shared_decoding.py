"""Several processes complete prompts as one does. Here threads stand for processes; `test_data_cli.py` launches real ones."""

import threading
from types import SimpleNamespace

import pytest
from regeneration import CONVERSATIONS, SAMPLED, make_target

from draftsmith.data import regenerate, shared_decoding
from draftsmith.data.shared_decoding import Prompts, SharedDecoder
from draftsmith.inference.sampler import Sampling

PROCESSES = 3
PROMPTS = Prompts(
    [[n + 5] * (1 + n % 4) for n in range(8)], list(range(40, 48)), Sampling(1.0, seed=2), 11, frozenset(range(40))
)  # a token in six ends an answer


@pytest.fixture(scope="module")
def target():
    return make_target()


class Threads:
    """Stands for `models.ranks`: each thread is a process of the launch."""

    def __init__(self, count):
        self._count, self._barrier, self._sent = count, threading.Barrier(count, timeout=60), {}

    def count(self):
        return self._count

    def state(self):
        rank = int(threading.current_thread().name)
        return SimpleNamespace(process_index=rank, is_main_process=rank == 0)

    def gather(self, values):
        self._barrier.wait()
        self._sent |= values
        self._barrier.wait()
        gathered = dict(self._sent)
        self._barrier.wait()
        self._sent.clear()
        return gathered

    def agreed(self, value):
        return self.gather({"first": value} if self.state().is_main_process else {})["first"]


@pytest.fixture
def threads(monkeypatch):
    """Run one function as the first process, another as all others -> the first one's result. Its error is raised once all have ended."""
    threads = Threads(PROCESSES)

    def run(first, others):
        results, errors, codes = [], [], []

        def caught(work):
            try:
                results.append(work())
            except ValueError as error:
                errors.append(error)
            except SystemExit as ended:
                codes.append(ended.code)

        all_threads = [threading.Thread(target=caught, args=(others if n else first,), name=str(n)) for n in range(PROCESSES)]
        for thread in all_threads:
            thread.start()
        for thread in all_threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in all_threads)
        if errors:
            assert codes == [2] * (PROCESSES - 1) and not results
            raise errors[0]
        assert results.count(None) == PROCESSES - 1 and not codes
        return next(result for result in results if result is not None)

    monkeypatch.setattr(shared_decoding, "ranks", threads)
    return run


def decoder(target):
    return SharedDecoder(target, slots=2, kernels=False)


def test_all_processes_together_complete_what_one_does_and_count_it(target, threads, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(shared_decoding, "ranks", Threads(1))
        expected = decoder(target).completions(PROMPTS, lambda *new: None)
    assert len({len(completion.tokens) for completion in expected}) > 2 and {"stop", "length"} == {c.reason for c in expected}
    reported = [0, 0]

    def report(*new):
        for part, number in enumerate(new):
            reported[part] += number

    def first():
        with decoder(target) as shared:
            return [shared.completions(prompts, report) for prompts in (PROMPTS, PROMPTS.share(0, 8), PROMPTS.share(0, 100))]

    completed = threads(first, decoder(target).help)
    assert completed == [expected, expected[:1], expected[:1]]  # of one prompt the first process has all, and the others none
    assert reported == [sum(len(c.tokens) for c in expected) + 2 * len(expected[0].tokens), len(expected) + 2]


def test_the_others_end_when_the_first_has_written_all_and_when_it_is_refused(target, threads, tmp_path, monkeypatch):
    def write(path, **more):
        return lambda: regenerate.with_decoder(CONVERSATIONS, tmp_path / path, target, SAMPLED, slots=2, show=False, **more)

    monkeypatch.setattr(regenerate, "group_size", lambda kernels: 3)
    summary = threads(write("shared"), decoder(target).help)
    assert summary.rows == len(CONVERSATIONS)
    with pytest.raises(ValueError, match="got group 0"):
        threads(write("shared", group=0), decoder(target).help)
    monkeypatch.undo()
    write("alone", group=3)()
    assert (tmp_path / "shared").read_bytes() == (tmp_path / "alone").read_bytes()
