"""KV that stays in its slot after a request has ended, so that the next turn of a conversation prefills its new tokens alone."""

from collections.abc import Callable, Sequence

__all__ = ["PrefixCache"]


class PrefixCache:
    """Which text's KV each free slot of a decoder still has. There is one text a slot, so that memory is the decoder's slots × context.

    Of a text that shares n tokens with a prompt n − 1 positions are used again. The last of the n is encoded anew: drafters need the
    target's features of the position before their first new token, and those are not kept.
    """

    def __init__(self) -> None:
        self._texts: dict[int, list[int]] = {}  # by slot, the one that was used least recently first
        self.made_for: object = None  # what the KV depends on

    @property
    def slots(self) -> list[int]:
        """The slots that have a text."""
        return list(self._texts)

    def keep(self, slot: int, text: list[int]) -> None:
        """The slot has the KV of text[:-1] at least."""
        self._texts[slot] = text

    def forget(self) -> None:
        """No slot has anything."""
        self._texts.clear()

    def take(self, prompt: Sequence[int], free: Sequence[int], usable: Callable[[int, int], int]) -> tuple[int, int]:
        """Choose a slot for a prompt; what it has of another text is given up.

        Args:
            prompt: token ids.
            free: the free slots, of which one is chosen.
            usable: (slot, count) -> how many of the first `count` positions the drafter can go on from.

        Returns:
            The slot with the longest prefix of the prompt, and how many of its positions are used again. Where no slot has a prefix, 0 and
            a slot without a text, else the one that was used least recently.
        """
        counts = {slot: self._usable(slot, prompt, usable) for slot in free}
        age = {slot: number for number, slot in enumerate(self._texts)}
        slot = min(free, key=lambda slot: (-counts[slot], age.get(slot, -1), slot))
        self._texts.pop(slot, None)
        return slot, counts[slot]

    def _usable(self, slot: int, prompt: Sequence[int], usable: Callable[[int, int], int]) -> int:
        shared = common_prefix(self._texts.get(slot, ()), prompt)
        # prompt[-1] is the root of the first round, and at least one token is prefilled.
        count = min(shared - 1, len(prompt) - 2)
        return usable(slot, count) if count > 0 else 0


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """The number of tokens with which both begin."""
    for index, (one_token, another) in enumerate(zip(first, second, strict=False)):
        if one_token != another:
            return index
    return min(len(first), len(second))
