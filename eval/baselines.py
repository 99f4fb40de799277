"""Ceilings and baselines beside a drafter: what no drafter of its depth can exceed, and what drafters without weights reach on the same answers.

They are computed from the records alone. A drafter without weights depends on the text alone, and the text does not depend on the drafter: under
keyed rules the recorded answers are those that its own rounds would give, under rejection in distribution. So its rounds are replayed along them;
not under lossy rules.

Letter: K draft depth.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from draftsmith.eval.intervals import of_difference, of_ratio
from draftsmith.eval.records import PositionRecord, Records, RequestRecord
from draftsmith.eval.replay import LOOKUPS
from draftsmith.eval.settings import greedy, rule_of
from draftsmith.eval.totals import Totals, by_setting, columns, totals
from draftsmith.inference.lookup import Ngram, Suffix
from draftsmith.inference.rule_names import RULES


@dataclass(frozen=True, slots=True)
class Reference:
    """τ of the drafter or of what is beside it, at one setting.

    Attributes:
        kind: "drafter", "baseline" (drafters without weights), "ceiling" (perfect drafters) or "beside" (records of another folder).
        name: for people.
        setting: label of the sampling.
        prompts: over how many.
        tau: with its interval, None with too few prompts.
        low: its lower end.
        high: its upper end.
        delta: its τ less that of the drafter on the same prompts; None for the drafter.
        delta_low: of the interval of the difference, paired by prompt.
        delta_high: likewise.
    """

    kind: str
    name: str
    setting: str
    prompts: int
    tau: float
    low: float | None
    high: float | None
    delta: float | None = None
    delta_low: float | None = None
    delta_high: float | None = None


def references(records: Records, beside: Mapping[str, Records] | None = None) -> list[Reference]:
    """The drafter, ceilings, baselines, and the records beside it by name, for each setting.

    Those beside must be of the same target and limits (`measured.check_comparable`); they count on the prompts that both have.
    """
    rows = []
    depth, method = records.tree["depth"], records.header["drafter"]["method"]
    for setting, requests in by_setting(records.requests).items():
        own = totals(requests)
        rows.append(_row("drafter", method, setting, own, None))
        entries: list[tuple[str, str, Totals]] = [("ceiling", f"perfect drafter, {depth} deep", perfect(requests, depth))]
        share, within = vocabulary_ceiling(records, setting)
        if share is not None and share < 1:
            entries.append(("ceiling", f"the same, within the draft vocabulary ({share:.1%} of the tokens)", within))
        if greedy(setting) or RULES[rule_of(setting)].lossless:
            for name, lookup in LOOKUPS.items():
                counts = replayed(lookup(), records, requests)
                if counts and name != method:
                    entries.append(("baseline", name, counts))
        for name, others in (beside or {}).items():
            entries.append(("beside", name, totals(by_setting(others.requests).get(setting, []))))
        rows += [_row(kind, name, setting, counts, own) for kind, name, counts in entries if counts.keys() & own.keys()]
    return rows


def perfect(requests: Iterable[RequestRecord], depth: int) -> Totals:
    """Of a drafter whose K = `depth` drafts are always right: each round commits K + 1 tokens, or what is left of the answer."""
    return {each.prompt: (len(each.tokens), -(-len(each.tokens) // (depth + 1))) for each in requests}


def vocabulary_ceiling(records: Records, setting: str) -> tuple[float | None, Totals]:
    """What a perfect drafter reaches that has the draft vocabulary: it is wrong where the target's token is outside, and only there.

    Returns:
        The share of the target's tokens inside the draft vocabulary, on the reported prompts, None without position records; tokens and
        rounds by prompt.
    """
    depth, inside, tokens = records.tree["depth"], 0, 0
    counts: Totals = {}
    for record in records.positions:
        prompt = records.prompts.get(record.prompt)
        if record.setting != setting or record.choosing or not len(record.tokens) or (prompt and prompt.logged):
            continue
        known = in_vocabulary(record)
        inside, tokens = inside + sum(known), tokens + len(known)
        counts[record.prompt] = (len(known), rounds_within(known, depth))
    return (inside / tokens if tokens else None), counts


def in_vocabulary(record: PositionRecord) -> list[bool]:
    """[S]: whether the drafter can draft each token of the text. A token outside the draft vocabulary has log-probability −inf."""
    return torch.isfinite(record.log_probs[:, 0]).tolist()


def rounds_within(known: Sequence[bool], depth: int) -> int:
    """Rounds of a perfect drafter along a text of which it knows these tokens. The target itself adds one token to each round."""
    position = rounds = 0
    while position < len(known):
        run = next((k for k, each in enumerate(known[position : position + depth]) if not each), depth)
        position += run + 1
        rounds += 1
    return rounds


def replayed(drafter: Ngram | Suffix, records: Records, requests: Iterable[RequestRecord]) -> Totals:
    """Of a drafter without weights along the recorded answers; nothing for prompts whose tokens are not recorded."""
    counts = {}
    for each in requests:
        if each.prompt in records.prompts:
            rounds = drafter.replay(records.prompts[each.prompt].ids, each.tokens)
            counts[each.prompt] = (sum(committed for _, committed in rounds), len(rounds))
    return counts


def _row(kind: str, name: str, setting: str, counts: Totals, own: Totals | None) -> Reference:
    common = [prompt for prompt in counts if own is None or prompt in own]
    tokens, rounds = columns([counts if own is None else own, counts], common)
    delta = (None, None, None) if own is None else of_difference(tokens, rounds)
    return Reference(kind, name, setting, len(common), *of_ratio(tokens[1], rounds[1]), *delta)
