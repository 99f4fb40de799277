"""A draft model with another tokenizer, restricted to the tokens that both tokenizers have: token-level intersection (TLI; Timor et al. 2025,
"Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies", https://arxiv.org/abs/2502.05202).

Two tokens are the same if they stand for the same bytes. The draft distribution q is the draft model's over the shared tokens, so it drafts
trees, and children are drawn and verified, as for any draft model. Committed tokens that are not shared it reads as its own tokens of their
bytes.

Letters: B rows · V vocabulary of the target · H hidden size of the draft model · S positions · U shared tokens.
"""

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.byte_vocabulary import ByteVocabulary, counterparts, mean_length
from draftsmith.inference.cache import TreeCache
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.drafter import NodeOutput, RoundContext, Target, TargetOutput
from draftsmith.inference.expand import TreeSpec
from draftsmith.inference.stopping import Stopping
from draftsmith.inference.tree import DraftTree
from draftsmith.inference.verify import Verdict

__all__ = ["SharedTokens"]


class SharedTokens(DraftModel):
    """A language model that drafts the tokens that it shares with the target.

    A text may be longer in its tokens than in the target's. Where it would be longer than the cache, the last half of the text is read again.

    Args:
        model: the draft model.
        ours: its vocabulary.
        theirs: the target's.
        vocab_size: V.
        tree_spec, chunk, stop: as for DraftModel.

    Raises:
        ValueError: no token is shared.
    """

    method = "tli"

    def __init__(
        self,
        model: Target,
        ours: ByteVocabulary,
        theirs: ByteVocabulary,
        vocab_size: int,
        tree_spec: TreeSpec,
        chunk: int = 256,
        stop: Stopping | None = None,
    ) -> None:
        super().__init__(model, tree_spec, chunk, stop)
        self.ours, self.theirs, self.vocab_size = ours, theirs, vocab_size
        pieces = theirs.id_of.keys() & ours.id_of.keys()
        pairs = {theirs.id_of[piece]: ours.id_of[piece] for piece in pieces} | counterparts(theirs, ours)
        shared = {token: own for token, own in sorted(pairs.items()) if token < vocab_size and own < model.vocab_size}
        if not pieces or not shared:
            raise ValueError(
                f"draft model {ours.name!r} and target {theirs.name!r} share no token; expected some that stand for the same bytes; take "
                f"strings:{ours.name}, which compares text"
            )
        self.shared = shared  # the target's id -> the draft model's
        self._target_index = torch.tensor(list(shared), device=model.device)  # [U]
        self._own_index = torch.tensor(list(shared.values()), device=model.device)  # [U]
        self._own_of = torch.zeros(vocab_size, dtype=torch.int64, device=model.device)  # [V], 0 where a token is not shared
        self._own_of[self._target_index] = self._own_index
        self._readings = {token: [own] for token, own in shared.items()}
        self._mean_length = mean_length(ours, theirs)
        self._texts: dict[int, list[int]] = {}  # by slot, in the target's tokens
        self._most = model.max_positions  # most tokens of a text

    @property
    def capturable(self) -> bool:
        """False: a committed token may be several of its own."""
        return False

    def check(self, context: int) -> None:
        """Any context will do: of a long text it reads the end."""

    def bind(self, target: Target, slots: int, context: int) -> Any:
        if target.vocab_size != self.vocab_size:
            raise ValueError(
                f"drafter tli:{self.ours.name} is for {self.vocab_size} logits, got a target of {target.vocab_size}; make it anew"
            )
        self._most = min(math.ceil(context * self._mean_length), self.model.max_positions)
        self._texts = {}
        return super().bind(target, slots, self._most)

    def start(self, slots: list[int], prompts: list[list[int]], out: NodeOutput) -> None:
        self._texts.update(zip(slots, map(list, prompts), strict=True))
        super().start(slots, prompts, out)

    def propose(self, round: RoundContext) -> DraftTree:
        state = self._state
        lengths = state.cache.length_bounds()
        for slot in round.slots:
            if lengths[slot] + len(state.pending[slot]) > self._most:
                state.cache.reset([slot])
                state.pending[slot] = self._read(self._texts[slot], first=True)
        return super().propose(round)

    def accept(self, round: RoundContext, tree: DraftTree, verdict: Verdict, out: NodeOutput) -> None:
        super().accept(round, tree, verdict, out)
        for slot, result in zip(round.slots, verdict.on_host(tree), strict=True):
            self._texts[slot] += result.tokens

    def keep(self, slots: list[int]) -> TreeCache | None:
        """Its KV goes: a position of the target's text is none of its own. So `resume` reads the prompts again."""
        self.drop(slots)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [...,H] -> logits [...,V] in the target's ids, −inf for tokens that are not shared."""
        own = self.model.logits(hidden)
        return own.new_full((*own.shape[:-1], self.vocab_size), -torch.inf).index_copy_(-1, self._target_index, own[..., self._own_index])

    def position_features(self, ids: Tensor, out: TargetOutput) -> Tensor:
        """ids [S] -> the draft model's hidden states [S,H] where it has read each of them. The target's `out` is not used."""
        parts = [self._reading(token) for token in ids.tolist()]
        parts[0] = (int(ids[0]) in self.theirs.begin and self.ours.begin) or self._begin(parts[0])
        own = torch.tensor([[index for part in parts for index in part]], device=self.model.device)
        last = torch.tensor([len(part) for part in parts], device=self.model.device).cumsum(0) - 1
        positions = torch.arange(own.shape[1], device=own.device)[None].clamp(max=self.model.max_positions - 1)
        with torch.inference_mode():
            return self.model.forward(own, position_ids=positions).hidden[0, last]

    def _own_ids(self, ids: Tensor) -> Tensor:
        return self._own_of[ids]

    def _read(self, tokens: list[int], first: bool = False) -> list[int]:
        if first:  # each tokenizer begins a text in its own way
            tokens = list(itertools.dropwhile(self.theirs.begin.__contains__, tokens)) or tokens
        own = [index for token in tokens for index in self._reading(token)]
        if first:
            own = self._begin(own)
            return own if len(own) <= self._most else own[-max(1, self._most // 2) :]
        return own

    def _begin(self, own: list[int]) -> list[int]:
        """A text in its tokens, with what its tokenizer writes before every text."""
        begin = self.ours.begin
        return own if own[: len(begin)] == begin else begin + own

    def _reading(self, token: int) -> list[int]:
        """The tokens, one at least, that it reads for a token of the target: where nothing spells that, its own end of the text."""
        if token not in self._readings:
            piece = self.theirs.text_of(token)
            self._readings[token] = (piece and self.ours.encode(piece)) or [self.ours.end or 0]
        return self._readings[token]
