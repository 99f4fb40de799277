"""What evaluation keeps: a record for every round of real decoding, and one for every position of the target's own text.

Letters: S positions · K draft depth.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ALLOWANCE = 4.0  # times the noise measured at the very position: one sample of it is a low guess at its maximum


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One round: `rule` that verified it (some are lossy, see RULES), `position` of its root in the sequence, nodes verified, tokens committed (the bonus in, what is past the end
    out), tokens accepted (the bonus out), seconds."""

    prompt: str
    domain: str
    temperature: float
    rule: str
    position: int
    nodes: int
    committed: int
    accepted: int
    draft_s: float
    verify_s: float
    other_s: float


@dataclass(frozen=True, slots=True)
class PositionRecord:
    """The target's text after one prompt, and where the drafter ranks it.

    `ranks` [S,K] int64: at root position s, the drafter's rank (from 0) of the target's token at depth k + 1, given the
    target's own tokens before it; −1 beyond the ranks kept and past the end of the text. `log_probs` [S,K] float32 likewise.
    """

    prompt: str
    domain: str
    ranks: Tensor
    log_probs: Tensor


@dataclass(frozen=True, slots=True)
class Acceptance:
    """tau with its 95 % interval; survival[k] = P(at least k+1 accepted); conditional[k] = survival[k] / survival[k−1]."""

    prompts: int
    rounds: int
    tokens: int
    tau: float
    low: float
    high: float
    survival: tuple[float, ...]
    conditional: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where two answers part: index in the answer, the score margin between the two tokens, the noise."""

    prompt: str
    index: int
    expected: int
    got: int
    margin: float
    noise: float

    @property
    def verdict(self) -> str:
        return "tie" if self.margin <= ALLOWANCE * self.noise else "bug"


@dataclass(slots=True)
class Report:
    """Everything that `draftsmith eval` found."""

    target: dict[str, str]
    method: str
    settings: dict[str, Any]
    tree: list[list[int]] | dict[str, int]
    nodes: int
    cost: dict[int, float]  # seconds of a target forward over N nodes, by N
    drafting: dict[int, float]  # seconds of drafting a chain of depth K, by K
    by_nodes: list[dict[str, float]]  # the best tree of N nodes: its depth, exact τ on the reported half, cost of a round, τ over it
    overall: dict[str, Acceptance] = field(default_factory=dict)  # by temperature
    domains: dict[str, Acceptance] = field(default_factory=dict)  # greedy
    distinct: float = 1.0
    divergences: list[Divergence] = field(default_factory=list)
    answers: int = 0
    like_transformers: int = 0  # greedy answers of plain decoding that equal transformers' generate
    compared: int = 0  # with transformers
    speed: dict[str, float] = field(default_factory=dict)
    lossy: dict[str, str] = field(default_factory=dict)  # rules that change the output's law, by temperature


def as_json(report: Report) -> str:
    """The report as one line of JSON; an infinite margin is null, a divergence says its verdict."""
    fields = asdict(report)
    for row, parted in zip(fields["divergences"], report.divergences, strict=True):
        row |= {"verdict": parted.verdict, "margin": parted.margin if math.isfinite(parted.margin) else None}
    return json.dumps(fields, allow_nan=False)


def write_rounds(path: Path, records: Iterable[RoundRecord]) -> None:
    """One JSON line for each round."""
    path.write_text("".join(json.dumps(asdict(record)) + "\n" for record in records))


def write_positions(path: Path, records: Iterable[PositionRecord]) -> None:
    """One JSON line for each prompt: ranks and log-probabilities [S][K]; null where the text had ended."""
    with path.open("w") as file:
        for record in records:
            logs = [[round(log, 4) if math.isfinite(log) else None for log in row] for row in record.log_probs.tolist()]
            row = {"prompt": record.prompt, "domain": record.domain, "ranks": record.ranks.tolist(), "log_probs": logs}
            file.write(json.dumps(row) + "\n")


def distinct_ngrams(texts: list[list[int]], n: int = 8) -> float:
    """Distinct n-grams over all n-grams of the answers: a target that loops scores low, and makes any drafter look good."""
    grams = [tuple(text[i : i + n]) for text in texts for i in range(len(text) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def rank_of(logits: Tensor, token: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """logits [...,V] and token [...] -> (rank [...], −1 from `keep` on; log-probability [...])."""
    known = token < logits.shape[-1]  # a draft vocabulary may be smaller than the target's: a miss
    token = torch.where(known, token, 0)
    chosen = logits.gather(-1, token[..., None])
    # Equal logits rank by id, as top-k on the CPU and the argmax do.
    ids = torch.arange(logits.shape[-1], device=logits.device)
    before = (logits > chosen) | ((logits == chosen) & (ids < token[..., None]))
    rank = before.sum(-1)
    log_prob = chosen[..., 0].float() - logits.float().logsumexp(-1)
    return torch.where(known & (rank < keep), rank, -1), torch.where(known, log_prob, -torch.inf)
