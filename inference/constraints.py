"""Processors with a state: what may come next depends on a state that every token of the answer advances, such as a grammar's matcher.

A state is forked, never changed: each node of a draft tree has the state after its own path, whatever its siblings are. Its mask takes the
tokens that are not allowed out of the target's distribution before anything else does (penalty, processors, filters). So a draft that is not
allowed is never accepted, and every rule is lossless with respect to plain decoding with the same constraint.

Letters: B rows of a round · N tree nodes with the root · V vocabulary.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Constraint", "ConstraintState", "constrain", "constrain_rows", "mask_trees", "states_along"]


class ConstraintState(Protocol):
    """The state after some tokens of an answer. Nothing changes it."""

    def after(self, token: int) -> "ConstraintState | None":
        """The state after one more token that is allowed. None says that it is not allowed; `allowed` alone decides."""
        ...

    def allowed(self) -> bytes:
        """One bit for each of V tokens or more, 1 where the token is allowed; token 0 is the lowest bit of the first byte.

        A state that has ended allows the stop tokens alone.
        """
        ...


class Constraint(Protocol):
    """What an answer must be.

    Attributes:
        name: a word for reports; different constraints have different names.
    """

    @property
    def name(self) -> str: ...

    def start(self) -> ConstraintState:
        """The state before the first token of an answer. The prompt is not part of it."""
        ...


def constrain(logits: Tensor, constraint: Constraint, answer: Sequence[int]) -> Tensor:
    """logits [...,V] after the tokens of an answer -> the same with −inf where the constraint does not allow a token.

    Raises:
        ValueError: the constraint does not allow this answer.
    """
    states = states_along(constraint, answer)
    return logits.masked_fill(~_unpack([states[-1].allowed()], logits)[0], -torch.inf)


def states_along(constraint: Constraint, answer: Sequence[int]) -> list[ConstraintState]:
    """The states before each token of an answer, and after the last one.

    Raises:
        ValueError: the constraint does not allow this answer.
    """
    states = [constraint.start()]
    for token in answer:
        state = states[-1].after(token)
        if state is None:
            raise ValueError(f"{constraint.name}: got an answer that it does not allow; expected one that it does; decode with it")
        states.append(state)
    return states


def constrain_rows(logits: Tensor, states: Sequence[ConstraintState]) -> Tensor:
    """logits [n,V] after n beginnings of an answer, with the states there -> the same with −inf where a token is not allowed."""
    return logits.masked_fill(~_unpack([state.allowed() for state in states], logits), -torch.inf)


def mask_trees(states: Sequence[ConstraintState], trees: Sequence[tuple[Sequence[int], Sequence[int]]], scores: Tensor) -> None:
    """Set the scores of tokens that are not allowed to −inf, in place, at every node that can be accepted. One mask is made for each of them.

    Nodes below a token that is not allowed stay as they are: no walk reaches them.

    Args:
        states: of each row, after its root.
        trees: tokens and parents of each row's nodes, without padding.
        scores: float [B,N,V].
    """
    indices, masks = [], []
    for row, (state, (tokens, parents)) in enumerate(zip(states, trees, strict=True)):
        reached: dict[int, tuple[ConstraintState, bytes]] = {}  # by node
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            current: ConstraintState | None = state
            if node:
                before, mask = reached.get(parent, (None, b""))
                current = before.after(token) if before and mask[token // 8] >> token % 8 & 1 else None
            if current is not None:
                reached[node] = current, current.allowed()
                indices.append((row, node))
                masks.append(reached[node][1])
    if indices:
        row, node = torch.tensor(indices, device=scores.device).unbind(1)
        scores[row, node] = scores[row, node].masked_fill(~_unpack(masks, scores), -torch.inf)


def _unpack(masks: list[bytes], scores: Tensor) -> Tensor:
    """Masks, one bit a token -> bool [·,V], on the device of scores [...,V]."""
    words = torch.frombuffer(bytearray(b"".join(masks)), dtype=torch.uint8).view(len(masks), -1).to(scores.device)
    bits = (words[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=scores.device)) & 1
    return bits.flatten(1)[:, : scores.shape[-1]].bool()
