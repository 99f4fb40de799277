"""Measure one drafter: choose its draft tree on half of the prompts, decode the other half with it and plainly, and record all of it."""

import hashlib
import platform
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from draftsmith.data.prompts import Prompt, hash_of
from draftsmith.eval import cost, drift, probe, sanity, trees
from draftsmith.eval.answers import EncodedPrompt, encode_prompts
from draftsmith.eval.decoding import decode
from draftsmith.eval.positions import record_positions
from draftsmith.eval.record_store import RecordStore
from draftsmith.eval.records import PromptRecord, Records
from draftsmith.eval.report import round_cost
from draftsmith.eval.settings import Settings, label, without_rule
from draftsmith.eval.supersets import MOST_NODES, record_supersets
from draftsmith.inference import exact, machine
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.expand import DynamicTree, parse_tree_spec, tree_config
from draftsmith.inference.rule_names import USUAL_RULE
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.string_matching import StringMatching
from draftsmith.inference.tree import StaticTree
from draftsmith.models import ranks
from draftsmith.models.feature_drafter import PairDrafter
from draftsmith.models.target import Target

LIBRARIES = ("draftsmith", "torch", "transformers")


def evaluate_drafter(
    target: Target,
    drafter: Any,
    prompts: list[Prompt],
    settings: Settings,
    store: RecordStore | None = None,
    named: dict[str, str] | None = None,
    original: Callable[[], Target] | None = None,
) -> Records:
    """Measure acceptance and speed. With `settings.choose` the drafter keeps the chosen tree.

    Args:
        target: of the drafter.
        drafter: to be measured.
        prompts: of all domains.
        settings: how.
        store: keeps the records while they come, and has those of a run that was stopped; None keeps them in memory.
        named: what the header says of the drafter besides its method, such as its name and hash.
        original: loads an adapted target without its adapters, to measure the drift from it; None: that is not measured.

    Raises:
        ValueError: no prompt that fits the context, or too few to choose a tree.
    """
    if settings.exact:
        exact.check(target, settings.exact, settings.max_nodes if settings.choose else drafter.max_nodes)
    encoded, skipped = encode_prompts(target, prompts, settings.max_new_tokens)
    choosing, reported = _halves(encoded) if settings.choose else ([], encoded)
    if isinstance(drafter, DraftModel):
        drafter.check(max(len(prompt.ids) for prompt in encoded) + settings.max_new_tokens)
    header = {
        "target": target.identity.to_dict(),
        "drafter": {"method": drafter.method, **(named or {}), "bytes": _bytes(drafter)},
        "settings": _settings(target, drafter, settings),
        "prompts": {"count": len(encoded), "hash": hash_of(prompts), "template_hash": _template_hash(target)},
        "skipped": skipped,
        # Every rank takes the first one's, since the finished file has one header.
        "machine": ranks.agreed(_machine(target)),
        "versions": ranks.agreed({"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}}),
    }
    with (store or RecordStore()).opened(header) as store:
        store.append_prompts(_prompt_records(target, encoded))
        if original and target.identity.adapter_hash and not store.records().drift:
            main = ranks.state().is_main_process
            measured = drift.measure(original(), target, encoded, settings.max_new_tokens) if main else {}
            store.append([{"kind": "drift", **ranks.agreed(measured)}])
        records = _record_tree(target, drafter, encoded, {prompt.index for prompt in choosing}, settings, store)
        drafter.tree_spec = parse_tree_spec(records.tree["tree"])
        for sampling in settings.samplings:
            decode(target, drafter, reported, sampling, settings, store)
        store.gather()
        if ranks.state().is_main_process:
            store.finish([prompt.prompt.id for prompt in encoded], settings.labels)
        return store.records()


def _prompt_records(target: Target, prompts: list[EncodedPrompt]) -> list[PromptRecord]:
    marks = sanity.templated(target.tokenizer, [prompt.prompt for prompt in prompts])
    return [PromptRecord(each.prompt.id, each.ids, marks.get(each.prompt.id, ""), bool(each.continuation)) for each in prompts]


def _record_tree(
    target: Target, drafter: Any, prompts: list[EncodedPrompt], choosing: set[int], settings: Settings, store: RecordStore
) -> Records:
    """Measure what a round costs, record positions and choose the tree by them, unless a run that was stopped has done it."""
    records = store.records()
    context = statistics.median_low([len(prompt.ids) for prompt in prompts]) + settings.max_new_tokens // 2
    reported = [prompt.ids[-context:] for prompt in prompts if prompt.index not in choosing]
    if not records.forward:
        forward = ranks.agreed(cost.measure_forward(target, context, max(settings.max_nodes, drafter.max_nodes)))
        with _complete_trees(drafter):
            drafting = ranks.agreed(cost.measure_drafting(target, drafter, reported[:4]))
        store.append([{"kind": "cost", "forward": forward, "drafting": drafting}])
    if settings.probe_s and not records.load:
        store.append([{"kind": "load", **ranks.agreed(_load(target, drafter, reported, context, settings))}])
    if settings.choose:
        texts: dict[str, Sampling] = {}  # the target's own text does not depend on the rule
        for sampling in sorted(settings.samplings, key=lambda sampling: sampling.rule != USUAL_RULE):
            texts.setdefault(without_rule(label(sampling)), sampling)
        for sampling in texts.values():
            record_positions(target, drafter, prompts, choosing, sampling, settings.max_new_tokens, store)
        store.gather()
    records = store.records()
    if not records.tree:
        if settings.choose:
            drafter.tree_spec = StaticTree.from_paths(_chosen_paths(records, settings))
        tree = {"tree": tree_config(drafter.tree_spec), "nodes": drafter.max_nodes, "depth": drafter.max_depth}
        store.append([{"kind": "tree", **ranks.agreed(tree)}])
    spec = drafter.tree_spec
    if isinstance(spec, DynamicTree) and spec.candidates <= MOST_NODES and hasattr(drafter, "position_logits"):
        with _complete_trees(drafter):
            record_supersets(target, drafter, prompts, settings.samplings[0], settings.max_new_tokens, store)
        store.gather()
    return store.records()


def _load(target: Target, drafter: Any, prompts: list[list[int]], context: int, settings: Settings) -> dict[str, Any]:
    """What rounds cost at several batches, that of the evaluation among them, and at this context and four times as much."""
    contexts = sorted({min(each, target.max_positions - settings.max_nodes - 1) for each in (context, 4 * context)})
    batches = sorted({settings.slots, *(probe.GPU_BATCHES if target.device.type == "cuda" else probe.BATCHES)})
    options: dict[str, Any] = {"batches": batches, "kernels": settings.kernels, "seconds": settings.probe_s}
    return probe.measure(target, drafter, prompts, settings.samplings[0], contexts, settings.max_nodes, **options)


def _chosen_paths(records: Records, settings: Settings) -> list[trees.Path]:
    """The draft tree as rank paths, by the positions of the first setting on the prompts that choose."""
    choosing = records.positions_at(settings.labels[0], choosing=True)
    if settings.choose == "largest":
        return trees.best_first_paths(choosing, settings.max_nodes - 1)
    relative, most = round_cost(records)
    return trees.best_tree(choosing, relative, min(settings.max_nodes, most))


def _settings(target: Target, drafter: Any, settings: Settings) -> dict[str, Any]:
    """What the header says of how the numbers are made."""
    entries = {
        "max_new_tokens": settings.max_new_tokens,
        "samplings": settings.labels,
        "positions": target.max_positions,
        "dtype": str(target.dtype).removeprefix("torch."),
        "tree": settings.choose or tree_config(drafter.tree_spec),
        "max_nodes": settings.max_nodes,
        "slots": settings.slots,
        "timed": settings.timed,
        "adaptive_depth": settings.adaptive_depth,
        "policy": [[each.largest, each.tree.max_depth] for each in settings.policy.entries] if settings.policy else None,
        "kernels": settings.kernels,
        "exact": settings.exact,
    }
    if settings.load_aware:
        entries["load_aware"] = True
    if stop := getattr(drafter, "stop", None):
        entries["stop"] = str(stop)
    drafting = getattr(drafter, "trained", drafter)
    if isinstance(drafting, DraftModel | PairDrafter) and drafting.window:  # the window of `lookahead` is no KV window
        entries["draft_window"] = drafting.window
    return entries


def _bytes(drafter: Any) -> int:
    """Bytes of the drafter's own weights; of a hybrid, of the trained drafter."""
    drafter = getattr(drafter, "trained", drafter)
    model = drafter.model.model if isinstance(drafter, DraftModel | StringMatching) else drafter
    return sum(each.numel() * each.element_size() for each in model.parameters()) if isinstance(model, nn.Module) else 0


def _machine(target: Target) -> dict[str, Any]:
    """What the times depend on."""
    gpu = target.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(target.device) if gpu else machine.processor(),
        "driver": f"CUDA {torch.version.cuda}" if gpu else "",
        "system": platform.platform(),
        "threads": torch.get_num_threads(),
        "ranks": ranks.count(),
    }


def _template_hash(target: Target) -> str:
    """SHA-256 of the target's chat template; "" without one."""
    template = getattr(target.tokenizer, "chat_template", None)
    return hashlib.sha256(str(template).encode()).hexdigest() if template else ""


@contextmanager
def _complete_trees(drafter: Any) -> Iterator[None]:
    """Within it a drafter drafts its complete tree, without its rule that stops: position records stop nowhere, so their cost must not."""
    stop = getattr(drafter, "stop", None)
    if stop is None:
        yield
        return
    drafter.stop = None
    try:
        yield
    finally:
        drafter.stop = stop


def _halves(prompts: list[EncodedPrompt]) -> tuple[list[EncodedPrompt], list[EncodedPrompt]]:
    """Every second conversation of each domain is for choosing the tree, the rest for the report. A domain's only one is reported."""
    domains: dict[str, dict[int, list[EncodedPrompt]]] = {}
    for prompt in prompts:
        domains.setdefault(prompt.prompt.domain, {}).setdefault(prompt.conversation, []).append(prompt)
    choosing, reported = [], []
    for conversations in domains.values():
        for number, turns in enumerate(conversations.values()):
            (reported if number % 2 or len(conversations) == 1 else choosing).extend(turns)
    if not choosing:
        raise ValueError("one prompt of a domain is too few: half of them choose the tree, the others are reported; give more, or --tree")
    return choosing, reported
