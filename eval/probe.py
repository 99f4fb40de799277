"""Probes of what rounds cost at several loads: batches B, contexts C, nodes N. They feed the load model (eval/load.py).

Verifying is timed in the decoder's own rounds, kernels and CUDA graphs included, on a cache of C positions that no prompt has filled: what is
in them costs nothing. Drafting and the rest of a round are timed in real decoding of prompts. Whatever is compared takes turns, since other
processes disturb the clock.

Letters: B slots · C context length · N nodes with the root · K draft depth.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch

from draftsmith.eval.cost import SIZES
from draftsmith.eval.roofline import ModelSize
from draftsmith.eval.settings import label
from draftsmith.inference.attention import tree_attention
from draftsmith.inference.cache import TreeCache
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.drafter import Plain, RoundContext
from draftsmith.inference.expand import TreeSpec, tree_config
from draftsmith.inference.graph_rounds import GraphRunner, refusal
from draftsmith.inference.kernels import use
from draftsmith.inference.memory import free_memory
from draftsmith.inference.packed_linear import packed_weights
from draftsmith.inference.rounds import EagerRunner, verify_round
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import DraftTree, StaticTree
from draftsmith.models.drafter import default_paths
from draftsmith.models.target import Target

BATCHES, GPU_BATCHES = (1, 2, 4, 8), (1, 2, 4, 8, 16, 32, 64)
LEAST, MOST = 3, 40  # times of a round
ROUNDS, WARM_UP = 18, 2  # of real decoding
PROMPT = 64  # tokens of a prompt before them
FOR_VERIFYING = 0.7  # share of the time


def measure(
    target: Target,
    drafter: Any,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    contexts: Sequence[int],
    max_nodes: int,
    *,
    batches: Sequence[int] = (),
    kernels: bool = False,
    seconds: float = 60.0,
) -> dict[str, Any]:
    """Time the parts of rounds at every batch and context.

    Args:
        target: the target.
        drafter: of these trees are drafted: a chain of one node, a deeper one, a tree, and the drafter's own.
        prompts: token ids of prompts; for drafting.
        sampling: how tokens are drawn. Penalties and constraints are left out.
        contexts: C of verifying.
        max_nodes: N at most, or that of the drafter's own tree if it is larger.
        batches: B; by default up to 8 on a CPU and up to 64 on a GPU.
        kernels: rounds with the Triton kernels, as CUDA graphs where that is possible.
        seconds: about how long it may take. What does not fit is left out, which the record says; each first cell is always measured.

    Returns:
        The record of kind "load": kernels, graphs, sampling, took_s, left_out; verify: entries of batch, context, nodes, seconds [repeats];
        rounds: entries of batch, tree, depth, nodes, draft, verify, other [rounds] and plain, plain_other of plain rounds between them;
        prefill_s_per_token of plain and drafted; kv_bytes of a token for target and drafter; size: a `roofline.ModelSize` of the target;
        recurrent: the drafter's weights are read once for each level, else once a round.
    """
    began, max_nodes = time.perf_counter(), max(2, max_nodes, drafter.max_nodes)
    batches = sorted(set(batches) or set(GPU_BATCHES if target.device.type == "cuda" else BATCHES))
    sampling = replace(sampling, repetition_penalty=1.0, constraint=None, rule="target-sample")
    record: dict[str, Any] = {"kernels": kernels, "sampling": label(sampling), "left_out": [], "verify": [], "rounds": []}
    with torch.inference_mode(), tree_attention(target.model), use(kernels), packed_weights():
        until = began + FOR_VERIFYING * seconds
        record |= _measure_verifying(target, drafter.taps, sampling, contexts, max_nodes, batches, until, record)
        prefill = {"plain": [0.0, 0], "drafted": [0.0, 0]}
        specs = list(_specs(drafter))
        for batch in dict.fromkeys((batches[0], batches[-1])):
            for spec in specs:
                if batch > batches[0] and time.perf_counter() - began > seconds:
                    record["left_out"].append(f"drafting a tree of {spec.num_nodes} nodes for {batch}")
                    continue
                record["rounds"].append(_measure_rounds(target, drafter, spec, prompts, sampling, batch, kernels, prefill))
    record["prefill_s_per_token"] = {name: took / max(1, tokens) for name, (took, tokens) in prefill.items()}
    record["kv_bytes"]["drafter"] = _drafter_bytes(drafter)
    record["recurrent"] = bool(getattr(getattr(drafter, "trained", drafter), "recurrent", False))
    record["size"] = asdict(_model_size(target, record["kv_bytes"]["target"]))
    record["took_s"] = time.perf_counter() - began
    return record


def _measure_verifying(
    target: Target,
    taps: tuple[int, ...],
    sampling: Sampling,
    contexts: Sequence[int],
    max_nodes: int,
    batches: Sequence[int],
    until: float,
    record: dict[str, Any],
) -> dict[str, Any]:
    """Enter verifying into the record, and return what else was learned: graphs, kv_bytes."""
    sizes = [size for size in SIZES if size < max_nodes] + [max_nodes]
    contexts = sorted({max(1, min(context, target.max_positions - max_nodes - 1)) for context in contexts})
    scripted = _Scripted(max_nodes, taps, target)
    trial = TreeCache(1, 1 + max_nodes, target.device)
    _Runner(target, scripted, trial, sampling).seconds(1, 1, 0)
    free, graphs, last = free_memory(target.device), True, 0.0
    cells = sorted(((batch, context) for batch in batches for context in contexts), key=lambda cell: (cell[0] * cell[1], cell))
    for number, (batch, context) in enumerate(cells):
        capacity = context + 2 * max_nodes
        left = until - time.perf_counter()
        needed = trial.bytes_per_token * batch * capacity
        if needed > free / 2 or (number and last * LEAST > max(left, 0.0)):
            reason = "memory" if needed > free / 2 else "time"
            record["left_out"].append(f"verifying for {batch} at a context of {context}: no {reason}")
            continue
        runner = _Runner(target, scripted, TreeCache(batch, capacity, target.device), sampling)
        times: dict[int, list[float]] = {size: [] for size in sizes}
        share, started = left / (len(cells) - number), time.perf_counter()
        repeat, spent = 0, 0.0
        for repeat in range(MOST + 1):
            for size in sizes if repeat % 2 else reversed(sizes):
                seconds = runner.seconds(batch, context, size - 1)
                if repeat:  # the first pass warms up
                    times[size].append(seconds)
            spent = time.perf_counter() - started
            if repeat >= LEAST and spent * (repeat + 2) / (repeat + 1) > share:
                break
        last = 2 * spent / (repeat + 1)  # of the next cell, which is up to twice as large
        graphs = runner.graphs
        record["verify"] += [{"batch": batch, "context": context, "nodes": size, "seconds": times[size]} for size in sizes]
    return {"graphs": graphs, "kv_bytes": {"target": trial.bytes_per_token}}


class _Scripted(Plain):
    """Proposes a chain of random tokens as deep as the round asks for, at no cost, and learns nothing. The target's taps are the drafter's."""

    def __init__(self, max_nodes: int, taps: tuple[int, ...], target: Target) -> None:
        self.taps, self.max_nodes, self.max_depth = taps, max_nodes, max_nodes - 1
        generator = torch.Generator().manual_seed(0)
        self._children = torch.randint(target.vocab_size, (1, self.max_depth, 1), generator=generator).to(target.device)
        self._chain = StaticTree.chain(self.max_depth).to(target.device)

    def propose(self, round: RoundContext) -> DraftTree:
        return self._chain.cut(round.depth).tree(round.last_tokens, self._children.expand(len(round.last_tokens), -1, -1))


class _Runner:
    """Rounds of a scripted drafter on a cache whose rows always have the same length."""

    def __init__(self, target: Target, drafter: _Scripted, cache: TreeCache, sampling: Sampling) -> None:
        self.target, self.cache = target, cache
        self.graphs = not refusal(target, drafter, sampling, False)
        if self.graphs:
            self.runner: GraphRunner | EagerRunner = GraphRunner(target, drafter, cache, sampling, verify_round, True)
        else:
            self.runner = EagerRunner(target, drafter, cache, sampling, None, self._clock)
        slots = list(range(cache.rows))
        self.runner.assign(slots, [slot % target.vocab_size for slot in slots], slots)

    def _clock(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()

    def seconds(self, batch: int, context: int, depth: int) -> float:
        """Of verifying one round, verdict and its transfer to the host included."""
        self.cache.static_shape = False
        self.cache.reset()
        self.cache.select(range(batch))
        self.cache.advance([context] * batch)
        round = self.runner.enqueue(depth)
        round.result()
        return round.seconds(0.0)[1]


def _specs(drafter: Any) -> Iterator[TreeSpec]:
    """The trees whose drafting is timed. A look-up takes what its text gives: its own tree says it all."""
    yield drafter.tree_spec
    if hasattr(drafter, "position_features"):
        deep = min(4, drafter.depth_limit)
        specs = [StaticTree.chain(1), StaticTree.chain(deep), StaticTree.from_paths(default_paths(deep))]
        yield from {str(tree_config(spec)): spec for spec in specs if tree_config(spec) != tree_config(drafter.tree_spec)}.values()


def _measure_rounds(
    target: Target,
    drafter: Any,
    spec: TreeSpec,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    batch: int,
    kernels: bool,
    prefill: dict[str, list[Any]],
) -> dict[str, Any]:
    """Decode plainly and with the drafter's tree, a round in turn, and enter the seconds and tokens of prefill."""
    new = ROUNDS * (spec.max_depth + 1)
    longest = max(1, min(PROMPT if hasattr(drafter, "position_features") else 4 * PROMPT, target.max_positions - new))
    ids = [list(prompts[number % len(prompts)])[-longest:] for number in range(batch)]
    record: dict[str, Any] = {"batch": batch, "tree": tree_config(spec), "depth": spec.max_depth}
    rounds: dict[str, list[Any]] = {"plain": [], "drafted": []}
    with _tree(drafter, spec):
        options: dict[str, Any] = {"slots": batch, "timed": True, "kernels": kernels}
        decoders = {"plain": Decoder(target, **options), "drafted": Decoder(target, drafter, **options)}
        streams = {name: decoder.stream(ids, sampling, new, stop_ids=()) for name, decoder in decoders.items()}
        for _ in range(ROUNDS):
            for name, stream in streams.items():
                rounds[name].append([step.round for step in next(stream, ())])
        for stream in streams.values():
            stream.close()  # pyright: ignore[reportAttributeAccessIssue]
    for name, decoder in decoders.items():
        prefill[name][0] += decoder.counters.prefill_s
        prefill[name][1] += sum(map(len, ids))
    plain, drafted = ([each for each in rounds[name][WARM_UP:] if len(each) == batch] for name in ("plain", "drafted"))
    for name in ("draft", "verify", "other"):
        record[name] = [getattr(each[0], f"{name}_s") for each in drafted]
    record["nodes"] = sum(max(row.size for row in each) for each in drafted) / max(1, len(drafted))
    return record | {"plain": [each[0].verify_s for each in plain], "plain_other": [each[0].other_s for each in plain]}


@contextmanager
def _tree(drafter: Any, spec: TreeSpec) -> Iterator[None]:
    """Within it the drafter drafts this tree, complete without its rule that stops, unless the tree is its own."""
    own, stop = drafter.tree_spec, getattr(drafter, "stop", None)
    if spec is not own:
        drafter.tree_spec = spec
        if stop:
            drafter.stop = None
    try:
        yield
    finally:
        if spec is not own:
            drafter.tree_spec = own
            if stop:
                drafter.stop = stop


def _model_size(target: Target, kv_bytes: int) -> ModelSize:
    """The target's size. A token goes through all weights but the table of embeddings, which is the head too where they are tied."""
    parameters = {id(each): each for each in target.model.parameters()}
    embeddings, head = target.model.get_input_embeddings().weight, target.model.get_output_embeddings()
    if head is None or embeddings is not head.weight:
        parameters.pop(id(embeddings), None)
    config = target.model.config.get_text_config()
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    flops = 4.0 * config.num_hidden_layers * config.num_attention_heads * dim
    return ModelSize(float(sum(each.numel() for each in parameters.values())), target.dtype.itemsize, kv_bytes, flops)


def _drafter_bytes(drafter: Any) -> int:
    """KV bytes of a token in the drafter's cache, of a hybrid in its trained drafter's; 0 for one without a cache."""
    drafter = getattr(drafter, "trained", drafter)
    states = (getattr(drafter, name, None) for name in ("_state", "_bound_state"))
    caches = (getattr(drafter, "_cache", None), *(getattr(state, "cache", None) for state in states))
    return next((cache.bytes_per_token for cache in caches if isinstance(cache, TreeCache)), 0)
