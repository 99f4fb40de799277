"""What evaluation records: a line for each round of real decoding, a line for each position of the target's own text, and the report.

Letters: S positions · V target vocabulary · D draft vocabulary · K draft depth · N tree nodes with the root.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference import durable

KEYED_RULES = ("target-sample", "shared-noise")  # they draw with noise keyed by position, and so give the very tokens of plain decoding
ALLOWANCE = 4.0  # a margin up to so many times the noise is a tie: few forwards measure the noise, so its maximum may be larger
EXCESS = 3.0  # hidden states farther than so many spreads from the reference forwards are wrong; LOG.md has both distributions


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One round of real decoding.

    Attributes:
        prompt: id of the prompt.
        domain: of the prompt.
        temperature: 0 is greedy.
        rule: the rule that verified the draft; some are lossy, see RULES.
        position: index in the sequence of the last committed token, the root of the draft tree.
        nodes: nodes verified, the root included.
        committed: tokens committed, the bonus token included, tokens past the end of the text excluded.
        accepted: drafted tokens among them.
        draft_s: seconds of drafting; this and the others are None for a prompt that was not timed.
        verify_s: seconds of verifying.
        other_s: seconds of everything else.
    """

    prompt: str
    domain: str
    temperature: float
    rule: str
    position: int
    nodes: int
    committed: int
    accepted: int
    draft_s: float | None
    verify_s: float | None
    other_s: float | None


@dataclass(frozen=True, slots=True)
class PositionRecord:
    """The target's text after one prompt, and how the drafter ranks it.

    Attributes:
        prompt: id of the prompt.
        domain: of the prompt.
        ranks: [S,K] int64. For a draft tree with its root at position s, the rank (from 0) of the target's token at depth k + 1, given the
            target's own tokens before it; −1 for ranks that are not recorded and past the end of the text.
        log_probs: [S,K] float32, the drafter's log-probabilities of the same tokens; −inf past the end of the text.
    """

    prompt: str
    domain: str
    ranks: Tensor
    log_probs: Tensor


@dataclass(frozen=True, slots=True)
class Acceptance:
    """τ over some rounds, with its 95 % interval [low, high], None with too few prompts.

    survival[k] is P(at least k + 1 drafted tokens accepted); conditional[k] is survival[k] / survival[k − 1].
    """

    prompts: int
    rounds: int
    tokens: int
    tau: float
    low: float | None
    high: float | None
    survival: tuple[float, ...]
    conditional: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference of an answer from plain decoding's.

    Attributes:
        prompt: id of the prompt.
        index: of the token in the answer.
        expected: the token of plain decoding.
        got: the token of the answer.
        margin: difference of their scores in float32.
        noise: how far rounding may move that difference, by forwards of several widths and batches and by one step of the dtype.
        excess: how far the hidden states of the two answers are from those of reference forwards at most, in spreads of the latter; None
            where the answers could not be decoded again.
        own_best: whether each of the two tokens is what sampling draws from its own answer's hidden state.
    """

    prompt: str
    index: int
    expected: int
    got: int
    margin: float
    noise: float
    excess: float | None = None
    own_best: bool = True

    @property
    def verdict(self) -> str:
        """ "tie" where rounding explains the difference, else "bug". Without hidden states the margin decides."""
        if self.excess is None:
            return "tie" if self.margin <= ALLOWANCE * self.noise else "bug"
        return "tie" if self.excess <= EXCESS and self.own_best else "bug"


@dataclass(slots=True)
class Report:
    """All results of `draftsmith eval`.

    Attributes:
        target: a `TargetIdentity` as a dict.
        method: the drafter's.
        settings: what the numbers depend on.
        tree: the draft tree, as a config has it.
        nodes: most nodes of a round.
        cost: seconds of a target forward over N nodes, by N.
        drafting: seconds of drafting a chain, by its depth K.
        by_nodes: for some N, the best tree of N nodes: its depth, its exact τ on the reported half of the prompts, the relative cost of
            its round, and τ over it.
        overall: by temperature, over all reported prompts.
        domains: by domain, at the first temperature.
        distinct: distinct 8-grams over all 8-grams of the answers at the first temperature.
        divergences: answers that differ from plain decoding's, where the rule promises the same tokens.
        answers: how many answers were compared with plain decoding's.
        checked_tokens: how many tokens of them, up to the first that differs.
        like_transformers: how many greedy answers of plain decoding equal those of transformers' generate.
        compared: how many were compared with those of transformers.
        speed: measured at the first temperature, on the prompts that were timed.
        speedups: the same by domain, where prompts were timed one at a time.
        skipped: by domain, prompts that do not fit the target's context.
        lossy: by temperature, the rule, where it changes the distribution of the output.
    """

    target: dict[str, str]
    method: str
    settings: dict[str, Any]
    tree: list[list[int]] | dict[str, int]
    nodes: int
    cost: dict[int, float]
    drafting: dict[int, float]
    by_nodes: list[dict[str, float]]
    overall: dict[str, Acceptance] = field(default_factory=dict)
    domains: dict[str, Acceptance] = field(default_factory=dict)
    distinct: float = 1.0
    divergences: list[Divergence] = field(default_factory=list)
    answers: int = 0
    checked_tokens: int = 0
    like_transformers: int = 0
    compared: int = 0
    speed: dict[str, float] = field(default_factory=dict)
    speedups: dict[str, dict[str, float]] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    lossy: dict[str, str] = field(default_factory=dict)

    @property
    def divergences_per_1000(self) -> float:
        """Answers that diverge from plain decoding's, per 1,000 tokens compared."""
        return 1000 * len(self.divergences) / max(1, self.checked_tokens)

    @property
    def first_temperature(self) -> str:
        """The temperature of the table by domain, of `distinct` and of `speed`."""
        return next(iter(self.overall))


def as_json(report: Report) -> str:
    """The report as one line of JSON. Divergences get their verdict."""
    fields: dict[str, Any] = asdict(report) | {"divergences_per_1000": report.divergences_per_1000}
    for row, divergence in zip(fields["divergences"], report.divergences, strict=True):
        row["verdict"] = divergence.verdict
    return to_json(fields)


def to_json(content: dict[str, Any]) -> str:
    """Measurements as one line of JSON. Numbers that are not finite are null: a report is not lost to one of them."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [finite(inner) for inner in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(content), allow_nan=False)


def write_rounds(path: Path, records: Iterable[RoundRecord]) -> None:
    """Write one JSON line for each round."""
    durable.write_text(path, "".join(json.dumps(asdict(record)) + "\n" for record in records))


def write_positions(path: Path, records: Iterable[PositionRecord]) -> None:
    """Write one JSON line for each prompt: ranks and log-probabilities [S][K], with null for an infinite one."""
    lines = []
    for record in records:
        logs = [[round(log, 4) if math.isfinite(log) else None for log in row] for row in record.log_probs.tolist()]
        fields = {"prompt": record.prompt, "domain": record.domain, "ranks": record.ranks.tolist(), "log_probs": logs}
        lines.append(json.dumps(fields) + "\n")
    durable.write_text(path, "".join(lines))


def distinct_ngrams(texts: list[list[int]], n: int = 8) -> float:
    """Distinct n-grams over all n-grams of the texts. A target that repeats itself scores low, and makes any drafter look good."""
    grams = [tuple(text[i : i + n]) for text in texts for i in range(len(text) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def rank_of(logits: Tensor, token: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """Rank and log-probability of given tokens.

    Args:
        logits: [...,D] of the drafter.
        token: [...], ids of the target's vocabulary. A token outside the draft vocabulary is a miss.
        ranks: how many ranks are recorded.

    Returns:
        The rank [...], counted from 0, −1 from `ranks` on; the log-probability [...]. Equal logits rank by token id, as in top-k on a CPU
        and in argmax.
    """
    known = token < logits.shape[-1]
    token = torch.where(known, token, 0)
    chosen = logits.gather(-1, token[..., None])
    ids = torch.arange(logits.shape[-1], device=logits.device)
    before = (logits > chosen) | ((logits == chosen) & (ids < token[..., None]))
    rank = before.sum(-1)
    log_prob = chosen[..., 0].float() - logits.float().logsumexp(-1)
    return torch.where(known & (rank < ranks), rank, -1), torch.where(known, log_prob, -torch.inf)
