"""The rounds of real decoding beside what the position records say of their roots.

Letters: S positions · K draft depth.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from draftsmith.eval.records import PositionRecord, Records, RequestRecord, Round
from draftsmith.inference.prefix_cache import common_prefix


@dataclass(frozen=True, slots=True)
class RoundRow:
    """One round.

    Attributes:
        request: it belongs to.
        round: itself.
        start: index in `request.tokens` of the first token that it committed.
        record: of the target's text after the same prompt; None without one, and where the answer is another text.
        row: of that record, 0 … S − 1.
    """

    request: RequestRecord
    round: Round
    start: int
    record: PositionRecord | None = None
    row: int = 0


def round_rows(records: Records, setting: str) -> Iterator[RoundRow]:
    """All rounds of a setting, in order."""
    positions = {record.prompt: record for record in records.positions_at(setting)}
    for request in records.requests_at(setting):
        record = positions.get(request.prompt)
        # A prompt of a single token has no hidden state before its first token: its first row is that of the second root.
        first_root = max(1, request.prompt_tokens - 1)
        shift = first_root - (request.prompt_tokens - 1)
        same = common_prefix(record.tokens.tolist(), request.tokens[shift:]) if record else 0
        for each in request.rounds:
            start, row = each.position - request.prompt_tokens + 1, each.position - first_root
            if record is not None and row >= 0 and row + each.committed <= same:
                yield RoundRow(request, each, start, record, row)
            else:
                yield RoundRow(request, each, start)
