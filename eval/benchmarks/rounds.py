"""Whole rounds of an 8B-shaped Llama with random weights, beside plain steps of the same run: `draftsmith bench --kernels`, on a GPU.

Nothing is downloaded and nothing is trained, so how much of a draft is accepted is made up, and every figure that rests on it says SYNTHETIC.
What a round costs is real: the drafter drafts, the target reads the whole tree, the verdict is found from the logits; only then another
verdict takes its place, drawn on the device from an acceptance profile. It is keyed by the position, so that a run can be repeated.

Letters: B rows · N tree nodes with the root · V vocabulary · L layers · K draft depth · R ranks of a profile · C context length.
"""

import gc
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from draftsmith.data.prompts import Prompt
from draftsmith.eval import interleaved
from draftsmith.eval.benchmarks import kernels as bench_kernels
from draftsmith.eval.benchmarks.kernels import Report, Sizes
from draftsmith.inference.attention import tree_attention
from draftsmith.inference.cache import TreeCache
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.drafter import Drafter, NodeOutput, Plain, RoundContext
from draftsmith.inference.expand import DynamicTree
from draftsmith.inference.graph_rounds import GraphRunner, InFlightRound
from draftsmith.inference.kernels import use
from draftsmith.inference.progress import Bar
from draftsmith.inference.sampler import Sampling, uniform
from draftsmith.inference.tree import DraftTree, StaticTree, indices
from draftsmith.inference.verify import Verdict, judge
from draftsmith.models import vocab
from draftsmith.models.drafter import DrafterModel, default_paths, new_drafter
from draftsmith.models.target import Target
from draftsmith.models.target_defaults import usual_taps

__all__ = ["Decoded", "Effort", "Rival", "Round", "drawn", "expected", "llama", "run", "synthetic"]

WATERMARK = "SYNTHETIC"
ASKED = {(64, 2048): 1.20, (64, 32768): 1.35}  # of a round of so many nodes after so many tokens, over a plain step
ASKED_EFFICIENCY = 0.80
# The chances that a node's first, second, … child is what the target says, given that the node is: four children are missed once in five times.
PROFILE = (0.6, 0.12, 0.05, 0.03)
PEAK = 10.0  # deviation of the random EAGLE head's logits: its laws are peaked, so that its trees grow deep, as a trained one's do
POSITIONS = 131072  # of Llama 3.1

Verify = Callable[[DraftTree, Tensor, RoundContext], Verdict]


@dataclass(frozen=True, slots=True)
class Effort:
    """blocks: timed ones of each kind of round · rounds: of a block · prompt, new_tokens: of whole decodings · repeats: of those."""

    blocks: int = 25
    rounds: int = 8
    prompt: int = 512
    new_tokens: int = 256
    repeats: int = 5


@dataclass(frozen=True, slots=True)
class Round:
    """seconds: of a round of N = `nodes` after C = `context` tokens, the median of blocks · over_plain: over the plain step's · asked: at
    most · floor: seconds in which a copy moves as many bytes as weights and KV have that a forward must read."""

    what: str
    context: int
    nodes: int
    seconds: float
    over_plain: float
    asked: float | None
    floor: float

    def __str__(self) -> str:
        asked = f" (asked: {self.asked:.2f} at most)" if self.asked else ""
        floor = f"{self.floor * 1e3:.3f} ms for weights and KV at the copy's speed, {self.floor / self.seconds:.2f} of it"
        return f"{self.what}: {self.seconds * 1e3:.3f} ms, {self.over_plain:.3f} x plain{asked}; {floor}"


@dataclass(frozen=True, slots=True)
class Decoded:
    """tau: tokens a round · profile_tau: of the profile on that tree, where all trees are the same · seconds: of a round · speedup: over
    plain decoding, by token · efficiency: speedup / tau · asked: at least · parts: seconds of drafting, verifying, learning and committing
    where each is a graph of its own (nothing off a GPU)."""

    what: str
    tau: float
    profile_tau: float | None
    seconds: float
    speedup: float
    efficiency: float
    asked: float
    parts: dict[str, float]

    def __str__(self) -> str:
        profile = f" (of the profile: {self.profile_tau:.2f})" if self.profile_tau else ""
        whole = sum(self.parts.values())
        shares = ", ".join(f"{name} {seconds / whole:.0%}" for name, seconds in self.parts.items())
        return (
            f"{self.what}: tau {self.tau:.2f}{profile}, round {self.seconds * 1e3:.3f} ms, speedup {self.speedup:.2f} over plain, efficiency "
            f"{self.efficiency:.2f} (asked: {self.asked:.2f} at least)" + (f"; {shares}" if shares else "")
        )


@dataclass(frozen=True, slots=True)
class Rival:
    """ours, theirs: new tokens a second, prompt included · ratio: of times, theirs over ours, the median repeat · asked: at least."""

    what: str
    ours: float
    theirs: float
    ratio: float
    asked: float

    def __str__(self) -> str:
        asked = f"asked: {self.asked:.2f} at least"
        return f"{self.what}: {self.ours:.1f} over {self.theirs:.1f} tokens/s, {self.ratio:.3f} x as fast ({asked})"


def expected(parents: Sequence[int], profile: Sequence[float]) -> float:
    """τ of a profile on a tree, exactly: 1 + the chances of all its nodes, each its rank's times its parent's. parents [N], −1 first."""
    chances, children = [1.0], [0] * len(parents)
    for parent in parents[1:]:
        rank = children[parent]
        children[parent] += 1
        chances.append(chances[parent] * (profile[rank] if rank < len(profile) else 0.0))
    return sum(chances)


def drawn(tree: DraftTree, draws: Tensor, edges: Tensor) -> Tensor:
    """draws [B,K] in [0, 1), one for each depth, edges [R+1], the profile summed up from 0 -> [B,N] bool: who is accepted if its parent is.

    A node that is the r-th child of its parent is, if edges[r] <= draw < edges[r + 1]: one child at most, none if the draw is beyond."""
    rank, last = tree.sibling(), len(edges) - 1
    draw = draws.gather(1, (tree.depth - 1).clamp(0, draws.shape[1] - 1))
    return (edges[rank.clamp(max=last)] <= draw) & (draw < edges[(rank + 1).clamp(max=last)])


def synthetic(verify: Verify, profile: Sequence[float], device: torch.device) -> Verify:
    """`verify`, whose verdict is found and then replaced by the profile's, on the device: the drawn path, and the token that was found.

    The draw for a token is a function of request and position alone. A round uses those of the tokens that it commits, so that no two
    rounds share one."""
    edges = torch.tensor([0.0, *accumulate(profile)], dtype=torch.float64, device=device)

    def replaced(tree: DraftTree, logits: Tensor, round: RoundContext) -> Verdict:
        found = verify(tree, logits, round)
        position = round.positions[:, None] + 1 + indices(round.depth, device)
        draws = uniform(0, round.noise_keys[:, None].expand_as(position), position, torch.zeros_like(position))
        return judge(tree, drawn(tree, draws, edges), found.next_token[:, None].expand_as(tree.tokens), round.depth)

    return replaced


def _found(tree: DraftTree, logits: Tensor, round: RoundContext) -> Verdict:
    from draftsmith.inference.kernels.verify import verify

    return verify(tree, logits, round.sampling, round.noise_keys, round.positions, round.depth)


def llama(sizes: Sizes, device: torch.device) -> Target:
    """A Llama of these sizes, made on the device with random weights."""
    heads = {"num_attention_heads": sizes.heads, "num_key_value_heads": sizes.kv_heads, "head_dim": sizes.dim}
    widths = {"vocab_size": sizes.vocab, "hidden_size": sizes.heads * sizes.dim, "intermediate_size": sizes.mlp}
    lengths = {"num_hidden_layers": sizes.layers, "max_position_embeddings": POSITIONS, "eos_token_id": None}
    config = LlamaConfig(**heads, **widths, **lengths, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    torch.manual_seed(0)
    with device:  # on a CPU so many draws take minutes
        model = AutoModelForCausalLM.from_config(config, dtype=sizes.dtype)
    return Target.wrap(model, name="a Llama with random weights")


class Bare(Plain):
    """Drafts a tree without a network: what is left is the cost of verifying it."""

    def __init__(self, nodes: int, depth: int, device: torch.device) -> None:
        self.tree_spec = _static(nodes, depth).to(device)
        self.max_nodes, self.max_depth = nodes, self.tree_spec.max_depth

    def propose(self, round: RoundContext) -> DraftTree:
        ranks = indices(self.tree_spec.width, round.last_tokens.device)  # small numbers, which every vocabulary has
        return self.tree_spec.tree(round.last_tokens, ranks.expand(len(round.last_tokens), self.max_depth, -1))


def _static(nodes: int, depth: int) -> StaticTree:
    return StaticTree.from_paths(default_paths(min(depth, nodes - 1), nodes - 1))


def medusa(target: Target, sizes: Sizes) -> DrafterModel:
    """Four heads, each with an output layer of its own; a static tree."""
    drafter = new_drafter("medusa", target, dtype=sizes.dtype, num_heads=4)
    drafter.tree_spec = _static(sizes.nodes[-1], 4)
    return _scattered(drafter)


def eagle(target: Target, sizes: Sizes, depth: int = 0) -> DrafterModel:
    """EAGLE-3 with a quarter of the vocabulary and the published taps; a dynamic tree, eight wide and `depth` deep (0: as sizes say)."""
    layers, part = target.num_layers, target.vocab_size // 4
    taps = sorted({min(max(tap, 0), layers - 1) for tap in usual_taps(layers)})
    widths = {"num_heads": sizes.heads, "num_kv_heads": sizes.kv_heads, "intermediate_size": sizes.mlp, "draft_vocab_size": part}
    drafter: Any = new_drafter("eagle", target, dtype=sizes.dtype, version=3, taps=taps, steps=7, **widths)
    drafter.take(vocab.choose(torch.ones(target.vocab_size), part))
    drafter.tree_spec = DynamicTree(depth or sizes.depth, 8, sizes.nodes[-1])
    return _scattered(drafter)


@torch.no_grad()
def _scattered(drafter: DrafterModel) -> DrafterModel:
    """Random weights that keep the size of what passes."""
    for name, parameter in drafter.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, parameter.shape[-1] ** -0.5 * (PEAK if name == "lm_head.weight" else 1.0))
    return drafter.eval().requires_grad_(False)


def _filled(target: Target, sizes: Sizes, context: int, room: int) -> TreeCache:
    """A cache of one row with random KV of `context` tokens, written as a prefill writes, and room for more."""
    cache, shape = TreeCache(1, context + room, target.device), (1, sizes.kv_heads, context, sizes.dim)
    for layer in range(target.num_layers):
        keys, values = (torch.randn(shape, dtype=sizes.dtype, device=target.device) for _ in range(2))
        cache.update(keys, values, layer)
    cache.advance([context])
    return cache


class _Way:
    """Rounds of one kind behind a prefix of `context` tokens, in a cache that several ways share in turn. Its verdicts are synthetic,
    except where nothing is drafted. begin: the drafter's state after the prefix."""

    def __init__(self, target: Target, drafter: Drafter, cache: TreeCache, context: int, begin: Any = None, parted: bool = False) -> None:
        verify = synthetic(_found, PROFILE, target.device) if drafter.max_depth else _found
        self.rounds = GraphRunner(target, drafter, cache, Sampling(), verify, parted)
        self.cache, self.depth, self.context, self.begin = cache, drafter.max_depth, context, begin

    def rewind(self) -> None:
        """To the end of the prefix."""
        self.cache.length.fill_(self.context)
        if self.begin:
            self.begin()
        self.rounds.seat([0], [1], [0])
        if self.cache.length.is_cuda:  # what the drafter began with is not of the rounds
            torch.cuda.synchronize(self.cache.length.device)

    def block(self, count: int) -> float:
        """Seconds a round of `count`, queued one after the other."""
        self.rewind()
        began = perf_counter()
        self.fly(count)
        return (perf_counter() - began) / count

    def fly(self, count: int) -> list[InFlightRound]:
        """So many rounds, all landed."""
        flights = [self.rounds.launch(self.depth) for _ in range(count)]
        flights[-1].land()
        return flights

    def decode(self, new_tokens: int) -> tuple[float, int, int]:
        """Seconds, tokens and rounds of decoding so many tokens at least, a round launched before the last is looked at."""
        self.rewind()
        began, tokens, count = perf_counter(), 0, 0
        flights = deque([self.rounds.launch(self.depth)])
        while flights:
            if tokens < new_tokens:
                flights.append(self.rounds.launch(self.depth))
            tokens += flights.popleft().land()[0].length
            count += 1
        return perf_counter() - began, tokens, count

    def parts(self, count: int) -> dict[str, float]:
        """Median seconds of the parts of `count` rounds; nothing where they are not told apart."""
        self.block(1)  # records the graphs
        columns = zip(*(flight.parts() for flight in self.fly(count)), strict=True)
        return dict(zip(("drafting", "verifying", "learning", "committing"), map(statistics.median, columns), strict=False))


def _in_turn(what: str, ways: Mapping[Any, Callable[[], Any]], count: int) -> dict[Any, list[Any]]:
    """What each way gives, `count` times, after one turn to warm up; another way is the first each time."""
    names, found = list(ways), {name: [] for name in ways}
    with Bar(what, count + 1) as bar:
        for turn in range(count + 1):
            start = turn % len(names)
            for name in names[start:] + names[:start]:
                given = ways[name]()
                if turn:
                    found[name].append(given)
            bar.update(turn + 1)
    return found


def rounds(target: Target, sizes: Sizes, effort: Effort, context: int, bandwidth: float) -> list[Round]:
    """A plain step, and rounds of bare trees, at one context length."""
    with torch.inference_mode(), tree_attention(target.model), use(True):
        cache = _filled(target, sizes, context, effort.rounds * (sizes.depth + 1) + sizes.nodes[-1])
        drafters = {1: Plain()} | {nodes: Bare(nodes, sizes.depth, target.device) for nodes in sizes.nodes}
        ways = {nodes: partial(_Way(target, drafter, cache, context).block, effort.rounds) for nodes, drafter in drafters.items()}
        times = _in_turn(f"rounds after {context:,} tokens", ways, effort.blocks)
    # Of the embeddings a forward reads a few rows.
    read = sum(weight.nbytes for name, weight in target.model.named_parameters() if "embed_tokens" not in name)
    floor = (read + 2 * target.num_layers * sizes.kv_heads * context * sizes.dim * sizes.dtype.itemsize) / bandwidth
    medians = {nodes: statistics.median(found) for nodes, found in times.items()}
    names = {nodes: f"{WATERMARK} round of {nodes} nodes after {context:,}" for nodes in times} | {1: f"plain step after {context:,}"}
    return [
        Round(names[nodes], context, nodes, seconds, seconds / medians[1], ASKED.get((nodes, context)), floor)
        for nodes, seconds in medians.items()
    ]


def decoding(target: Target, sizes: Sizes, effort: Effort, what: str, drafter: DrafterModel) -> Decoded:
    """Decoding with a drafter against plain decoding, in turn, behind the same prefix; the prefix itself is not timed."""
    context = sizes.contexts[0]
    room = effort.new_tokens + 3 * (drafter.max_depth + 1) + sizes.nodes[-1]
    with torch.inference_mode(), tree_attention(target.model), use(True):
        cache = _filled(target, sizes, context, room)
        drafter.bind(target, 1, context + room)
        features = torch.randn(1, context, len(drafter.taps) + 1, target.hidden_size, dtype=sizes.dtype, device=target.device)
        prefix = NodeOutput(features[:, :, 0], features[:, :, 1:] if drafter.taps else None)
        begin = partial(drafter.start, [0], [[1] * (context + 1)], prefix)
        ways = {"plain": _Way(target, Plain(), cache, context), "drafted": _Way(target, drafter, cache, context, begin)}
        found = _in_turn(what, {name: partial(way.decode, effort.new_tokens) for name, way in ways.items()}, effort.repeats)
        parts = _Way(target, drafter, cache, context, begin, parted=True).parts(effort.rounds)
    seconds, tokens, count = (sum(column) for column in zip(*found["drafted"], strict=True))
    tau = tokens / count
    plain, ours = ([spent / made for spent, made, _ in found[name]] for name in ways)
    speedup = statistics.median(one / other for one, other in zip(plain, ours, strict=True))
    profile_tau = expected(drafter.tree_spec.parents.tolist(), PROFILE) if isinstance(drafter.tree_spec, StaticTree) else None
    return Decoded(what, tau, profile_tau, seconds / count, speedup, speedup / tau, ASKED_EFFICIENCY, parts)


def rival(target: Target, effort: Effort) -> Rival:
    """Our plain decoding against transformers' `generate` with a static cache, which it compiles on a GPU: prompt and answer, in turn."""
    prompt = torch.randint(target.vocab_size, (effort.prompt,), generator=torch.Generator().manual_seed(0)).tolist()
    case = interleaved.Case(Prompt("random", "random", ""), prompt, 0)
    runners = {
        "ours": interleaved.ours(Decoder(target, kernels=True), Sampling(), effort.new_tokens),
        "theirs": interleaved.transformers(target, effort.new_tokens, cache_implementation="static"),
    }
    what, turns = "plain decoding over generate with a compiled static cache", []
    with Bar(what, effort.repeats) as bar:
        for done, (_, turn) in enumerate(interleaved.take_turns(runners, [[case]] * effort.repeats), 1):
            turns.append(turn)
            bar.update(done)
    # No stop token: all answers are as long.
    ours, theirs = (effort.new_tokens * len(turns) / sum(turn[name].seconds for turn in turns) for name in runners)
    ratio = statistics.median(turn["theirs"].seconds / turn["ours"].seconds for turn in turns)
    return Rival(what, ours, theirs, ratio, 1.0)


def run(report: Report, sizes: Sizes, effort: Effort, device: torch.device, time: bench_kernels.Timer = bench_kernels.timer) -> None:
    """All parts into the report; one that fails leaves a line in report.found["failed"], and the next begins."""
    from triton.errors import TritonError

    report.found["failed"] = failed = {}

    def part(name: str, call: Callable[[], Any]) -> Any:
        """What it gives; None where it failed."""
        try:
            return call()
        except (RuntimeError, ValueError, TritonError) as error:  # memory, compilers, a kernel that is wrong here
            failed[name] = " ".join(str(error).split())[:300] or type(error).__name__
            report.say(f"failed: {name}: {failed[name]}")
            report.write()
        finally:
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()

    def add(section: str, lines: Sequence[Any]) -> None:
        report.add(section, lines)
        report.say(*lines)

    part("kernels", lambda: bench_kernels.run(report, sizes, device, time))
    target = part("target", lambda: llama(sizes, device)) if "ceilings" in report.found else None
    if target is None:
        return
    bandwidth = report.found["ceilings"]["copy_bytes_per_s"]
    report.found["synthetic_profile"] = PROFILE
    for context in sizes.contexts:
        part(f"rounds after {context}", lambda context=context: add("rounds", rounds(target, sizes, effort, context, bandwidth)))
    # Before the drafters: their taps hang hooks on the layers, which a compiler would see.
    part("plain", lambda: add("plain", [rival(target, effort)]))
    # Each level reads the head again: fewer may be worth more.
    shallow = partial(eagle, depth=3)
    for make, what in ((medusa, "Medusa with a static tree"), (eagle, "EAGLE-3 with a dynamic tree"), (shallow, "EAGLE-3, three deep,")):
        whole = f"{WATERMARK} acceptance: {what} of {sizes.nodes[-1]} nodes after {sizes.contexts[0]:,}"
        part(what, lambda make=make, whole=whole: add("decoding", [decoding(target, sizes, effort, whole, make(target, sizes))]))


def main(out: Path | None, as_json: bool) -> None:
    """`draftsmith bench --kernels`. Exits with 1 where a part failed. Raises ValueError where there is no GPU or no Triton."""
    reason = bench_kernels.refusal()
    if reason:
        raise ValueError(f"bench --kernels: {reason}")
    report = Report(out, as_json, {"device": torch.cuda.get_device_name(), "torch": torch.__version__})
    try:
        run(report, Sizes(), Effort(), torch.device("cuda"))
    finally:  # also what an interrupted run had
        if as_json:
            print(report.text(), flush=True)
    if report.found["failed"]:
        raise SystemExit(1)
