"""The measured speed: plain decoding, the drafter and transformers' `generate` on the same prompts, by turns in one process."""

from dataclasses import dataclass
from typing import Any

import torch

from draftsmith.eval.interleaved import TimedAnswers
from draftsmith.eval.intervals import Interval, of_ratio_of_ratios
from draftsmith.eval.records import RoundRecord


@dataclass(slots=True)
class Timing:
    """What this rank timed, batch by batch.

    Attributes:
        domains: of each batch; "" where it may have several prompts.
        prompts: of each batch, how many.
        seconds: by "plain", "drafted" and, where they took part, "transformers" and, beside exact rounds, "ordinary" plain decoding.
        tokens: likewise.
        c: verifying seconds of a mean round over those of a mean plain round; None with several slots, where rounds of different batch
            sizes would be compared. Rounds differ in size (a look-up may propose nothing), so only means say what they cost.
    """

    domains: list[str]
    prompts: list[int]
    seconds: dict[str, list[float]]
    tokens: dict[str, list[int]]
    c: float | None = None

    def add(self, domain: str, timed: dict[str, TimedAnswers]) -> None:
        """Enter a batch."""
        self.domains.append(domain)
        self.prompts.append(len(timed["plain"].answers))
        for name, turn in timed.items():
            self.seconds[name].append(turn.seconds)
            self.tokens[name].append(sum(len(answer.tokens) for answer in turn.answers))

    def of(self, domain: str) -> "Timing":
        """The batches of a domain."""
        chosen = [i for i, each in enumerate(self.domains) if each == domain]
        seconds = {name: [row[i] for i in chosen] for name, row in self.seconds.items()}
        tokens = {name: [row[i] for i in chosen] for name, row in self.tokens.items()}
        return Timing([domain] * len(chosen), [self.prompts[i] for i in chosen], seconds, tokens)


def speedups(timing: Timing) -> dict[str, Any]:
    """Speedups with 95 % intervals over the timed prompts. They compare seconds per token: total seconds where the answers are the same."""
    seconds, tokens = ({name: torch.tensor(row).double() for name, row in rows.items()} for rows in (timing.seconds, timing.tokens))

    def ratio(name: str, base: str) -> Interval:
        return of_ratio_of_ratios(*(torch.stack((of[name], of[base])) for of in (tokens, seconds)))

    entries: dict[str, Any] = {"timed": sum(timing.prompts)}
    for key, name in (("speedup", "plain"), ("speedup_over_transformers", "transformers")):
        if name in seconds:
            entries[key], entries[f"{key}_low"], entries[f"{key}_high"] = ratio("drafted", name)
    if "transformers" in seconds:
        entries["plain_over_transformers"] = ratio("plain", "transformers").estimate
    return entries


def speed(timing: Timing, records: list[RoundRecord]) -> dict[str, Any]:
    """The report's `speed`.

    Args:
        timing: of all timed prompts.
        records: their rounds.
    """
    rates = {name: sum(timing.tokens[name]) / sum(row) for name, row in timing.seconds.items()}
    tau = sum(record.committed for record in records) / len(records)
    entries = speedups(timing) | {
        "tau": tau,
        "nodes": sum(record.nodes for record in records) / len(records),
        "plain_tokens_per_s": rates["plain"],
        "drafted_tokens_per_s": rates["drafted"],
    }
    if "ordinary" in rates:
        entries["cost_of_exact"] = rates["ordinary"] / rates["plain"]
    if timing.c is not None:
        drafting, verifying = (sum(getattr(record, key) or 0.0 for record in records) for key in ("draft_s", "verify_s"))
        entries["c"] = timing.c
        entries["drafting"] = drafting / verifying * timing.c
        entries["predicted_speedup"] = tau / timing.c
        entries["realised_fraction"] = entries["speedup"] / entries["predicted_speedup"]
    return entries
