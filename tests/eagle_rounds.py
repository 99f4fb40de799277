"""Rounds of an EAGLE drafter by the protocol alone, each compared with training-time test."""

import random
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from eagle_drafters import allowed

from draftsmith.inference.drafter import NodeOutput, RoundContext, TargetOutput
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.verify import Verdict
from draftsmith.models import feature_drafter
from draftsmith.models.eagle import EagleModel
from draftsmith.models.target import Target


class Watched:
    """An expansion that notes the paths of the inner nodes of each level: paths[b][f] are the tokens after the root."""

    def __init__(self, expansion, rows: int) -> None:
        self.expansion, self.paths = expansion, [[[]] for _ in range(rows)]

    def __getattr__(self, name):
        return getattr(self.expansion, name)

    def add_level(self, *given):
        level = self.expansion.add_level(*given)
        if level is not None:
            nodes = zip(self.paths, level.parent_index.tolist(), level.tokens.tolist(), strict=True)
            self.paths = [
                [paths[up] + [token] for up, token in zip(parent_index, tokens, strict=True)] for paths, parent_index, tokens in nodes
            ]
        return level


def along(drafter: EagleModel, out: TargetOutput, line: list[int], root: int, paths: list[list[int]]) -> torch.Tensor:
    """By training-time test: the logits [nodes,D] after the root and each of `paths`."""
    depth = max(map(len, paths))
    ids = torch.tensor([line[: root + 1] + path + [0] * (depth - len(path)) for path in paths])
    taps = None if out.taps is None else out.taps[:, :root]
    feature = drafter.feature_of(TargetOutput(out.hidden[:, :root], taps))
    feature = F.pad(feature, (0, 0, 0, depth + 1)).expand(len(paths), -1, -1)
    positions = torch.arange(root + 1 + depth).expand_as(ids)
    outputs = drafter.training_time_test(feature, ids, positions, torch.zeros_like(ids), depth + 1)
    return drafter.logits_of(torch.stack([outputs[len(path)][n, root - 1] for n, path in enumerate(paths)]))


@torch.no_grad()
def played(drafter: EagleModel, target: Target, shape, lines: list[list[int]], rows: int, seed: int = 0) -> Counter:
    """Decode `lines` by the protocol alone, truth hidden at random in real trees; every node's logits are training-time test's.

    Rows start together and apart, are left out of rounds, idle within them, and end early; prompts of one token are among them;
    features of nodes that were not accepted are noise. Counts what happened.
    """
    rng, noise, seen = random.Random(seed), torch.Generator().manual_seed(seed), Counter()
    drafter.tree_spec = shape
    drafter.bind(target, rows, max(map(len, lines)))
    known = [target.forward(torch.tensor([line]), taps=drafter.taps) for line in lines]
    order = allowed(drafter)
    waiting, live = list(range(len(lines))), {}
    one_tap = (len(drafter.taps), target.hidden_size)

    def output(places, width: int) -> NodeOutput:
        """places: of each row (line, index of every node, −1 for noise)."""
        hidden = 3 * torch.randn(len(places), width, target.hidden_size, generator=noise)
        taps = 3 * torch.randn(len(places), width, *one_tap, generator=noise) if drafter.taps else None
        for b, (line, nodes) in enumerate(places):
            for node, index in enumerate(nodes):
                if index >= 0:
                    hidden[b, node] = known[line].hidden[0, index]
                    if taps is not None:
                        taps[b, node] = known[line].taps[0, index]
        return NodeOutput(hidden, taps)

    while waiting or live:
        free = [row for row in range(rows) if row not in live]
        if waiting and free and (not live or rng.random() < 0.5):
            fresh = [(row, waiting.pop(0)) for row in free[: rng.randint(1, len(waiting))]]
            sizes = [rng.choice((1, 2, 3, 5, 8)) if line else 1 for _, line in fresh]
            prompts = [lines[line][:size] for (_, line), size in zip(fresh, sizes, strict=True)]
            places = [(line, range(size - 1)) for (_, line), size in zip(fresh, sizes, strict=True)]
            seen["started beside others"] += bool(live)
            seen["ragged start"] += len(set(sizes)) > 1
            seen["one token"] += 1 in sizes
            drafter.start([row for row, _ in fresh], prompts, output(places, max(sizes) - 1))
            live |= {row: (line, size - 1) for (row, line), size in zip(fresh, sizes, strict=True)}
        asked = sorted(row for row in live if rng.random() < 0.75) or sorted(live)
        if rng.random() < 0.1:
            rng.shuffle(asked)
        seen["left out"] += len(asked) < len(live)
        now = [live[row] for row in asked]
        root = torch.tensor([lines[line][at] for line, at in now])
        depth = rng.choice((99, 99, 1, 2))
        round = RoundContext(asked, torch.tensor(asked), root, torch.tensor([at for _, at in now]), torch.tensor(asked), Sampling(), depth)
        tree, levels = propose(drafter, round, now, lines, order, rng)
        tree.validate()
        for b, (line, at) in enumerate(now):
            if not at:
                assert tree.size[b] == 1
                continue
            assert tree.size[b] > 1 and len(levels) == min(depth, drafter.max_depth)
            logits = torch.cat([logits[b] for logits, _ in levels])
            wanted = along(drafter, known[line], lines[line], at, [path for _, paths in levels for path in paths[b]])
            torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
            seen["compared"] += len(logits)
        places, path, length, following = [], [], [], []
        width = min(depth, drafter.max_depth) + 1
        for b, (line, at) in enumerate(now):
            kept = descend(tree, b, lines[line][at + 1 :])
            most = min(len(kept), len(lines[line]) - 1 - at)
            kept = kept[: most if rng.random() < 0.6 else rng.randint(1, most)]
            if rng.random() < 0.08:
                kept = []
                seen["idle"] += 1
            seen["moved"] += kept != list(range(len(kept)))
            seen[len(kept) - 1] += 1
            nodes = [at + kept.index(node) if node in kept else -1 for node in range(tree.tokens.shape[1])]
            places.append((line, nodes))
            path.append(kept + [-1] * (width - len(kept)))
            length.append(len(kept))
            following.append(lines[line][at + len(kept)] if kept else 0)
            live[asked[b]] = (line, at + len(kept))
        verdict = Verdict(torch.tensor(path), torch.tensor(length), torch.tensor(following))
        drafter.accept(round, tree, verdict, output(places, tree.tokens.shape[1]))
        gone = [row for row, (line, at) in live.items() if at == len(lines[line]) - 1 or rng.random() < 0.02]
        if gone:
            drafter.drop(gone)
            live = {row: place for row, place in live.items() if row not in gone}
    return seen


def propose(drafter: EagleModel, round: RoundContext, now, lines, order, rng):
    """A real proposal, but that the true next token is put among the candidates -> the tree, and (logits, paths) of its levels."""
    levels, watched = [], []

    def choose(logits, count, round, index, scored):
        ids, scores, q_logits = EagleModel._choose(drafter, logits, count, round, index, scored)
        ready = torch.tensor([at > 0 for _, at in now])  # without a pair there is nothing to rank by
        assert torch.equal(ids[ready], order[logits[ready].topk(ids.shape[-1], -1).indices]) and q_logits is None
        paths = watched[0].paths
        levels.append((logits.clone(), paths))
        ids = ids.clone()
        for b, (line, at) in enumerate(now):
            truth = lines[line][at + 1 :]
            for f, path in enumerate(paths[b]):
                assert index[b, f] == at + 1 + len(path)
                if path == truth[: len(path)] and len(truth) > len(path) and truth[len(path)] not in ids[b, f] and rng.random() < 0.95:
                    ids[b, f, rng.randrange(rng.choice((1, 2, 99))) % ids.shape[2]] = truth[len(path)]
        return ids, scores, q_logits

    with pytest.MonkeyPatch.context() as patch:
        plain = feature_drafter.expand
        patch.setattr(feature_drafter, "expand", lambda *given: watched.append(Watched(plain(*given), len(now))) or watched[0])
        patch.setattr(drafter, "_choose", choose, raising=False)
        return drafter.propose(round), levels


def descend(tree, b: int, truth: list[int]) -> list[int]:
    """The nodes of row b that carry the truth, the root first."""
    kept, tokens, parents = [0], tree.tokens[b].tolist(), tree.parents[b].tolist()
    for token in truth:
        child = [node for node in range(1, int(tree.size[b])) if parents[node] == kept[-1] and tokens[node] == token]
        if not child:
            break
        kept.append(child[0])
    return kept
