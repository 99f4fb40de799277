"""Rounds of an 8B-sized Llama with random weights, beside plain steps of the same run: `draftsmith bench --kernels`, on a GPU.

Since nothing is trained, acceptance is synthetic, and every figure that rests on it says so (`benchmarks/synthetic.py`). The cost of a
round is real: the drafter drafts, the target reads the complete tree, and the verdict is computed from the logits before another replaces it.

Letters: N tree nodes with the root · C context length.
"""

import gc
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from draftsmith.data.prompts import Prompt
from draftsmith.eval import interleaved
from draftsmith.eval.answers import EncodedPrompt
from draftsmith.eval.benchmarks import kernels, random_models
from draftsmith.eval.benchmarks.kernels import RunningReport, Sizes
from draftsmith.eval.benchmarks.synthetic import PROFILE, WATERMARK, expected_tau, synthetic
from draftsmith.inference.attention import tree_attention
from draftsmith.inference.cache import TreeCache
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.drafter import Drafter, NodeOutput, Plain, RoundContext
from draftsmith.inference.graph_rounds import GraphRunner, InFlightRound
from draftsmith.inference.kernels import use
from draftsmith.inference.progress import Bar
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import DraftTree, StaticTree
from draftsmith.inference.verify import Verdict
from draftsmith.models.drafter import DrafterModel
from draftsmith.models.target import Target

COST_GOALS = {(64, 2048): 1.20, (64, 32768): 1.35}  # (nodes, context) -> highest relative cost of a round
EFFICIENCY_GOAL = 0.80


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure.

    Attributes:
        blocks: timed blocks of each kind of round.
        rounds: of a block.
        prompt: tokens of the prompt of complete decodings.
        new_tokens: of complete decodings.
        repeats: of complete decodings.
    """

    blocks: int = 25
    rounds: int = 8
    prompt: int = 512
    new_tokens: int = 256
    repeats: int = 5


@dataclass(frozen=True, slots=True)
class RoundTime:
    """The time of a kind of round.

    Attributes:
        what: its name.
        context: C.
        nodes: N; 1 is a plain step.
        seconds: median over the blocks.
        over_plain: relative to the plain step.
        goal: the highest `over_plain` that is acceptable; None for none.
        floor: seconds in which a copy moves the weights and the KV cache that a forward must read.
    """

    what: str
    context: int
    nodes: int
    seconds: float
    over_plain: float
    goal: float | None
    floor: float

    def __str__(self) -> str:
        goal = f" (goal: at most {self.goal:.2f})" if self.goal else ""
        floor = f"{self.floor * 1e3:.3f} ms to copy weights and KV cache, {self.floor / self.seconds:.2f} of it"
        return f"{self.what}: {self.seconds * 1e3:.3f} ms, {self.over_plain:.3f} x plain{goal}; {floor}"


@dataclass(frozen=True, slots=True)
class DecodingTime:
    """Decoding with a drafter.

    Attributes:
        what: its name.
        tau: tokens a round.
        profile_tau: the expected τ of the profile, where every round has the same tree.
        seconds: of a round.
        speedup: over plain decoding, by time per token.
        efficiency: speedup / tau.
        goal: the lowest efficiency that is acceptable.
        parts: seconds of drafting, verifying, learning and committing; empty off a GPU.
    """

    what: str
    tau: float
    profile_tau: float | None
    seconds: float
    speedup: float
    efficiency: float
    goal: float
    parts: dict[str, float]

    def __str__(self) -> str:
        profile = f" (of the profile: {self.profile_tau:.2f})" if self.profile_tau else ""
        total = sum(self.parts.values())
        shares = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in self.parts.items())
        return (
            f"{self.what}: tau {self.tau:.2f}{profile}, round {self.seconds * 1e3:.3f} ms, speedup {self.speedup:.2f} over plain, "
            f"efficiency {self.efficiency:.2f} (goal: at least {self.goal:.2f})" + (f"; {shares}" if shares else "")
        )


@dataclass(frozen=True, slots=True)
class RateOverTransformers:
    """Our plain decoding beside that of transformers.

    Attributes:
        what: its name.
        ours: new tokens per second, the prefill included.
        theirs: likewise.
        ratio: of times, theirs over ours, the median repeat.
        goal: the lowest ratio that is acceptable.
    """

    what: str
    ours: float
    theirs: float
    ratio: float
    goal: float

    def __str__(self) -> str:
        return f"{self.what}: {self.ours:.1f} over {self.theirs:.1f} tokens/s, {self.ratio:.3f} x as fast (goal: at least {self.goal:.2f})"


def _verify(tree: DraftTree, logits: Tensor, round: RoundContext) -> Verdict:
    from draftsmith.inference.kernels.verify import verify

    return verify(tree, logits, round.sampling, round.noise_keys, round.positions, round.depth)


class _Rounds:
    """Rounds of one drafter after a prefix. Verdicts are synthetic, unless nothing is drafted.

    Args:
        target: verifies.
        drafter: drafts.
        cache: holds the prefix. Several of these objects may share it, in turn.
        context: length of the prefix.
        begin: sets the drafter's state to that after the prefix.
        time_parts: time the parts of a round apart.
    """

    def __init__(
        self, target: Target, drafter: Drafter, cache: TreeCache, context: int, begin: Any = None, time_parts: bool = False
    ) -> None:
        verify = synthetic(_verify, PROFILE, target.device) if drafter.max_depth else _verify
        self.runner = GraphRunner(target, drafter, cache, Sampling(), verify, time_parts)
        self.cache, self.depth, self.context, self.begin = cache, drafter.max_depth, context, begin

    def rewind(self) -> None:
        """Go back to the end of the prefix."""
        self.cache.length.fill_(self.context)
        if self.begin:
            self.begin()
        self.runner.assign([0], [1], [0])
        if self.cache.length.is_cuda:  # the drafter's beginning does not count as part of the rounds
            torch.cuda.synchronize(self.cache.length.device)

    def time_block(self, count: int) -> float:
        """Seconds a round, over `count` rounds enqueued one after the other."""
        self.rewind()
        began = perf_counter()
        self.run(count)
        return (perf_counter() - began) / count

    def run(self, count: int) -> list[InFlightRound]:
        """Enqueue `count` rounds and wait for them."""
        pending = [self.runner.enqueue(self.depth) for _ in range(count)]
        pending[-1].result()
        return pending

    def decode(self, new_tokens: int) -> tuple[float, int, int]:
        """Seconds, tokens and rounds of decoding at least `new_tokens`. A round is enqueued before the result of the last is read."""
        self.rewind()
        began, tokens, count = perf_counter(), 0, 0
        pending = deque([self.runner.enqueue(self.depth)])
        while pending:
            if tokens < new_tokens:
                pending.append(self.runner.enqueue(self.depth))
            tokens += pending.popleft().result()[0].length
            count += 1
        return perf_counter() - began, tokens, count

    def part_seconds(self, count: int) -> dict[str, float]:
        """Median seconds of the parts of `count` rounds; empty where they are not timed apart."""
        self.time_block(1)  # captures the graphs
        columns = zip(*(pending.part_seconds() for pending in self.run(count)), strict=True)
        return dict(zip(("drafting", "verifying", "learning", "committing"), map(statistics.median, columns), strict=False))


def _in_turn(what: str, functions: Mapping[Any, Callable[[], Any]], count: int) -> dict[Any, list[Any]]:
    """What each function returns, `count` times, after a warm-up. Each turn starts with the next function."""
    names = list(functions)
    results: dict[Any, list[Any]] = {name: [] for name in names}
    with Bar(what, count + 1) as bar:
        for turn in range(count + 1):
            start = turn % len(names)
            for name in names[start:] + names[:start]:
                result = functions[name]()
                if turn:
                    results[name].append(result)
            bar.update(turn + 1)
    return results


def time_rounds(target: Target, sizes: Sizes, effort: Effort, context: int, bandwidth: float) -> list[RoundTime]:
    """Time a plain step, and rounds that only verify a tree, at one context length. bandwidth: bytes per second of a copy."""
    with torch.inference_mode(), tree_attention(target.model), use(True):
        cache = random_models.random_cache(target, sizes, context, effort.rounds * (sizes.depth + 1) + sizes.nodes[-1])
        drafters: dict[int, Drafter] = {1: Plain()}
        for nodes in sizes.nodes:
            drafters[nodes] = random_models.BareTree(nodes, sizes.depth, target.device)
        blocks = {nodes: partial(_Rounds(target, drafter, cache, context).time_block, effort.rounds) for nodes, drafter in drafters.items()}
        times = _in_turn(f"rounds after {context:,} tokens", blocks, effort.blocks)
    # A forward reads only a few rows of the embeddings.
    weights = sum(weight.nbytes for name, weight in target.model.named_parameters() if "embed_tokens" not in name)
    kv_bytes = 2 * target.num_layers * sizes.kv_heads * context * sizes.dim * sizes.dtype.itemsize
    medians = {nodes: statistics.median(seconds) for nodes, seconds in times.items()}
    lines = []
    for nodes, seconds in medians.items():
        what = f"{WATERMARK} round of {nodes} nodes after {context:,}" if nodes > 1 else f"plain step after {context:,}"
        goal = COST_GOALS.get((nodes, context))
        lines.append(RoundTime(what, context, nodes, seconds, seconds / medians[1], goal, (weights + kv_bytes) / bandwidth))
    return lines


def time_decoding(target: Target, sizes: Sizes, effort: Effort, what: str, drafter: DrafterModel) -> DecodingTime:
    """Time decoding with a drafter and plain decoding, interleaved, after the same prefix. The prefix itself is not timed."""
    context = sizes.contexts[0]
    extra = effort.new_tokens + 3 * (drafter.max_depth + 1) + sizes.nodes[-1]
    with torch.inference_mode(), tree_attention(target.model), use(True):
        cache = random_models.random_cache(target, sizes, context, extra)
        drafter.bind(target, 1, context + extra)
        features = torch.randn(1, context, len(drafter.taps) + 1, target.hidden_size, dtype=sizes.dtype, device=target.device)
        prefix = NodeOutput(features[:, :, 0], features[:, :, 1:] if drafter.taps else None)
        begin = partial(drafter.start, [0], [[1] * (context + 1)], prefix)
        both = {"plain": _Rounds(target, Plain(), cache, context), "drafted": _Rounds(target, drafter, cache, context, begin)}
        results = _in_turn(what, {name: partial(rounds.decode, effort.new_tokens) for name, rounds in both.items()}, effort.repeats)
        parts = _Rounds(target, drafter, cache, context, begin, time_parts=True).part_seconds(effort.rounds)
    seconds, tokens, count = (sum(column) for column in zip(*results["drafted"], strict=True))
    tau = tokens / count
    per_token = {name: [run_s / run_tokens for run_s, run_tokens, _ in runs] for name, runs in results.items()}
    speedup = statistics.median(plain / drafted for plain, drafted in zip(per_token["plain"], per_token["drafted"], strict=True))
    profile_tau = expected_tau(drafter.tree_spec.parents.tolist(), PROFILE) if isinstance(drafter.tree_spec, StaticTree) else None
    return DecodingTime(what, tau, profile_tau, seconds / count, speedup, speedup / tau, EFFICIENCY_GOAL, parts)


def time_transformers(target: Target, effort: Effort) -> RateOverTransformers:
    """Time our plain decoding and `generate` with a static cache, which it compiles on a GPU: prefill and answer, interleaved."""
    ids = torch.randint(target.vocab_size, (effort.prompt,), generator=torch.Generator().manual_seed(0)).tolist()
    prompt = EncodedPrompt(Prompt("random", "random", ""), ids, 0)
    functions = {
        "ours": interleaved.answer_with_decoder(Decoder(target, kernels=True), Sampling(), effort.new_tokens),
        "theirs": interleaved.answer_with_transformers(target, effort.new_tokens, cache_implementation="static"),
    }
    what = "plain decoding over generate with a compiled static cache"
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    with Bar(what, effort.repeats) as bar:
        for done, (_, timed) in enumerate(interleaved.interleave(functions, [[prompt]] * effort.repeats), 1):
            for name, turn in timed.items():
                seconds[name].append(turn.seconds)
            bar.update(done)
    # Without a stop token all answers have the same length.
    ours, theirs = (effort.new_tokens * len(seconds[name]) / sum(seconds[name]) for name in functions)
    ratio = statistics.median(b / a for a, b in zip(seconds["ours"], seconds["theirs"], strict=True))
    return RateOverTransformers(what, ours, theirs, ratio, 1.0)


def run(report: RunningReport, sizes: Sizes, effort: Effort, device: torch.device, time: kernels.Timer = kernels.timer) -> None:
    """Measure all parts into the report. A part that fails leaves a line in results["failed"], and the next part begins."""
    from triton.errors import TritonError

    report.results["failed"] = failed = {}

    def attempt(name: str, call: Callable[[], Any]) -> Any:
        """What the call returns; None where it fails."""
        try:
            return call()
        except (RuntimeError, ValueError, TritonError) as error:  # memory, compilers, a kernel with wrong results
            failed[name] = " ".join(str(error).split())[:300] or type(error).__name__
            report.say(f"failed: {name}: {failed[name]}")
            report.write()
        finally:
            gc.collect()
            if device.type == "cuda":
                with suppress(RuntimeError):  # after a kernel that failed nothing runs on the device any more, as the next part will say
                    torch.cuda.empty_cache()

    def add(section: str, lines: Sequence[Any]) -> None:
        report.add(section, lines)
        report.say(*lines)

    attempt("kernels", lambda: kernels.run(report, sizes, device, time))
    target = attempt("target", lambda: random_models.llama(sizes, device)) if "limits" in report.results else None
    if target is None:
        return
    bandwidth = report.results["limits"]["copy_bytes_per_s"]
    report.results["synthetic_profile"] = PROFILE
    for context in sizes.contexts:
        attempt(f"rounds after {context}", lambda context=context: add("rounds", time_rounds(target, sizes, effort, context, bandwidth)))
    # Before the drafters: their taps are hooks on the layers, which a compiler would trace.
    attempt("plain", lambda: add("plain", [time_transformers(target, effort)]))
    drafters = {
        "Medusa with a static tree": random_models.medusa,
        "EAGLE-3 with a dynamic tree": random_models.eagle,
        "EAGLE-3, three deep,": partial(random_models.eagle, depth=3),  # each level reads the output head again: fewer may be faster
    }
    for name, make in drafters.items():
        what = f"{WATERMARK} acceptance: {name} of {sizes.nodes[-1]} nodes after {sizes.contexts[0]:,}"
        attempt(name, lambda make=make, what=what: add("decoding", [time_decoding(target, sizes, effort, what, make(target, sizes))]))


def main(out: Path | None, as_json: bool) -> None:
    """`draftsmith bench --kernels`. Exits with 1 where a part failed.

    Raises:
        ValueError: no GPU or no Triton, or a file that could not be written.
    """
    reason = kernels.refusal()
    if reason:
        raise ValueError(f"bench --kernels: {reason}")
    report = RunningReport(out, as_json, {"device": torch.cuda.get_device_name(), "torch": torch.__version__})
    try:
        run(report, Sizes(), Effort(), torch.device("cuda"))
    finally:  # also the results of an interrupted run
        if as_json:
            print(report.text(), flush=True)
    if report.failure:
        raise ValueError(report.failure)
    if report.results["failed"]:
        raise SystemExit(1)
