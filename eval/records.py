"""What an evaluation records, one JSON line each: a header, costs of rounds, prompts, the target's own texts with the drafter's ranks, the tree,
and requests, those of lossy rules beside plain decoding's answers.

All numbers, tables and pages of `draftsmith eval` are made from these lines alone (eval/report.py); eval/record_store.py writes them.

Letters: S positions · V target vocabulary · D draft vocabulary · K draft depth · N tree nodes with the root.
"""

import math
from dataclasses import asdict, astuple, dataclass, field
from dataclasses import fields as fields_of
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.reading import field as entry

KEYED_RULES = ("target-sample", "shared-noise")  # they draw with noise keyed by position, and so give the very tokens of plain decoding
ALLOWANCE = 4.0  # a margin up to so many times the noise is a tie: few forwards measure the noise, so its maximum may be larger
EXCESS = 3.0  # hidden states farther than so many spreads from the reference forwards are wrong; LOG.md has both distributions

DRIFT = ("prompts", "answer_tokens", "text_tokens", "kl", "perplexity", "adapted_perplexity", "changed")  # see `drift.measure`


@dataclass(frozen=True, slots=True)
class Round:
    """One round of real decoding.

    Attributes:
        position: index in the sequence of the last committed token, the root of the draft tree.
        nodes: nodes verified, the root included.
        committed: tokens committed, the bonus token included, tokens past the end of the text excluded.
        draft_s: seconds of drafting; this and the others are None for a request that was not timed.
        verify_s: seconds of verifying.
        other_s: seconds of everything else.
    """

    position: int
    nodes: int
    committed: int
    draft_s: float | None = None
    verify_s: float | None = None
    other_s: float | None = None

    @property
    def accepted(self) -> int:
        """Drafted tokens that were committed. A round that the end of the text cut short counts as if it had accepted one token less."""
        return self.committed - 1


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


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """A prompt as the target reads it.

    Attributes:
        prompt: its id.
        ids: its tokens.
        templated: the mark of a chat template in its words, to which the template is then applied again; "" where there is none.
        logged: whether a log has the answer, along which its positions are recorded instead of the target's own.
    """

    prompt: str
    ids: list[int]
    templated: str = ""
    logged: bool = False


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One prompt, answered plainly and with the drafter under one sampling setting.

    Attributes:
        prompt: id of the prompt.
        domain: of the prompt.
        language: of the prompt, "" where the prompts file does not say.
        setting: label of the sampling, see eval/settings.py.
        turn: of its conversation, from 1.
        prompt_tokens: tokens before the answer.
        tokens: the answer with the drafter.
        reason: why it ended: "stop", "length" or "context".
        rounds: of decoding with the drafter.
        plain_tokens: length of plain decoding's answer.
        checked: whether the rule promises plain decoding's tokens.
        divergence: the first difference from them; None where there is none, or where nothing is promised.
        equals_transformers: whether plain decoding's answer equals that of transformers; None where transformers did not answer.
        seconds: of its batch, by contender ("plain", "drafted", "transformers", "ordinary" beside exact rounds), {} where it was not
            timed. A batch of several has its seconds and tokens in its last request.
        batch_tokens: answered tokens of the batch, likewise.
        batch: requests of the batch; 0 where it was not timed, and in all but the last request.
        prefill_s: seconds until the first round with the drafter; None where that was not measured alone.
        plain_rounds: rounds of plain decoding whose verifying was timed.
        plain_verify_s: their seconds of verifying.
        plain_other_s: and of everything else.
    """

    prompt: str
    domain: str
    language: str
    setting: str
    turn: int
    prompt_tokens: int
    tokens: list[int]
    reason: str
    rounds: list[Round]
    plain_tokens: int
    checked: bool
    divergence: Divergence | None = None
    equals_transformers: bool | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    batch_tokens: dict[str, int] = field(default_factory=dict)
    batch: int = 0
    prefill_s: float | None = None
    plain_rounds: int = 0
    plain_verify_s: float = 0.0
    plain_other_s: float = 0.0

    @property
    def timed(self) -> bool:
        """Whether its rounds were timed."""
        return bool(self.rounds) and self.rounds[0].verify_s is not None

    @property
    def checked_tokens(self) -> int:
        """How many tokens were compared with plain decoding's, up to the first that differs."""
        return 0 if not self.checked else self.divergence.index + 1 if self.divergence else self.plain_tokens


@dataclass(frozen=True, slots=True)
class PositionRecord:
    """The target's own text after one prompt, and how the drafter ranks it. Row s belongs to a draft tree whose root comes before token s.

    Attributes:
        prompt: id of the prompt.
        domain: of the prompt.
        ranks: [S,K] int64, the rank (from 0) of the target's token at depth k + 1, given the target's own tokens before it; −1 for ranks
            that are not recorded and past the end of the text.
        log_probs: [S,K] float32, the drafter's log-probabilities of the same tokens; −inf past the end of the text.
        setting: label of the sampling by which the target wrote the text.
        choosing: whether its prompt chooses the draft tree; the report is on the others.
        tokens: [S] int64, the target's text; the first token of row s.
        entropy: [S] float32, of the target's distribution of that token at temperature 1, in nats.
        target_log_probs: [S] float32, the target's log-probability of it at temperature 1.
        drafted: [S,K] int64, the drafter's likeliest token at each depth, given the target's own tokens before it.
        drafted_log_probs: [S,K] float32, of them.
    """

    prompt: str
    domain: str
    ranks: Tensor
    log_probs: Tensor
    setting: str = "0"
    choosing: bool = False
    tokens: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    entropy: Tensor = field(default_factory=lambda: torch.zeros(0))
    target_log_probs: Tensor = field(default_factory=lambda: torch.zeros(0))
    drafted: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.int64))
    drafted_log_probs: Tensor = field(default_factory=lambda: torch.zeros(0, 0))


@dataclass(frozen=True, slots=True)
class QualityRecord:
    """An answer under a lossy rule beside plain decoding's. Logarithms are natural, and sums over the tokens of an answer.

    Attributes:
        prompt: id of the prompt.
        setting: label of the sampling; the tokens of the answer are those of the request at this setting.
        reference: known answers of the prompt.
        text: the answer.
        plain_text: plain decoding's.
        plain: the tokens of plain decoding's answer.
        log_prob: Σ ln p of the answer, p of the target at the temperature, before filters.
        plain_log_prob: likewise, of plain decoding's answer.
        kl: Σ −ln P of the accepted tokens, P of plain decoding, filters included; see eval/quality.py.
        outside: accepted tokens of P = 0, which the sum leaves out.
    """

    prompt: str
    setting: str
    reference: list[str]
    text: str
    plain_text: str
    plain: list[int]
    log_prob: float
    plain_log_prob: float
    kl: float
    outside: int


@dataclass(slots=True)
class Records:
    """All that an evaluation recorded.

    Attributes:
        header: target (a `TargetIdentity` as a dict), drafter (method, name, hash, bytes), settings, skipped (by domain, prompts that do
            not fit the target's context), prompts (file, count, hash), machine, versions.
        forward: seconds of a target forward over N nodes, by N.
        drafting: seconds of drafting a chain, by its depth K.
        load: what rounds cost at several loads, see `probe.measure`; {} where that was not measured.
        drift: of an adapted target, see `drift.measure`; {} where that was not measured.
        tree: tree (the draft tree, as a config has it), nodes (most of a round) and depth; {} until it is chosen.
        positions: position records; none where no tree was chosen.
        requests: by setting, in the order of the prompts.
        pieces: the text of each token that a record names, but for prompts.
        prompts: by id.
        supersets: by setting and prompt [S,K,K], see `supersets.order_along`; of dynamic trees only.
        qualities: of the requests under lossy rules, in their order.
    """

    header: dict[str, Any]
    forward: dict[int, float] = field(default_factory=dict)
    drafting: dict[int, float] = field(default_factory=dict)
    load: dict[str, Any] = field(default_factory=dict)
    drift: dict[str, float] = field(default_factory=dict)
    tree: dict[str, Any] = field(default_factory=dict)
    positions: list[PositionRecord] = field(default_factory=list)
    requests: list[RequestRecord] = field(default_factory=list)
    pieces: dict[int, str] = field(default_factory=dict)
    prompts: dict[str, PromptRecord] = field(default_factory=dict)
    supersets: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    qualities: list[QualityRecord] = field(default_factory=list)

    def requests_at(self, setting: str) -> list[RequestRecord]:
        """The requests of a setting."""
        return [request for request in self.requests if request.setting == setting]

    def positions_at(self, setting: str, choosing: bool | None = None) -> list[PositionRecord]:
        """The position records of a setting. choosing: only those that choose the tree, or only those that do not."""
        records = (record for record in self.positions if record.setting == setting)
        return [record for record in records if choosing is None or record.choosing == choosing]

    def text(self, tokens: list[int]) -> list[str]:
        """The texts of tokens, one by one."""
        return [self.pieces.get(token, "�") for token in tokens]


def prompt_line(record: PromptRecord) -> dict[str, Any]:
    """The prompt as JSON."""
    return {"kind": "prompt"} | asdict(record)


def quality_line(record: QualityRecord) -> dict[str, Any]:
    """The comparison as JSON."""
    return {"kind": "quality"} | asdict(record)


def request_line(record: RequestRecord) -> dict[str, Any]:
    """The request as JSON; a round is a list of its fields, and an infinite margin is null."""
    line: dict[str, Any] = {"kind": "request"} | asdict(record) | {"rounds": [list(astuple(each)) for each in record.rounds]}
    if record.divergence and not math.isfinite(record.divergence.margin):
        line["divergence"]["margin"] = None
    return line


def position_line(record: PositionRecord) -> dict[str, Any]:
    """The position record as JSON: lists [S][K], log-probabilities to four digits, null for an infinite one."""
    return {
        "kind": "positions",
        "prompt": record.prompt,
        "domain": record.domain,
        "setting": record.setting,
        "choosing": record.choosing,
        "tokens": record.tokens.tolist(),
        "entropy": _rounded(record.entropy.tolist()),
        "target_log_probs": _rounded(record.target_log_probs.tolist()),
        "ranks": record.ranks.tolist(),
        "log_probs": [_rounded(row) for row in record.log_probs.tolist()],
        "drafted": record.drafted.tolist(),
        "drafted_log_probs": [_rounded(row) for row in record.drafted_log_probs.tolist()],
    }


def prompt_of(line: dict[str, Any], source: str) -> PromptRecord:
    """The prompt of a JSON line.

    Raises:
        ValueError: a field that is missing or of another kind; `source` says where.
    """
    kinds: dict[str, Any] = {"prompt": str, "ids": list, "templated": str, "logged": bool}
    record = PromptRecord(**{name: entry(line, name, kind, source) for name, kind in kinds.items()})
    if not all(type(token) is int for token in record.ids):
        raise ValueError(f"{source}: `ids` should be tokens; correct it or restore the file")
    return record


def request_of(line: dict[str, Any], source: str) -> RequestRecord:
    """The request of a JSON line.

    Raises:
        ValueError: a field that is missing or of another kind; `source` says where.
    """
    rounds = entry(line, "rounds", list, source)
    divergence = entry(line, "divergence", (dict, type(None)), source)
    kinds: dict[str, Any] = {"prompt": str, "domain": str, "language": str, "setting": str, "reason": str, "tokens": list, "checked": bool}
    kinds |= dict.fromkeys(("turn", "prompt_tokens", "plain_tokens", "batch", "plain_rounds"), int)
    kinds |= {"seconds": dict, "batch_tokens": dict, "equals_transformers": (bool, type(None)), "prefill_s": (float, type(None))}
    fields = {name: entry(line, name, kind, source) for name, kind in kinds.items()}
    fields |= {name: float(entry(line, name, float, source)) for name in ("plain_verify_s", "plain_other_s")}
    try:
        if not (
            fields["setting"]
            and all(map(_is_round, rounds))
            and all(type(token) is int for token in (*fields["tokens"], *fields["batch_tokens"].values()))
            and all(type(value) in (int, float) for value in fields["seconds"].values())
            and fields["seconds"].keys() == fields["batch_tokens"].keys()
        ):
            raise TypeError("no setting, or rounds, tokens or times of another kind")
        fields["rounds"] = [Round(*each) for each in rounds]
        if divergence is not None:
            margin = divergence.get("margin")
            fields["divergence"] = Divergence(**divergence | {"margin": math.inf if margin is None else margin})
        return RequestRecord(**fields)
    except TypeError as error:
        raise ValueError(f"{source}: not a request that draftsmith eval wrote ({error}); run it again") from None


def _is_round(row: Any) -> bool:
    """Whether a row of `rounds` has the kinds of the fields of `Round`."""
    if type(row) is not list or len(row) != len(fields_of(Round)):
        return False
    return all(type(value) is int for value in row[:3]) and all(value is None or type(value) in (int, float) for value in row[3:])


def quality_of(line: dict[str, Any], source: str) -> QualityRecord:
    """The comparison of a JSON line.

    Raises:
        ValueError: a field that is missing or of another kind; `source` says where.
    """
    kinds: dict[str, Any] = {"reference": list, "plain": list, "outside": int} | dict.fromkeys(
        ("prompt", "setting", "text", "plain_text"), str
    )
    fields: dict[str, Any] = {name: entry(line, name, kind, source) for name, kind in kinds.items()}
    fields |= {name: float(entry(line, name, float, source)) for name in ("log_prob", "plain_log_prob", "kl")}
    return QualityRecord(**fields)


def position_of(line: dict[str, Any], source: str) -> PositionRecord:
    """The position record of a JSON line.

    Raises:
        ValueError: a field that is missing or of another kind; `source` says where.
    """
    fields: dict[str, Any] = {name: entry(line, name, str, source) for name in ("prompt", "domain", "setting")}
    fields["choosing"] = entry(line, "choosing", bool, source)
    try:
        for name in ("tokens", "ranks", "drafted"):
            fields[name] = torch.tensor(entry(line, name, list, source), dtype=torch.int64)
        for name in ("entropy", "target_log_probs"):
            fields[name] = torch.tensor(_finite(entry(line, name, list, source)))
        for name in ("log_probs", "drafted_log_probs"):
            fields[name] = torch.tensor([_finite(row) for row in entry(line, name, list, source)])
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{source}: not positions that draftsmith eval wrote ({error}); run it again") from None
    return PositionRecord(**fields)


def superset_of(line: dict[str, Any], source: str) -> Tensor:
    """The order [S,K,K] of the drafted tokens, of a JSON line.

    Raises:
        ValueError: a field that is missing or of another kind; `source` says where.
    """
    try:
        order = torch.tensor(entry(line, "order", list, source), dtype=torch.int64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{source}: no superset that draftsmith eval wrote ({error}); run it again") from None
    if order.ndim != 3 or order.shape[1] != order.shape[2]:
        raise ValueError(f"{source}: `order` is {list(order.shape)}; expected [S,K,K]; run draftsmith eval again")
    return order


def _rounded(values: list[float]) -> list[float | None]:
    return [round(value, 4) if math.isfinite(value) else None for value in values]


def _finite(values: list[float | None]) -> list[float]:
    return [-math.inf if value is None else value for value in values]


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
