"""Which request decodes in which slot, and which requests wait for one."""

from collections import deque
from collections.abc import Callable, Sequence

from draftsmith.inference.request import Request

__all__ = ["Scheduler"]


class Scheduler:
    """Gives free slots to waiting requests, the earliest request first, and the lowest slot unless `choose` says another.

    Args:
        requests: in the order of the prompts.
        slots: how many slots there are.
        choose: (prompt, free slots) -> a slot, and how many of the prompt's positions it has the KV of.

    Attributes:
        waiting: requests without a slot, in the order of the prompts.
        running: requests that decode, in the order of their slots.
        free_slots: slots without a request, in ascending order.
    """

    def __init__(
        self, requests: Sequence[Request], slots: int, choose: Callable[[list[int], list[int]], tuple[int, int]] | None = None
    ) -> None:
        self.waiting = deque(requests)
        self.running: list[Request] = []
        self.free_slots = list(range(slots))
        self.choose = choose or (lambda prompt, free: (free[0], 0))

    @property
    def unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.waiting or self.running)

    def admit(self) -> list[Request]:
        """Give every free slot to a waiting request -> the requests that got one, in the order of their slots. They run from `start` on."""
        admitted: list[Request] = []
        while self.waiting and self.free_slots:
            request = self.waiting.popleft()
            request.slot, request.reused = self.choose(request.prompt, self.free_slots)
            self.free_slots.remove(request.slot)
            admitted.append(request)
        return sorted(admitted, key=lambda request: request.slot)

    def start(self, admitted: Sequence[Request]) -> None:
        """These requests are prefilled and decode from now on."""
        self.running = sorted([*self.running, *admitted], key=lambda request: request.slot)

    def release(self, slots: Sequence[int]) -> None:
        """The requests in these slots have ended."""
        self.running = [request for request in self.running if request.slot not in slots]
        self.free_slots = sorted([*self.free_slots, *slots])
