"""A drafter of which something is noted in each round, by prompt."""

from collections.abc import Sequence
from typing import Any

from draftsmith.inference.drafter import NodeOutput


class NotingDrafter:
    """Leaves all to the drafter that it wraps. A subclass notes what it sees of a slot in `notes[slot]`."""

    capturable = False  # notes are taken on the host

    def __init__(self, drafter: Any) -> None:
        self._drafter = drafter
        self.notes: dict[int, list[Any]] = {}
        self._by_prompt: dict[tuple[int, ...], list[list[Any]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def start(self, slots: list[int], prompts: list[list[int]], out: NodeOutput) -> None:
        for slot, prompt in zip(slots, prompts, strict=True):
            self.notes[slot] = []
            self._by_prompt.setdefault(tuple(prompt), []).append(self.notes[slot])
        self._drafter.start(slots, prompts, out)

    def notes_of(self, prompt: Sequence[int]) -> list[Any]:
        """The notes of a prompt, which are then forgotten. Equal prompts are taken in their order."""
        return self._by_prompt[tuple(prompt)].pop(0)
