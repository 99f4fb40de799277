"""What a lossy rule costs: its answers beside plain decoding's, by the target's own probabilities and by reference answers.

Under the rules `typical` and `membership` a drafter's tokens are a function of the text before them, and so is which of them are accepted. The
distribution Q of the answers is therefore known: an accepted token x has Q(x | text) = 1, and each other token is drawn from the target's own
distribution P. By the chain rule an answer y has ln Q(y) − ln P(y) = Σ −ln P(x | text before x) over its accepted tokens x, and KL(Q ‖ P) is the
mean of that over answers. P is what plain decoding draws from: temperature, penalty and filters included. (Where a round's depth depends on
measured times, it is an upper bound.)

Letters: S tokens of an answer · V target vocabulary.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import torch
from torch import Tensor

from draftsmith.eval.answers import EncodedPrompt
from draftsmith.eval.intervals import Interval, of_difference, shown
from draftsmith.eval.records import QualityRecord, Records, RequestRecord, distinct_ngrams
from draftsmith.eval.settings import greedy, label, rule_of
from draftsmith.eval.totals import by_setting, columns, tau, totals
from draftsmith.inference.constraints import constrain_rows, states_along
from draftsmith.inference.request import RoundStats
from draftsmith.inference.rule_names import RULES
from draftsmith.inference.sampler import Sampling, penalise, warp
from draftsmith.models.target import Target

AT_ONCE = 64  # positions whose logits [64,V] exist at a time
GRAM = 2  # the n of distinct-n: a sharper distribution repeats short sequences of tokens first
FINAL = "####"  # before the final number of a reference, as GSM8K writes it
NUMBER = re.compile(r"((?<![\w).])[-−]\$?)?((?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)")
UNRECORDED = "what the rule costs was not recorded; run draftsmith eval again"


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Answers judged by their final number, of both kinds of decoding on the same prompts.

    Attributes:
        prompts: that have a reference with a final number.
        drafted: share of them that the lossy rule answers rightly.
        plain: share that plain decoding answers rightly.
        drafted_only: how many the lossy rule alone answers rightly.
        plain_only: how many plain decoding alone answers rightly.
        p_value: of McNemar's exact test: two-sided, of drafted_only and plain_only being equally likely.
        difference: drafted − plain.
        low, high: of its 95 % interval, paired by prompt; None with too few prompts, and where no prompt differs.
    """

    prompts: int
    drafted: float
    plain: float
    drafted_only: int
    plain_only: int
    p_value: float
    difference: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Quality:
    """A lossy rule at one setting: its τ, and what stands against it. The intervals are 95 %, over prompts.

    Attributes:
        rule: a name of RULES.
        tau, tau_low, tau_high: tokens per round.
        answers: that were measured, by each kind of decoding.
        tokens, plain_tokens: of the answers with the lossy rule, of plain decoding's.
        kl, kl_low, kl_high: KL(rule ‖ target) in nats a token, see above; infinite where `outside` is not 0.
        outside: accepted tokens that plain decoding's filters exclude.
        log_prob, plain_log_prob: the target's mean log-probability of a token of the answers, at the temperature, before filters; in nats.
        log_prob_difference, log_prob_low, log_prob_high: log_prob − plain_log_prob, paired by prompt. Above 0 the rule favours likely tokens.
        distinct, plain_distinct: distinct bigrams over all bigrams of the answers.
        references: prompts with a reference of any kind.
        accuracy: by the references that can be judged; None where there are none.
    """

    rule: str
    tau: float
    tau_low: float | None
    tau_high: float | None
    answers: int
    tokens: int
    plain_tokens: int
    kl: float
    kl_low: float | None
    kl_high: float | None
    outside: int
    log_prob: float
    plain_log_prob: float
    log_prob_difference: float
    log_prob_low: float | None
    log_prob_high: float | None
    distinct: float
    plain_distinct: float
    references: int
    accuracy: Accuracy | None


def measure(
    target: Target, prompts: Sequence[EncodedPrompt], plain: Sequence[Any], drafted: Sequence[Any], sampling: Sampling
) -> list[QualityRecord]:
    """Compare the answers of a lossy rule with plain decoding's; nothing for a lossless rule.

    Args:
        target: of the answers.
        prompts: of a batch.
        plain: its answers by plain decoding, with `tokens`.
        drafted: its answers by the rule, with `tokens` and `rounds`.
        sampling: of both.
    """
    if sampling.lossless:
        return []
    tokenizer: Any = target.tokenizer
    records = []
    for prompt, expected, answer in zip(prompts, plain, drafted, strict=True):
        (expected_log_p, _), (log_p, kept_log_p) = (log_probs(target, prompt.ids, each.tokens, sampling) for each in (expected, answer))
        accepted = kept_log_p[torch.tensor(accepted_tokens(answer.rounds))]
        texts = [str(tokenizer.decode(each.tokens, skip_special_tokens=True)) for each in (answer, expected)]
        records.append(
            QualityRecord(
                prompt=prompt.prompt.id,
                setting=label(sampling),
                reference=list(prompt.prompt.reference),
                text=texts[0],
                plain_text=texts[1],
                plain=expected.tokens,
                log_prob=float(log_p.sum()),
                plain_log_prob=float(expected_log_p.sum()),
                kl=float(-accepted[accepted > -torch.inf].sum()) + 0.0,
                outside=int((accepted == -torch.inf).sum()),
            )
        )
    return records


def accepted_tokens(rounds: Sequence[RoundStats]) -> list[bool]:
    """Of each token of an answer, whether it was drafted and accepted. The last one of a round that was not cut short is the target's draw."""
    return [index < each.accepted - 1 for each in rounds for index in range(each.length)]


@torch.inference_mode()
def log_probs(target: Target, prompt: list[int], answer: list[int], sampling: Sampling) -> Tensor:
    """[2,S] float64, of the tokens of an answer: ln p at the temperature, and as plain decoding draws them, −inf outside its filters. Both within
    the constraint, if there is one."""
    ids = torch.tensor(prompt + answer, device=target.device)
    states, parts = target.forward(ids[None]).hidden[0, len(prompt) - 1 : -1], []
    allowed = states_along(sampling.constraint, answer[:-1]) if sampling.constraint else []
    for start in range(0, len(answer), AT_ONCE):
        logits = target.float32_logits(states[start : start + AT_ONCE])  # [64,V]
        if allowed:
            logits = constrain_rows(logits, allowed[start : start + AT_ONCE])
        if sampling.repetition_penalty != 1.0:
            seen = torch.zeros_like(logits, dtype=torch.bool)
            for row in range(len(seen)):
                seen[row, ids[: len(prompt) + start + row]] = True
            logits = penalise(logits, seen, sampling.repetition_penalty)
        labels = ids[len(prompt) + start :][: len(logits), None].to(logits.device)
        scores = torch.stack((logits / sampling.temperature, warp(logits, sampling))).double().log_softmax(-1)
        parts.append(scores.gather(-1, labels.expand(2, -1, -1))[..., 0].cpu())
    return torch.cat(parts, 1)


def final_number(text: str) -> Decimal | None:
    """The last number of a text; None without one.

    Commas between groups of three digits belong to it, and so does a minus unless a letter, a digit or a bracket stands before that: `10-5` ends
    with 5. Units, percent signs and what follows do not count.
    """
    matches = NUMBER.findall(text)
    return Decimal(("-" if matches[-1][0] else "") + matches[-1][1].replace(",", "")) if matches else None


def reference_number(reference: Sequence[str]) -> Decimal | None:
    """The final number of GSM8K's references, after `####`. None for all others, which no number judges: translations, code without tests."""
    if len(reference) != 1 or FINAL not in reference[0]:
        return None
    return final_number(reference[0].rpartition(FINAL)[2])


def qualities(records: Records) -> dict[str, Quality]:
    """By setting, of the lossy rules whose cost was recorded."""
    by_label: dict[str, list[QualityRecord]] = {}
    for record in records.qualities:
        by_label.setdefault(record.setting, []).append(record)
    requests = by_setting(records.requests)
    return {setting: _quality(requests[setting], by_label[setting]) for setting in requests if setting in by_label}


def _quality(requests: list[RequestRecord], records: list[QualityRecord]) -> Quality:
    tokens = {request.prompt: request.tokens for request in requests}
    lengths = {record.prompt: len(tokens[record.prompt]) for record in records}
    outside = sum(record.outside for record in records)
    kl = _difference({each.prompt: (0.0, 1) for each in records}, {each.prompt: (each.kl, lengths[each.prompt]) for each in records})
    log_prob = _difference(
        {each.prompt: (each.plain_log_prob, len(each.plain)) for each in records},
        {each.prompt: (each.log_prob, lengths[each.prompt]) for each in records},
    )
    plain_tokens = sum(len(record.plain) for record in records)
    return Quality(
        rule_of(requests[0].setting),
        *tau(totals(requests)),
        len(records),
        sum(lengths.values()),
        plain_tokens,
        *((math.inf, None, None) if outside else kl),
        outside,
        math.fsum(record.log_prob for record in records) / sum(lengths.values()),  # in any order of the records
        math.fsum(record.plain_log_prob for record in records) / plain_tokens,
        *log_prob,
        distinct_ngrams([tokens[record.prompt] for record in records], GRAM),
        distinct_ngrams([record.plain for record in records], GRAM),
        sum(bool(record.reference) for record in records),
        _accuracy(records),
    )


def _accuracy(records: list[QualityRecord]) -> Accuracy | None:
    plain, drafted = {}, {}
    for record in records:
        number = reference_number(record.reference)
        if number is not None:
            plain[record.prompt] = (float(final_number(record.plain_text) == number), 1)
            drafted[record.prompt] = (float(final_number(record.text) == number), 1)
    if not plain:
        return None
    pairs = [(plain[prompt][0], drafted[prompt][0]) for prompt in plain]
    plain_only, drafted_only = pairs.count((1.0, 0.0)), pairs.count((0.0, 1.0))
    difference = _difference(plain, drafted)
    if not plain_only + drafted_only:  # no spread, and so no interval
        difference = Interval(0.0, None, None)
    shares = (sum(right for _, right in pairs) / len(pairs), sum(right for right, _ in pairs) / len(pairs))
    return Accuracy(len(pairs), *shares, drafted_only, plain_only, mcnemar(plain_only, drafted_only), *difference)


def mcnemar(first: int, second: int) -> float:
    """McNemar's exact test: the two-sided p-value of two counts under Binomial(first + second, ½)."""
    count = first + second
    tail = sum(math.comb(count, hits) for hits in range(min(first, second) + 1)) / 2**count
    return min(1.0, 2 * tail)


def _difference(plain: dict[str, tuple[float, int]], drafted: dict[str, tuple[float, int]]) -> Interval:
    """Σ values / Σ tokens of `drafted` less that of `plain`, of (value, tokens) by prompt."""
    return of_difference(*columns([plain, drafted], list(plain)))


def lossy_settings(settings: Sequence[str]) -> dict[str, str]:
    """The rule of each setting whose rule changes the distribution of the output."""
    return {setting: rule_of(setting) for setting in settings if not greedy(setting) and not RULES[rule_of(setting)].lossless}


def lines(measured: dict[str, Quality], lossy: dict[str, str]) -> list[str]:
    """A sentence for each lossy setting: τ, and what it costs; none where every rule is lossless."""
    return [_line(setting, measured.get(setting)) for setting in lossy]


def _line(setting: str, quality: Quality | None) -> str:
    if quality is None:
        return f"T={setting} LOSSY: {UNRECORDED}"
    q = quality
    if q.outside:
        kl = f"KL infinite: {q.outside} accepted tokens that plain decoding never draws"
    else:
        kl = f"KL from the target's distribution {q.kl:.3f} nats a token ({shown(q.kl_low, q.kl_high, '.3f')})"
    return (
        f"T={setting} LOSSY, τ {q.tau:.2f}: {kl}; log-probability {q.log_prob:.3f} nats a token, plain decoding {q.plain_log_prob:.3f} "
        f"({q.log_prob_difference:+.3f}, {shown(q.log_prob_low, q.log_prob_high, '+.3f')}); distinct bigrams {q.distinct:.0%}, plain "
        f"{q.plain_distinct:.0%}; {_judged(q)}"
    )


def _judged(quality: Quality) -> str:
    a = quality.accuracy
    if a is None:
        return f"no reference that can be judged ({quality.references} of {quality.answers} prompts have one)"
    text = f"right answers {a.drafted:.1%}, plain {a.plain:.1%}, of {a.prompts} prompts with a final number"
    interval = f", {shown(a.low, a.high, '+.1%')}" if a.drafted_only + a.plain_only else ""
    return f"{text} ({a.difference:+.1%}{interval}; McNemar p = {a.p_value:.2g})"
