"""Rounds as graphs hold them against plain decoding, over random drafters, shapes, slots, prompts, limits, rules and calls: `make test-rounds`.

    python tests/soak_rounds.py [--minutes 5] [--first 0]

A CPU replays what was recorded (`taped`). Every case is a seed, and each failing one is named. Needs Triton for the names of the kernels.
"""

import argparse
import random
import sys
import time
import traceback

import interpreted  # noqa: F401 (first: it decides how Triton is imported)
import pytest
import taped
import torch
from planting import PlantingDrafter
from zoo import VOCAB, tiny

from draftsmith.inference import decoder as decoders
from draftsmith.inference.adaptive import AdaptiveDepth
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.expand import DynamicTree
from draftsmith.inference.graph_rounds import GraphRunner
from draftsmith.inference.lookup import Ngram, Suffix
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.stopping import Stopping
from draftsmith.inference.tree import StaticTree
from draftsmith.models.drafter import new_drafter
from draftsmith.models.target import Target

TARGETS = ("llama", "llama", "qwen3", "gemma2", "gemma3", "mistral", "gpt_oss", "deepseek_v3")
KINDS = ("plain", "medusa", "eagle1", "eagle3", "student", "student", "unsure student", "ngram", "suffix", "planting")
STATIC = (
    StaticTree.chain(1),
    StaticTree.chain(3),
    StaticTree.from_paths([(0,), (0, 0), (1,), (0, 1), (0, 0, 0)]),
    StaticTree.cartesian((3, 2)),
)
DYNAMIC = (DynamicTree(3, 2, 6), DynamicTree(2, 3, 5), DynamicTree(1, 4, 4), DynamicTree(4, 2, 12))


class Wild(AdaptiveDepth):
    """Any depth at any time."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng

    def depth(self, rows):
        return self.rng.randint(0, self.max_depth + 1)


class Planting(PlantingDrafter):
    """Accepts rounds without drafting, too: nothing was planted in them."""

    def accept(self, round, tree, verdict, out):
        if tree.tokens.shape[1] == 1:
            self.planted.update(dict.fromkeys(round.slots, []))
        super().accept(round, tree, verdict, out)


def shaken(model, by, seed=0):
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.add_(by * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def drafter_of(kind, target, name, rng):
    shape = rng.choice(STATIC + DYNAMIC)
    if kind == "plain":
        return None
    if kind == "ngram":
        return Ngram(shape)
    if kind == "suffix":
        return Suffix(DynamicTree(5, 3, 9), memory=rng.choice([0, 40, 300]))
    if kind.endswith("student"):
        model = shaken(tiny(rng.choice([name, "llama"])), rng.choice([0.0, 0.02, 0.05]))
        return DraftModel(
            Target.wrap(model), shape, stop=Stopping("confidence", rng.choice([0.1, 0.3])) if kind == "unsure student" else None
        )
    torch.manual_seed(rng.randrange(1000))
    if kind == "medusa":
        drafter = new_drafter("medusa", target, num_heads=4, share_head=rng.random() < 0.3)
    else:
        drafter = new_drafter("eagle", target, version=int(kind[-1]), **({"taps": [0, 1]} if kind == "eagle3" else {}), steps=4)
    drafter.tree_spec = shape
    return shaken(drafter, 0.01)


def sampling_of(rng):
    if rng.random() < 0.45:
        return Sampling(seed=rng.choice([0, 0, 1]))
    filters = {"top_k": rng.choice([0, 0, 5]), "top_p": rng.choice([1.0, 1.0, 0.9]), "min_p": rng.choice([0.0, 0.0, 0.05])}
    return Sampling(
        rng.choice([1.0, 0.8, 1.3]), **filters, seed=rng.choice([0, 3, 2**40 + 5]), rule=rng.choice(["target-sample", "shared-noise"])
    )


def prompts_of(rng, longest):
    most = min(longest - 1, rng.choice([2, 6, 14, 40]))
    prompts = [tuple(rng.randrange(VOCAB) for _ in range(rng.choice([1, rng.randint(1, most)]))) for _ in range(rng.randint(1, 9))]
    return [list(prompt) for prompt in dict.fromkeys(prompts)]


def between(kind, drafter, target, rng):
    """Something that happens from one call to the next: weights change where they are, or move; another tree, another confidence."""
    with torch.no_grad():
        if kind in ("medusa", "eagle1", "eagle3", "student") and rng.random() < 0.3:
            rng.choice(list((drafter.model.model if kind == "student" else drafter).parameters())).mul_(rng.choice([1.1, -1.0]))
        if kind not in ("plain", "planting", "suffix") and rng.random() < 0.2:
            drafter.tree_spec = rng.choice([StaticTree.chain(2), DynamicTree(2, 2, 4)])
        if kind.endswith("student") and rng.random() < 0.1:
            drafter.stop = None if drafter.stop else Stopping("confidence", 0.2)
        if rng.random() < 0.2:
            weight = rng.choice([parameter for parameter in target.model.parameters() if parameter.dim() > 1])
            weight.data = 1.05 * weight.data


def case(seed, patched):
    """One decoder and its calls. Raises what was wrong."""
    rng = random.Random(seed)
    name, kind, rows, context = rng.choice(TARGETS), rng.choice(KINDS), rng.randint(1, 6), rng.choice([None, None, 128, 60, 14])
    time_parts, adaptive = rng.random() < 0.25, rng.choice([None, None, AdaptiveDepth(), Wild(rng), Wild(rng)])
    taped.install(patched, replayed=True)
    patched.setattr(decoders, "GraphRunner", lambda *given: GraphRunner(*given[:-1], time_parts))
    target = Target.wrap(tiny(name))
    drafter = None if kind == "planting" else drafter_of(kind, target, name, rng)
    how = {"slots": rows, "context": context, "adaptive": adaptive, "kernels": True}
    decoder, sampling = Decoder(target, drafter, **how, chunk=rng.choice([256, 3, 16])), None
    for _ in range(rng.randint(1, 4)):
        prompts, new_tokens = prompts_of(rng, context or 128), rng.choice([1, 2, 7, 15, 30, 120])
        sampling = sampling if sampling and rng.random() < 0.6 else sampling_of(rng)
        requests = rng.choice([None, [rng.randrange(2**32) for _ in prompts]])
        plain = Decoder(target, slots=rng.randint(1, 4), context=context)
        free = plain.generate(prompts, sampling, new_tokens, (), requests)
        stops = set(rng.sample([token for answer in free for token in answer.tokens], 1)) if rng.random() < 0.5 else set()
        expected = plain.generate(prompts, sampling, new_tokens, stops, requests)
        if kind == "planting":
            drafter = Planting(prompts, [answer.tokens for answer in free], VOCAB, leftmost=rng.random(), taps=rng.choice([(), (0, 1)]))
            decoder = Decoder(target, drafter, **how)
        if rng.random() < 0.25:
            stream = decoder.stream(prompts, sampling, new_tokens, stops, requests)
            for _ in range(rng.randint(0, 6)):
                next(stream, None)
            stream.close()
        check(decoder.generate(prompts, sampling, new_tokens, stops, requests), expected, prompts)
        if drafter and kind != "planting" and rng.random() < 0.2:
            second = Decoder(target, drafter, slots=rng.randint(1, 5), context=context, kernels=True)
            check(second.generate(prompts, sampling, new_tokens, stops, requests), expected, prompts)
        between(kind, drafter, target, rng)


def check(got, expected, prompts):
    assert [(answer.tokens, answer.reason) for answer in got] == [(answer.tokens, answer.reason) for answer in expected]
    for answer, prompt in zip(got, prompts, strict=True):
        position = len(prompt) - 1
        for round in answer.rounds:
            assert round.position == position and 1 <= round.length <= round.accepted <= round.size
            position += round.length
        assert position == len(prompt) - 1 + len(answer.tokens)


def main():
    described = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    described.add_argument("--minutes", type=float, default=5)
    described.add_argument("--first", type=int, default=0, help="the seed to begin with")
    options = described.parse_args()
    torch.set_num_threads(1)
    end, seed, wrong = time.monotonic() + 60 * options.minutes, options.first, []
    while time.monotonic() < end:
        try:
            with pytest.MonkeyPatch.context() as patched:
                case(seed, patched)
        except Exception:  # of whatever kind: it is a case that fails
            wrong.append(seed)
            print(f"\nseed {seed}\n{traceback.format_exc()}", flush=True)
        seed += 1
        left = max(0.0, end - time.monotonic()) / 60
        print(f"\r{seed - options.first} cases, {len(wrong)} failed, {left:.1f} min left ", end="", file=sys.stderr)
    print(f"\nseeds {options.first} to {seed - 1}: {len(wrong)} failed {wrong or ''}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
