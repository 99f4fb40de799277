"""A drafter that knows the answer and hides it in random trees, so that tests reach what a useless drafter never touches."""

import random
from collections import Counter
from collections.abc import Sequence

import torch

from draftsmith.inference.drafter import NodeOutput, RoundContext
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import DraftTree
from draftsmith.inference.verify import Verdict


def ask(rows: Sequence[int], root: Sequence[int], depth: int = 99, sampling: Sampling = Sampling()) -> RoundContext:  # noqa: B008 (frozen)
    """What a decoder would ask for these rows; positions and keys are of no concern."""
    zero = torch.zeros(len(rows), dtype=torch.int64)
    return RoundContext(list(rows), torch.tensor(rows), torch.tensor(root), zero + 7, zero, sampling, depth)


class PlantingDrafter:
    """Proposes random trees that contain the first m tokens of the true continuation and not the one after, m random in 0..K.

    prompts, continuations: matched by index; the continuations come from plain decoding. The verdict of every round is
    therefore known: 1 + m. `mismatches` counts rounds that said otherwise.

    leftmost: the share of rounds in which the true chain is put first, so that no KV has to move. twins: allow siblings that
    carry the same token. taps: decoder layers to ask for.

    Counts: accepted (Counter of accepted nodes m), moves (rounds whose path is not 0, 1, 2, …), in_place, padded (trees smaller
    than N), twins, starts (rows started, one-token prompts apart in `short_starts`), starts_beside (starts while another row
    lived), sizes (Counter).
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
        twins: bool = False,
        seed: int = 0,
        taps: tuple[int, ...] = (),
    ) -> None:
        assert max_nodes > max_depth and len({tuple(prompt) for prompt in prompts}) == len(prompts)
        self.known = {tuple(prompt): list(answer) for prompt, answer in zip(prompts, continuations, strict=True)}
        self.vocab = vocab
        self.max_nodes = max_nodes
        self.max_depth = max_depth
        self.leftmost = leftmost
        self.allow_twins = twins
        self.taps = taps
        self.random = random.Random(seed)
        self.accepted: Counter[int] = Counter()
        self.sizes: Counter[int] = Counter()
        self.moves = self.in_place = self.padded = self.twins = self.mismatches = 0
        self.starts = self.short_starts = self.starts_beside = 0

    def bind(self, target: object, rows: int, context: int) -> None:
        self.answers: dict[int, list[int]] = {}
        self.offset: dict[int, int] = {}
        self.planted: dict[int, list[int]] = {}

    def start(self, rows: list[int], prompts: list[list[int]], out: NodeOutput) -> None:
        longest = max(len(prompt) for prompt in prompts)
        assert out.hidden.shape[:2] == (len(prompts), longest - 1), "features of prompt[:-1], padded to the longest"
        assert (out.taps is None) == (not self.taps)
        for row, prompt in zip(rows, prompts, strict=True):
            assert row not in self.answers, "a row was started twice without drop"
            self.starts += 1
            self.short_starts += len(prompt) == 1
            self.starts_beside += bool(self.answers)
            self.answers[row] = self.known[tuple(prompt)]
            self.offset[row] = 0

    def drop(self, rows: list[int]) -> None:
        for row in rows:
            del self.answers[row]

    def propose(self, ask: RoundContext) -> DraftTree:
        grown = [self._grow(row, first) for row, first in zip(ask.slots, ask.last_tokens.tolist(), strict=True)]
        width = max(len(tokens) for tokens, _ in grown)
        size = [len(tokens) for tokens, _ in grown]
        for tokens, parents in grown:
            self.sizes[len(tokens)] += 1
            self.padded += len(tokens) < width
            while len(tokens) < width:  # what stands in the padding must not matter
                tokens.append(self.random.randrange(self.vocab))
                parents.append(self.random.choice((-1, 0, self.random.randrange(width))))
        tokens, parents = (torch.tensor(column) for column in zip(*grown, strict=True))
        return DraftTree.build(tokens, parents, torch.tensor(size)).to(ask.last_tokens.device)

    def _grow(self, row: int, root: int) -> tuple[list[int], list[int]]:
        truth = self.answers[row][self.offset[row] :]
        count = self.random.randint(1, self.max_nodes)
        hidden = min(self.random.randint(0, self.max_depth), count - 1, len(truth))
        tokens, parents, depth = [root], [-1], [0]
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
            if self.allow_twins and banned and self.random.random() < 0.5:
                twin = self.random.choice(sorted(banned))
                # A twin of the true child, after it: the first one counts.
                add(parent, twin)
                self.twins += 1
                continue
            if parent in chain and chain.index(parent) < len(truth):
                banned.add(truth[chain.index(parent)])
            add(parent, self.random.choice([token for token in range(self.vocab) if token not in banned]))
        # Past the known answer a distractor may be right by chance: the verdict is then not known.
        self.planted[row] = chain if hidden < len(truth) else []
        return tokens, parents

    def accept(self, ask: RoundContext, tree: DraftTree, verdict: Verdict, out: NodeOutput) -> None:
        assert out.hidden.shape[:2] == tree.tokens.shape
        for row, path, length in zip(ask.slots, verdict.path.tolist(), verdict.length.tolist(), strict=True):
            kept = path[:length]
            if self.planted[row]:
                self.mismatches += kept != self.planted[row]
            self.accepted[length - 1] += 1
            moved = kept != list(range(length))
            self.moves += moved
            self.in_place += not moved
            self.offset[row] += length
