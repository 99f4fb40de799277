"""Long contexts: drafting with and without a window, and the second turn of a conversation with and without the KV of the first.

python -m draftsmith.eval.benchmarks.long_context [--contexts 1024 4096 16384 65536] [--window 1024] [--rounds 40] [--turns 3]

Weights are random, and so are the keys and values that the drafters are timed after: the figures are times and bytes, and say nothing of
acceptance. A round drafts a chain of 4 and learns that nothing of it was accepted. Rounds with and without the window alternate, and so do
turns; medians are printed. Turns are timed at up to 16,384 positions, since without kept KV each is a complete prefill.
"""

import argparse
import statistics
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from draftsmith.inference.attention import tree_attention
from draftsmith.inference.cache import TreeCache
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.draft_window import WindowCache
from draftsmith.inference.drafter import NodeOutput, RoundContext
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import StaticTree
from draftsmith.inference.verify import Verdict
from draftsmith.models.drafter import new_drafter
from draftsmith.models.feature_drafter import PairDrafter
from draftsmith.models.target import Target

DEPTH, VOCAB = 4, 1024
MOST_FOR_TURNS = 16_384
SHAPE: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}  # SmolLM2-135M's


def llama(layers: int, positions: int) -> Target:
    """A Llama with random weights."""
    config = LlamaConfig(**SHAPE, vocab_size=VOCAB, num_hidden_layers=layers, max_position_embeddings=positions, eos_token_id=None)
    torch.manual_seed(0)
    return Target.wrap(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval(), name=f"{layers} random layers")


def eagle(target: Target, window: int | None = None) -> PairDrafter:
    """EAGLE-3 with random weights."""
    heads = {"num_heads": SHAPE["num_attention_heads"], "num_kv_heads": SHAPE["num_key_value_heads"]}
    drafter = new_drafter("eagle", target, taps=[0, 1], intermediate_size=SHAPE["intermediate_size"], **heads).eval()
    assert isinstance(drafter, PairDrafter)
    drafter.tree_spec, drafter.window = StaticTree.chain(DEPTH), window
    return drafter


class Rounds:
    """Rounds of a drafter after `context` positions of random keys and values, without a target's forwards."""

    def __init__(self, drafter: DraftModel | PairDrafter, target: Target, context: int, rounds: int) -> None:
        self.drafter, self.target, self.position = drafter, target, context
        drafter.bind(target, 1, context + rounds + 1)
        if isinstance(drafter, DraftModel):
            self.layers, self.cache = drafter.model.num_layers, drafter._state.cache
            drafter._state.pending[0] = [1]
        else:
            self.layers, self.cache = 1, drafter._state.cache
            drafter._state.ready_slots.add(0)
        fill(self.cache, self.layers, context)

    @torch.inference_mode()
    def time(self) -> float:
        """Seconds of drafting and learning in one round."""
        slot, token = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
        round = RoundContext([0], slot, token, slot + self.position, slot, Sampling(), DEPTH)
        features = torch.randn(1, DEPTH + 1, 1 + len(self.drafter.taps), self.target.hidden_size)
        began = perf_counter()
        with tree_attention(self.target.model):
            tree = self.drafter.propose(round)
            path = torch.tensor([[0] + [-1] * DEPTH])
            self.drafter.accept(round, tree, Verdict(path, token, token), NodeOutput(features[:, :, 0], features[:, :, 1:]))
        self.position += 1
        return perf_counter() - began

    @property
    def kv_bytes(self) -> int:
        return self.cache.bytes_per_token * self.cache.capacity


def fill(cache: TreeCache, layers: int, context: int) -> None:
    """Random keys and values, as a prefill of `context` positions leaves them."""
    stored, parts = context, [context]
    if isinstance(cache, WindowCache) and cache.window is not None and context > cache.sinks + cache.window:
        stored, parts = cache.sinks + cache.window, [cache.sinks, cache.window]
    cache.select([0])
    for count in parts:
        for layer in range(layers):
            states = torch.randn(1, SHAPE["num_key_value_heads"], count, SHAPE["head_dim"])
            cache.update(states, states, layer)
        cache.advance([count])
        if count != parts[-1] and isinstance(cache, WindowCache):
            cache.skip([context - stored])


def drafting(name: str, context: int, window: int, rounds: int, target: Target, model: Target) -> str:
    """A line: ms a round and KV bytes without and with the window."""
    tree = StaticTree.chain(DEPTH)
    both = [
        Rounds(DraftModel(model, tree, window=size) if name == "draft model" else eagle(target, size), target, context, rounds)
        for size in (None, window)
    ]
    times: list[list[float]] = [[], []]
    for turn in range(rounds):
        for which in (0, 1) if turn % 2 else (1, 0):
            times[which].append(both[which].time())
    all_ms, window_ms = (1e3 * statistics.median(seconds[2:]) for seconds in times)
    all_mb, window_mb = (each.kv_bytes / 1e6 for each in both)
    return f"{name} after {context:,}: {all_ms:.1f} -> {window_ms:.1f} ms a round, {all_mb:.1f} -> {window_mb:.1f} MB of KV"


def second_turn(context: int, turns: int, target: Target) -> str:
    """A line: seconds in which a turn of 32 new tokens after `context` is prefilled, by target and EAGLE-3, without and with kept KV."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(VOCAB, (context,), generator=generator).tolist()
    fresh, keeping = (Decoder(target, eagle(target), context=context + 128, keep=keep) for keep in (False, True))
    text = first + keeping.generate([first], max_new_tokens=16, stop_ids=())[0].tokens
    times: dict[Decoder, list[float]] = {fresh: [], keeping: []}
    for turn in range(turns):
        prompt = text + [turn, *torch.randint(VOCAB, (31,), generator=generator).tolist()]
        answers = []
        for decoder in (fresh, keeping) if turn % 2 else (keeping, fresh):
            before = decoder.counters.prefill_s
            answers.append(decoder.generate([prompt], max_new_tokens=2, stop_ids=())[0].tokens)
            times[decoder].append(decoder.counters.prefill_s - before)
        assert answers[0] == answers[1]
    without, kept_s = (statistics.median(seconds) for seconds in times.values())
    return f"second turn after {context:,}: {without:.2f} -> {kept_s:.3f} s of prefill"


def main(arguments: Sequence[str] | None = None) -> None:
    described = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    described.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 16384, 65536], help="positions before what is timed")
    described.add_argument("--window", type=int, default=1024, help="positions that the drafter sees (default 1024)")
    described.add_argument("--rounds", type=int, default=40, help="drafting rounds of each form (default 40)")
    described.add_argument("--turns", type=int, default=3, help="second turns of each form (default 3)")
    chosen = described.parse_args(arguments)
    positions = max(chosen.contexts) + 1024
    target, model = llama(2, positions), llama(8, positions)
    print(f"random weights, {torch.get_num_threads()} threads; without -> with a window of {chosen.window:,}, then kept KV", flush=True)
    for name in ("draft model", "EAGLE-3"):
        for context in chosen.contexts:
            print(drafting(name, context, chosen.window, chosen.rounds, target, model), flush=True)
    for context in chosen.contexts:
        if context <= MOST_FOR_TURNS:
            print(second_turn(context, chosen.turns, target), flush=True)


if __name__ == "__main__":
    main()
