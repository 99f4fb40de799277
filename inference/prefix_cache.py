"""KV that stays after a request has ended, so that the next turn of a conversation prefills its new tokens alone."""

from collections.abc import Sequence
from dataclasses import dataclass

from draftsmith.inference.cache import SavedRow, TreeCache
from draftsmith.inference.drafter import ResumableDrafter

__all__ = ["PrefixCache"]


@dataclass(slots=True, eq=False)
class HostText:
    """A text in host memory: its tokens, and its KV in the target's cache and in the drafter's, if it has one."""

    text: list[int]
    rows: list[SavedRow]


class PrefixCache:
    """The texts whose KV the free slots of a decoder still have, one of each slot: memory is the decoder's slots × context, as without it.

    Where a text and a prompt begin with the same n tokens, n − 1 positions are used again. The last of the n is encoded anew: drafters
    need the target's features of the position before their first new token, and no features are stored.

    When another text takes a slot, the slot's text is lost, or its KV, of target and drafter, goes to host memory until a prompt begins with it.

    Args:
        drafter: of the decoder.
        conversations: most texts in host memory; the oldest goes first.
    """

    def __init__(self, drafter: ResumableDrafter, conversations: int = 0) -> None:
        self._drafter, self._conversations = drafter, conversations
        self._texts: dict[int, list[int]] = {}  # by slot, the one that was used least recently first
        self._host: list[HostText] = []  # the oldest first
        self._caches: list[TreeCache] = []  # the target's, and the drafter's
        self.made_for: object = None  # what the KV depends on

    @property
    def slots(self) -> list[int]:
        """The slots that have a text."""
        return list(self._texts)

    def keep(self, texts: dict[int, list[int]], cache: TreeCache) -> None:
        """The requests in these slots have ended; the target's cache has the KV of texts[slot][:-1] at least."""
        drafters = self._drafter.keep(list(texts))
        self._caches = [cache] if drafters is None else [cache, drafters]
        self._texts.update(texts)

    def forget(self) -> None:
        """Forget all texts, in slots and in host memory."""
        self._texts.clear()
        self._host.clear()

    def take(self, prompt: Sequence[int], free: Sequence[int]) -> tuple[int, int]:
        """Choose a slot for a prompt; what it has of another text is given up, or goes to host memory.

        Args:
            prompt: token ids.
            free: the free slots, of which one is chosen.

        Returns:
            The slot with the longest prefix of the prompt, and how many of its positions are used again. Where no slot has a prefix, or host
            memory has a longer one, which comes back: a slot without a text, else the one that was used least recently.
        """
        counts = {slot: self._usable(slot, _shared(self._texts.get(slot, ()), prompt)) for slot in free}
        back = max(self._host, key=lambda each: _shared(each.text, prompt), default=None)
        if back is not None and _shared(back.text, prompt) > max(counts.values()):
            self._host.remove(back)
            counts = dict.fromkeys(free, 0)
        else:
            back = None
        age = {slot: number for number, slot in enumerate(self._texts)}
        slot = min(free, key=lambda slot: (-counts[slot], age.get(slot, -1), slot))
        text = self._texts.pop(slot, [])
        if self._conversations and 2 * counts[slot] < len(text):  # else it is the same conversation
            self._host = [*self._host, HostText(text, [cache.save(slot) for cache in self._caches])][-self._conversations :]
        if back is None:
            return slot, counts[slot]
        for cache, row in zip(self._caches, back.rows, strict=True):
            cache.restore(slot, row)
        self._drafter.keep([slot])
        return slot, self._usable(slot, _shared(back.text, prompt))

    def _usable(self, slot: int, count: int) -> int:
        return self._drafter.resumable(slot, count) if count > 0 else 0


def _shared(text: Sequence[int], prompt: Sequence[int]) -> int:
    """Positions of a text that a prompt can use again, 0 or less for none."""
    # prompt[-1] is the root of the first round, and at least one token is prefilled.
    return min(common_prefix(text, prompt) - 1, len(prompt) - 2)


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """The number of tokens with which both begin."""
    for index, (left, right) in enumerate(zip(first, second, strict=False)):
        if left != right:
            return index
    return min(len(first), len(second))
