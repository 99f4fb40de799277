"""Decoding of many prompts, in one process or shared by the processes of a launch, on a GPU each or on a core each.

The first process prompts, and writes what becomes of the answers. The others only decode: each takes its share of the prompts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType

from draftsmith.inference.decoder import Completion, Decoder
from draftsmith.inference.drafter import Drafter
from draftsmith.inference.request import collect
from draftsmith.inference.sampler import Sampling
from draftsmith.models import ranks
from draftsmith.models.target import Target

__all__ = ["GROUP", "Prompts", "Report", "SharedDecoder", "group_size"]

# Conversations that a process works on until they are written. A kill loses them; at the end of each group slots wait without one.
GROUP = 128
GPU_GROUP = 1024  # with kernels: seconds of a GPU's work
TOGETHER = 8  # prompts wait until one slot in so many is free: a forward of one short prompt takes nearly as long as one of several

Report = Callable[[int, int], None]  # takes the new tokens and the finished answers since the last call; a correction may be negative


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts that are decoded together, with the other arguments of `Decoder.stream`; the noise keys are its `requests`."""

    token_ids: Sequence[list[int]]
    noise_keys: Sequence[int]
    sampling: Sampling
    max_new_tokens: int
    stop_ids: frozenset[int]

    def share(self, rank: int, count: int) -> "Prompts":
        """Every `count`-th prompt, from number `rank` on, so that each process gets some of each kind."""
        return replace(self, token_ids=self.token_ids[rank::count], noise_keys=self.noise_keys[rank::count])


def group_size(kernels: bool) -> int:
    """Conversations that are written to a file at once."""
    return ranks.count() * (GPU_GROUP if kernels else GROUP)


@dataclass(frozen=True, slots=True)
class _End:
    """What the others get after the last prompts. failed: the first process ends with an error."""

    failed: bool


class SharedDecoder:
    """Completes prompts with a target in all processes of a launch.

    The first process calls `completions`, within `with`; all others call `help`. When the context ends, the others' work does too. They do not hear
    of Ctrl-C, nor of an error while they decode: the launcher ends them.

    Args:
        target, drafter, slots, kernels: as for `Decoder`; each process has so many slots.
    """

    def __init__(self, target: Target, drafter: Drafter | None = None, *, slots: int, kernels: bool) -> None:
        self.target, self.drafter, self.slots, self.kernels = target, drafter, slots, kernels
        self._deciding = True  # the others wait for prompts; False while they decode

    def __enter__(self) -> "SharedDecoder":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._deciding and ranks.count() > 1 and (kind is None or issubclass(kind, Exception)):
            ranks.agreed(_End(failed=kind is not None))

    def completions(self, prompts: Prompts, report: Report) -> list[Completion]:
        """The completions of all prompts, in their order. What other processes have decoded is estimated until all are done."""
        count = ranks.count()
        if count == 1:
            return self._decode(prompts, report)
        self._deciding = False
        ranks.agreed(prompts)
        reported = [0, 0]

        def report_all(*new: int) -> None:
            for part, number in enumerate(new):
                reported[part] += count * number
            report(*(count * number for number in new))

        shares = ranks.gather({0: self._decode(prompts.share(0, count), report_all)})
        self._deciding = True
        completions = [Completion() for _ in prompts.token_ids]
        for rank, share in shares.items():
            completions[rank::count] = share
        tokens = sum(len(completion.tokens) for completion in completions)
        report(tokens - reported[0], len(completions) - reported[1])
        return completions

    def help(self) -> None:
        """Decode this process's share of the first one's prompts, until it has no more. Raises SystemExit where that one ends with an error."""
        rank, count = ranks.state().process_index, ranks.count()
        while isinstance(prompts := ranks.agreed(None), Prompts):
            ranks.gather({rank: self._decode(prompts.share(rank, count), lambda tokens, finished: None)})
        if prompts.failed:
            raise SystemExit(2)  # without a word, and without waiting for the first process

    def _decode(self, prompts: Prompts, report: Report) -> list[Completion]:
        # A new decoder each time: the larger cache of earlier prompts would change the rounding.
        together = max(1, self.slots // TOGETHER)
        decoder = Decoder(self.target, self.drafter, slots=self.slots, together=together, kernels=self.kernels)
        completions = [Completion() for _ in prompts.token_ids]
        limits = prompts.max_new_tokens, prompts.stop_ids
        for steps in decoder.stream(prompts.token_ids, prompts.sampling, *limits, prompts.noise_keys):
            collect(steps, completions)
            report(sum(len(step.tokens) for step in steps), sum(step.finished for step in steps))
        return [replace(completion, rounds=[]) for completion in completions]
