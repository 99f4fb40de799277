"""Where drafting ends: the token at which each round of real decoding left the draft tree, in its context, by kind of token.

A kind's weight is its share of the lost tokens: those that a perfect drafter of the same depth would have added.
"""

import re
from dataclasses import dataclass, field

import torch

from draftsmith.eval.intervals import conversations, of_share
from draftsmith.eval.records import Records
from draftsmith.eval.round_rows import RoundRow, round_rows
from draftsmith.inference.terminal import printable

COPY = 4  # tokens before, which together with the token already stand earlier in the answer
BEFORE, AFTER = 16, 4  # tokens of context of an example
EXAMPLES = 4  # of a kind
OOV, COPIED, WHITESPACE, NUMBER, PUNCTUATION, IDENTIFIER, NAME, REST = (
    "OOV",
    "long copy",
    "whitespace",
    "number",
    "punctuation",
    "code identifier",
    "name",
    "other",
)


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of one round's walk through its tree.

    Attributes:
        prompt: id of the prompt.
        domain: of the prompt.
        depth: of the token that was not drafted, from 1.
        token: its text.
        rank: among the drafter's candidates, from 0; −1 beyond those that are recorded, None where no position record has it.
        drafted: the text of the likeliest draft there; None where no position record has it.
        lost: tokens that a perfect drafter of the tree's depth would have added.
        before: the text before the token.
        after: the text after it.
    """

    prompt: str
    domain: str
    depth: int
    token: str
    rank: int | None
    drafted: str | None
    lost: int
    before: str
    after: str


@dataclass(slots=True)
class Kind:
    """The failures at one kind of token.

    Attributes:
        name: of the kind.
        rounds: that ended at such a token.
        lost: tokens.
        share: of all lost tokens.
        low: end of its 95 % interval over prompts; None with too few prompts, as is `high`.
        high: the end above.
        examples: the costliest of different prompts, then others.
    """

    name: str
    rounds: int = 0
    lost: int = 0
    share: float = 0.0
    low: float | None = None
    high: float | None = None
    examples: list[Failure] = field(default_factory=list)


@dataclass(slots=True)
class Failures:
    """All failures of a setting.

    Attributes:
        depth: K, of the tree.
        rounds: in which a perfect drafter of this depth would have added tokens.
        lost: tokens in all.
        kinds: by lost tokens, most first.
    """

    depth: int
    rounds: int
    lost: int
    kinds: list[Kind]


def failures(records: Records, setting: str) -> Failures:
    """The failures of a setting's rounds."""
    depth = records.tree["depth"]
    kinds: dict[str, list[tuple[int, RoundRow]]] = {}
    conversation = conversations(request.prompt for request in records.requests)
    by_prompt: dict[str, dict[str, int]] = {}
    seen: dict[tuple[int, ...], int] = {}
    request = None
    for row in round_rows(records, setting):
        if row.request is not request:
            request = row.request
            seen = _first_uses(request.tokens)
        lost = min(depth, len(row.request.tokens) - row.start - 1) - row.round.accepted
        if lost > 0:
            name = _kind(records, row, seen)
            kinds.setdefault(name, []).append((lost, row))
            sums = by_prompt.setdefault(conversation[row.request.prompt], {})
            sums[name] = sums.get(name, 0) + lost
    entries = [_summary(records, name, cases, by_prompt) for name, cases in kinds.items()]
    entries.sort(key=lambda kind: (-kind.lost, kind.name))
    return Failures(depth, sum(kind.rounds for kind in entries), sum(kind.lost for kind in entries), entries)


def _summary(records: Records, name: str, cases: list[tuple[int, RoundRow]], by_prompt: dict[str, dict[str, int]]) -> Kind:
    hits = torch.tensor([sums.get(name, 0) for sums in by_prompt.values()])
    share = of_share(hits, torch.tensor([sum(sums.values()) for sums in by_prompt.values()]))
    earlier: dict[str, int] = {}
    ordered = []
    for number, (lost, row) in enumerate(sorted(cases, key=lambda case: -case[0])):
        again = earlier.get(row.request.prompt, 0)
        earlier[row.request.prompt] = again + 1
        ordered.append((again, number, lost, row))
    examples = [_failure(records, row, lost) for _, _, lost, row in sorted(ordered, key=lambda case: case[:2])[:EXAMPLES]]
    return Kind(name, len(cases), sum(lost for lost, _ in cases), *share, examples)


def _failure(records: Records, row: RoundRow, lost: int) -> Failure:
    tokens, index, accepted = row.request.tokens, row.start + row.round.accepted, row.round.accepted
    rank = drafted = None
    if row.record is not None and accepted < row.record.ranks.shape[1]:
        rank = int(row.record.ranks[row.row, accepted])
        if row.record.drafted.numel():
            drafted = printable(records.text([int(row.record.drafted[row.row, accepted])])[0])

    def text(part: list[int]) -> str:
        return printable("".join(records.text(part)))

    return Failure(
        row.request.prompt,
        row.request.domain,
        accepted + 1,
        text(tokens[index : index + 1]),
        rank,
        drafted,
        lost,
        text(tokens[max(0, index - BEFORE) : index]),
        text(tokens[index + 1 : index + 1 + AFTER]),
    )


def _kind(records: Records, row: RoundRow, seen: dict[tuple[int, ...], int]) -> str:
    tokens, accepted = row.request.tokens, row.round.accepted
    index = row.start + accepted
    record = row.record
    if record is not None and accepted < record.log_probs.shape[1] and record.log_probs[row.row, accepted] == -torch.inf:
        return OOV
    gram = tuple(tokens[index - COPY : index + 1]) if index >= COPY else ()
    if gram and seen[gram] < index:
        return COPIED
    first = max(0, index - BEFORE)
    before, after = ("".join(records.text(part)) for part in (tokens[first:index], tokens[index + 1 : index + 1 + AFTER]))
    return kind_of_text(records.text([tokens[index]])[0], before, after)


def _first_uses(tokens: list[int]) -> dict[tuple[int, ...], int]:
    """Where each run of COPY + 1 tokens first ends."""
    uses: dict[tuple[int, ...], int] = {}
    for index in range(COPY, len(tokens)):
        uses.setdefault(tuple(tokens[index - COPY : index + 1]), index)
    return uses


def kind_of_text(token: str, before: str, after: str) -> str:
    """The kind of a token, by its text and the texts around it.

    A code identifier has an underscore or a capital within the word, is called, or is an attribute; a name begins with a capital within a
    sentence, in scripts that have capitals.
    """
    if not token.strip():
        return WHITESPACE
    within = re.search(r"\w", token)
    if within is None:
        return PUNCTUATION
    text, at = before + token + after, len(before) + within.start()
    start = at - len(re.search(r"\w*$", text[:at])[0])  # pyright: ignore[reportOptionalSubscript]
    end = at + len(re.match(r"\w*", text[at:])[0])  # pyright: ignore[reportOptionalSubscript]
    word, preceding, following = text[start:end], text[:start], text[end:]
    if word.isnumeric():
        return NUMBER
    attribute = re.search(r"[\w)\]]\.$", preceding) or re.match(r"\.[a-z_]", following)
    if "_" in word or re.search(r"[a-z][A-Z]", word) or following.startswith("(") or (attribute and not word[0].isdigit()):
        return IDENTIFIER
    starts_sentence = re.search(r"(^|[.!?:;\n\"“(\[*#>-])\s*$", preceding)
    return NAME if word[0].isupper() and word != "I" and not starts_sentence else REST
