"""What is to be synthesised, which candidates become rows of the file, and what is counted on the way."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from draftsmith.data import prompts
from draftsmith.data.candidate import Candidate
from draftsmith.data.conversations import Conversation
from draftsmith.data.dedup import DedupFilter, MinHasher, Signature
from draftsmith.data.openings import Opening
from draftsmith.data.regenerate import Settings, check_least
from draftsmith.data.resumable import INSTEAD, Output
from draftsmith.data.server import Message
from draftsmith.inference.terminal import printable

__all__ = ["Names", "Plan", "Selection", "Summary", "resume", "too_few"]

USABLE = 20  # candidates for each row, at most, and PATIENCE more
PATIENCE = 512
NAME, NAME_PATTERN, MOST = "synthetic-{:07}", "synthetic-([1-9][0-9]*)?[0-9]{7}", 10_000_000


@dataclass(frozen=True, slots=True)
class Plan:
    """What to write.

    Attributes:
        conversations: rows in the file at the end; a file with fewer is continued.
        openings: how conversations begin, in turn.
        questions, answers: how they are drawn; prompt_tokens is not used.
        turns: questions of a conversation, at most.
        exclude: files of evaluation prompts. Conversations that contain one are dropped.
        near: the Jaccard similarity from which two conversations' questions are near duplicates.

    Raises:
        ValueError: a size below one, or no openings.
    """

    conversations: int
    openings: tuple[Opening, ...]
    questions: Settings
    answers: Settings
    turns: int = 1
    exclude: tuple[str, ...] = ()
    near: float = 0.8

    def __post_init__(self) -> None:
        check_least(conversations=self.conversations, openings=len(self.openings), turns=self.turns)

    def facts(self) -> dict[str, Any]:
        """What every row says of the plan."""
        questions, answers = ({key: value for key, value in asdict(part).items() if key != "prompt_tokens"} for part in self.parts)
        openings = [asdict(opening) for opening in self.openings]
        excluded = [prompts.shipped_or_given(path).read_bytes() for path in self.exclude]
        named = {"openings": _digest(json.dumps(openings).encode()), "exclude": [_digest(content) for content in excluded]}
        return {**answers, "questions": questions, "turns": self.turns, "near": self.near, **named}

    @property
    def parts(self) -> tuple[Settings, Settings]:
        return self.questions, self.answers

    def opening(self, number: int) -> Opening:
        return self.openings[number % len(self.openings)]


@dataclass(slots=True)
class Summary:
    """What is in the file, and what was dropped on the way to it.

    Attributes:
        candidates: conversations that were begun.
        dropped: how many have no row, by reason.
        shortened: how many have fewer turns, by reason.
        domains: for each domain its candidates, rows, and tokens of questions and answers; `cut` answers.
        new, tokens, seconds: rows and tokens that this run wrote, and its time.
    """

    candidates: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    shortened: Counter[str] = field(default_factory=Counter)
    domains: dict[str, Counter[str]] = field(default_factory=dict)
    new: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def rows(self) -> int:
        return sum(counts["rows"] for counts in self.domains.values())

    def so_far(self) -> dict[str, Any]:
        return {"candidates": self.candidates, "dropped": dict(self.dropped), "shortened": dict(self.shortened)}

    def add_row(self, row: dict[str, Any]) -> None:
        counts, generation = self.domains.setdefault(row["domain"], Counter()), row["generation"]
        tokens, reasons = generation["new_tokens"], generation["finish_reasons"]
        counts.update(rows=1, questions=sum(tokens[::2]), answers=sum(tokens[1::2]), cut=reasons.count("length"), turns=len(reasons))

    def add_candidates(self, plan: Plan, count: int) -> None:
        numbers, cycle = range(self.candidates, self.candidates + count), len(plan.openings)
        for first in range(min(count, cycle)):
            self.domains.setdefault(plan.opening(numbers[first]).domain, Counter())["candidates"] += len(numbers[first::cycle])
        self.candidates += count

    def table(self) -> Table:
        """Rows and tokens by domain."""
        caption = "question, answer: tokens in the mean; cut: answers that reached their limit"
        table = Table(title=f"{self.rows:,} conversations, {self.new:,} of them new", caption=caption)
        for name in ("domain", "candidates", "rows", "question", "answer", "cut"):
            table.add_column(name, justify="left" if name == "domain" else "right")
        total = sum(self.domains.values(), Counter())
        for domain, counts in [*self.domains.items(), ("all", total)]:
            turns = max(1, counts["turns"])
            means = (f"{counts[part] / turns:.0f}" for part in ("questions", "answers"))
            table.add_row(printable(domain, ""), f"{counts['candidates']:,}", f"{counts['rows']:,}", *means, f"{counts['cut']:,}")
        return table

    def report(self) -> list[str]:
        """What was dropped, and how quick this run was."""
        lines = [f"{self.dropped.total():,} of {self.candidates:,} candidates dropped"]
        for word, reasons in (("dropped", self.dropped), ("shortened", self.shortened)):
            lines += [f"  {word}: {reason}: {count:,}" for reason, count in reasons.most_common()]
        if self.tokens:
            lines.append(
                f"{self.tokens:,} tokens in {self.seconds:.0f} s: {self.tokens / self.seconds:.1f} tokens/s, dropped ones included"
            )
        return lines


class Names(Collection[str]):
    """The ids of all candidates that there may be."""

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and bool(re.fullmatch(NAME_PATTERN, name))

    def __iter__(self) -> Iterator[str]:
        return map(NAME.format, range(MOST))

    def __len__(self) -> int:
        return MOST


def too_few(summary: Summary) -> str:
    reasons = ", ".join(f"{reason}: {count}" for reason, count in summary.dropped.most_common(3))
    return (
        f"only {summary.rows} of {summary.candidates} candidates can be used ({reasons}); expected one in {USABLE} at least; "
        "give openings, a lower temperature of questions, or a target that was trained to chat"
    )


class Selection:
    """Decides on candidates, in order: which become rows."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._hasher = MinHasher(prompts.user_texts(plan.exclude))
        self._filter = DedupFilter(plan.near)

    def reason(self, messages: list[Message]) -> str:
        """Why this conversation is dropped, "" if it is not: its questions are another's, or there is an evaluation prompt in it."""
        questions = self._sign([message for message in messages if message["role"] == "user"])
        return self._filter.keep(questions._replace(contamination=self._sign(messages).contamination))

    def _sign(self, messages: list[Message]) -> Signature:
        return self._hasher.sign(Conversation("", "", messages))

    def append(self, candidates: list[Candidate], summary: Summary, output: Output) -> None:
        """Write the rows of a group, up to the last one that is wanted."""
        rows = list[dict[str, Any]]()
        for candidate in candidates:
            if summary.rows == self.plan.conversations:
                break
            summary.add_candidates(self.plan, 1)
            reason = self.reason(candidate.messages) if candidate.turn else candidate.fault
            if reason:
                summary.dropped[reason] += 1
                continue
            if candidate.fault:
                summary.shortened[candidate.fault] += 1
            rows.append(candidate.row(output.facts))
            summary.add_row(rows[-1])
        if rows:
            rows[-1]["generation"]["so_far"] = summary.so_far()
            output.append(rows)


def resume(output: Output, plan: Plan, selection: Selection) -> Summary:
    """The work of earlier runs; rows of an incomplete group are dropped.

    Raises:
        ValueError: rows that were changed.
    """
    summary, group = Summary(), list[dict[str, Any]]()
    try:
        with output.path.open("rb") as lines:
            for line in lines:
                group.append(json.loads(line))
                so_far = group[-1]["generation"].get("so_far")
                if so_far is None:
                    continue
                for row in group:
                    if row["domain"] != plan.opening(int(row["id"].removeprefix("synthetic-"))).domain:
                        raise ValueError("another domain")
                    selection.reason(row["messages"])
                    summary.add_row(row)
                group = []
                summary.add_candidates(plan, so_far["candidates"] - summary.candidates)
                summary.dropped, summary.shortened = Counter(so_far["dropped"]), Counter(so_far["shortened"])
                if summary.candidates != summary.rows + summary.dropped.total():
                    raise ValueError("rows are gone")
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError):
        raise ValueError(f"{output.path}:{summary.rows + len(group)}: a row up to here is gone or was changed; {INSTEAD}") from None
    output.cut(summary.rows)
    return summary


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
