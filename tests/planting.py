"""A drafter that knows the answer and hides it in random trees, so that tests reach what a useless drafter never touches."""

import random
from collections import Counter
from collections.abc import Sequence

import torch

from draftsmith.inference.drafter import NodeOutput, RoundContext
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import DraftTree
from draftsmith.inference.verify import Verdict


def round_context(slots: Sequence[int], last_tokens: Sequence[int], depth: int = 99, sampling: Sampling = Sampling()) -> RoundContext:  # noqa: B008 (frozen)
    """The context that a decoder would make for these slots; positions and keys do not matter."""
    zero = torch.zeros(len(slots), dtype=torch.int64)
    return RoundContext(list(slots), torch.tensor(slots), torch.tensor(last_tokens), zero + 7, zero, sampling, depth)


class PlantingDrafter:
    """Proposes random trees that contain the first m tokens of the true continuation and not the one after, m random in 0..K.

    The verdict of every round is therefore known: 1 + m.

    Args:
        prompts, continuations: matched by index; the continuations come from plain decoding.
        vocab: V.
        max_nodes, max_depth: N and K at most.
        leftmost: the share of rounds in which the true chain comes first, so that no KV has to move.
        duplicates: allow siblings that carry the same token.
        seed: of the trees.
        taps: decoder layers to ask for.

    Attributes:
        mismatches: rounds whose verdict was not the planted one.
        accepted: Counter of accepted nodes m.
        moves, in_place: rounds whose path is not, or is, 0, 1, 2, …
        padded: trees smaller than N.
        duplicates: siblings with the same token.
        starts, short_starts: requests started, and those of them with a prompt of one token.
        starts_beside: requests started while another slot decoded.
        sizes: Counter of tree sizes.
    """

    capturable = False

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        continuations: Sequence[Sequence[int]],
        vocab: int,
        *,
        max_nodes: int = 12,
        max_depth: int = 4,
        leftmost: float = 0.3,
        duplicates: bool = False,
        seed: int = 0,
        taps: tuple[int, ...] = (),
    ) -> None:
        assert max_nodes > max_depth and len({tuple(prompt) for prompt in prompts}) == len(prompts)
        self.known = {tuple(prompt): list(answer) for prompt, answer in zip(prompts, continuations, strict=True)}
        self.vocab = vocab
        self.max_nodes = max_nodes
        self.max_depth = max_depth
        self.leftmost = leftmost
        self.allow_duplicates = duplicates
        self.taps = taps
        self.random = random.Random(seed)
        self.accepted: Counter[int] = Counter()
        self.sizes: Counter[int] = Counter()
        self.moves = self.in_place = self.padded = self.duplicates = self.mismatches = 0
        self.starts = self.short_starts = self.starts_beside = 0

    def bind(self, target: object, slots: int, context: int) -> None:
        self.answers: dict[int, list[int]] = {}
        self.offset: dict[int, int] = {}
        self.planted: dict[int, list[int]] = {}

    def start(self, slots: list[int], prompts: list[list[int]], out: NodeOutput) -> None:
        longest = max(len(prompt) for prompt in prompts)
        assert out.hidden.shape[:2] == (len(prompts), longest - 1), "features of prompt[:-1], padded to the longest"
        assert (out.taps is None) == (not self.taps)
        for slot, prompt in zip(slots, prompts, strict=True):
            assert slot not in self.answers, "a slot was started twice without drop"
            self.starts += 1
            self.short_starts += len(prompt) == 1
            self.starts_beside += bool(self.answers)
            self.answers[slot] = self.known[tuple(prompt)]
            self.offset[slot] = 0

    def drop(self, slots: list[int]) -> None:
        for slot in slots:
            del self.answers[slot]

    def propose(self, round: RoundContext) -> DraftTree:
        trees = [self._make_tree(slot, first) for slot, first in zip(round.slots, round.last_tokens.tolist(), strict=True)]
        width = max(len(tokens) for tokens, _ in trees)
        size = [len(tokens) for tokens, _ in trees]
        for tokens, parents in trees:
            self.sizes[len(tokens)] += 1
            self.padded += len(tokens) < width
            while len(tokens) < width:  # what stands in the padding must not matter
                tokens.append(self.random.randrange(self.vocab))
                parents.append(self.random.choice((-1, 0, self.random.randrange(width))))
        tokens, parents = (torch.tensor(column) for column in zip(*trees, strict=True))
        return DraftTree.build(tokens, parents, torch.tensor(size)).to(round.last_tokens.device)

    def _make_tree(self, slot: int, last_token: int) -> tuple[list[int], list[int]]:
        truth = self.answers[slot][self.offset[slot] :]
        count = self.random.randint(1, self.max_nodes)
        hidden = min(self.random.randint(0, self.max_depth), count - 1, len(truth))
        tokens, parents, depth = [last_token], [-1], [0]
        chain = [0]  # nodes that carry the truth
        first = self.random.random() < self.leftmost

        def add(parent: int, token: int) -> None:
            tokens.append(token)
            parents.append(parent)
            depth.append(depth[parent] + 1)

        while len(tokens) < count:
            missing = hidden + 1 - len(chain)
            if missing and (first or missing == count - len(tokens) or self.random.random() < 0.4):
                add(chain[-1], truth[len(chain) - 1])
                chain.append(len(tokens) - 1)
                continue
            open_nodes = [i for i in range(len(tokens)) if depth[i] < self.max_depth]
            parent = self.random.choice(open_nodes)
            banned = {tokens[i] for i in range(1, len(tokens)) if parents[i] == parent}
            if self.allow_duplicates and banned and self.random.random() < 0.5:
                duplicate = self.random.choice(sorted(banned))
                # A duplicate of the true child, after it: the first one counts.
                add(parent, duplicate)
                self.duplicates += 1
                continue
            if parent in chain and chain.index(parent) < len(truth):
                banned.add(truth[chain.index(parent)])
            add(parent, self.random.choice([token for token in range(self.vocab) if token not in banned]))
        # Past the known answer a distractor may be right by chance: the verdict is then not known.
        self.planted[slot] = chain if hidden < len(truth) else []
        return tokens, parents

    def accept(self, round: RoundContext, tree: DraftTree, verdict: Verdict, out: NodeOutput) -> None:
        assert out.hidden.shape[:2] == tree.tokens.shape
        for slot, path, length in zip(round.slots, verdict.path.tolist(), verdict.length.tolist(), strict=True):
            accepted = path[:length]
            if self.planted[slot]:
                self.mismatches += accepted != self.planted[slot]
            self.accepted[length - 1] += 1
            moved = accepted != list(range(length))
            self.moves += moved
            self.in_place += not moved
            self.offset[slot] += length
