"""What every method does before and after its loop: the target, a fresh drafter and the data; then the folder to publish."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from draftsmith.data import capture, feature_dataset, prompts
from draftsmith.data.corpus import Corpus
from draftsmith.data.feature_dataset import FeatureDataset
from draftsmith.data.features import FeatureStore, Index
from draftsmith.data.packing import PackedDataset, keeps_apart
from draftsmith.data.prepare import load
from draftsmith.eval.loading import dtype_of, encode, tree_spec_from_options
from draftsmith.inference import machine
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.drafter import Drafter
from draftsmith.inference.kernels import missing
from draftsmith.inference.sampler import Sampling
from draftsmith.models.drafter import DrafterModel, new_drafter
from draftsmith.models.parallel import COLLECTIVE
from draftsmith.models.target import Target
from draftsmith.train.engine import processes
from draftsmith.train.recipe import Recipe


def new_drafter_and_data(
    recipe: Recipe, method: str, target: Target, corpora: dict[str, Corpus], *, reads: tuple[int, ...] = (), **architecture: Any
) -> tuple[DrafterModel, PackedDataset | FeatureDataset, PackedDataset | FeatureDataset]:
    """A drafter for the target, and its training and held-out rows; `reads` are the taps of the target that it needs."""
    torch.manual_seed(recipe.train.seed)
    drafter = new_drafter(method, target, training={"positions": recipe.data.seq_len}, **architecture)
    tree = recipe.tree
    if tree.depth or tree.width or tree.nodes:
        chain = tree.width == 1
        drafter.tree_spec = tree_spec_from_options(
            "chain" if chain else "dynamic", drafter, tree.depth, None if chain else tree.width, tree.nodes
        )
    train, valid = datasets(recipe, target, corpora, reads)
    if isinstance(train, FeatureDataset):
        drafter.config.target["dtype"] = train.store.index.target.dtype  # the precision that its features had
    return drafter, train, valid


def datasets(
    recipe: Recipe, target: Target, corpora: dict[str, Corpus], reads: tuple[int, ...] = ()
) -> tuple[PackedDataset | FeatureDataset, PackedDataset | FeatureDataset]:
    """Training and held-out rows, with the target's features where they are stored."""
    section = recipe.features
    if section.mode == "online":
        target.mask_blocks()
        if recipe.train.compile:
            target.compile()
        return packed_dataset(recipe, target, corpora["train"]), packed_dataset(recipe, target, corpora["valid"])
    store = open_store(recipe, target, reads)
    found = []
    for part in ("train", "valid"):
        corpus, cached = corpora[part], section.mode == "cache"
        corpus = corpus if cached else feature_dataset.available(corpus, store, section.allow_missing)
        found.append(FeatureDataset(packed_dataset(recipe, target, corpus), store, reads, computing=cached))
    return found[0], found[1]


def load_target_and_data(recipe: Recipe) -> tuple[Target, dict[str, Corpus]]:
    """The recipe's target, and its data as corpora "train" and "valid" (rank 0 makes them, the others read what it wrote).

    Raises:
        ValueError: a target that cannot be laid out or quantised so, keys that do not go together with that, or kernels that cannot run.
    """
    machine.threads()
    state = processes.join()
    section, data = recipe.target, recipe.data
    _check_layout(recipe)
    if recipe.train.kernels and (reason := missing(torch.device(str(state.device)))):
        raise ValueError(f"train.kernels=true: {reason}; leave it out")
    target = Target.load(
        section.path,
        dtype=dtype_of(section.dtype),
        device=str(state.device),
        revision=section.revision,
        trust_remote_code=section.trust_remote_code,
        parallel=section.parallel,
        quantise=section.quantise,
    )
    if target.tokenizer is None:
        raise ValueError(f"target {section.path!r} has no tokenizer beside its weights; copy tokenizer.json there")
    if len(target.tokenizer) > target.vocab_size:
        raise ValueError(
            f"the tokenizer of {section.path!r} has {len(target.tokenizer)} entries, its model only {target.vocab_size} logits; "
            "they do not belong together: copy the model's own tokenizer there"
        )
    if data.seq_len > target.max_positions:
        raise ValueError(f"data.seq_len={data.seq_len} is longer than the target's context of {target.max_positions}; lower it")
    data.give_template(target.tokenizer)
    with state.main_process_first():
        return target, load(data.plan(), target.tokenizer, data.cache, data.num_proc)


def _check_layout(recipe: Recipe) -> None:
    """Whether all ranks would run the target equally often, where they have to, and nobody reads weights that are cut or quantised."""
    section, student, distill = recipe.target, getattr(recipe, "student", None), getattr(recipe, "distill", None)
    together = f"target.parallel={section.parallel}" if section.parallel in COLLECTIVE else ""
    if together and recipe.features.mode == "cache":
        raise ValueError(
            f"features.mode=cache runs the target when a process lacks something, under {together} all must run it at once; "
            "take features.mode=online, or capture first and take offline"
        )
    if together and distill and distill.rejections:
        raise ValueError(
            f"distill.rejections={distill.rejections} lets processes decode with the target apart, under {together} all must run it at once; "
            "take distill.on_policy, or target.parallel=none"
        )
    changed = together or (f"target.quantise={section.quantise}" if section.quantise else "")
    if changed and student and student.start == "pruned":
        raise ValueError(
            f"student.start=pruned takes whole layers of the target, under {changed} there are none; "
            "give a student as student.start, such as the `start` folder of a run without it"
        )


def packed_dataset(recipe: Recipe, target: Target, corpus: Corpus) -> PackedDataset:
    """The rows of a corpus; one sample each where the recipe says so. Raises ValueError where the target cannot keep packed documents apart."""
    data = recipe.data
    if data.pack and not keeps_apart(target):
        raise ValueError(f"target {target.name!r} attends from one packed document to another; train it with data.pack=false")
    return PackedDataset(corpus, data.seq_len, recipe.train.seed, one_each=not data.pack, all_count=recipe.train.normalise == "all")


def open_store(recipe: Recipe, target: Target, taps: tuple[int, ...]) -> FeatureStore:
    """The recipe's feature store, to be read; in mode cache an empty one is begun where there is none."""
    section, state = recipe.features, PartialState()
    if section.store is None:
        raise ValueError(f"features.mode={section.mode} needs features.store, the folder of the store")
    cached = section.mode == "cache"
    if cached and state.is_main_process:
        there = Index.read(Path(section.store))
        capture.begin(Path(section.store), there or Index.of(target, section.taps or taps, section.precision), target)
    state.wait_for_everyone()
    return FeatureStore(section.store, target, taps, allow_missing=cached or section.allow_missing, show=state.is_main_process)


def fingerprint(target: Target, train: PackedDataset | FeatureDataset) -> dict[str, Any]:
    """What a run must find again to be continued: its data, its target, and where its features come from."""
    identity = target.identity
    found: dict[str, Any] = {"data": train.key, "target's config": identity.config_hash, "target's tokenizer": identity.tokenizer_hash}
    if isinstance(train, FeatureDataset):
        found |= {"features' precision": train.store.index.precision, "features' samples": len(train.packed.corpus.picks)}
    return found


def tau_probe(recipe: Recipe, target: Target, drafter: Drafter, positions: int | None = None) -> Callable[[], float] | None:
    """A function that measures τ itself on train.tau_prompts prompts of each domain; None where there are to be none.

    positions: that the drafter has, where it has a limit of its own. Where the target is `collective` all ranks must call what is returned.
    Raises ValueError for prompts that leave no room.
    """
    section = recipe.train
    if not section.tau_prompts:
        return None
    asked = [encode(target, prompt) for prompt in prompts.load(section.tau_file, section.tau_prompts)]
    longest, room = max(map(len, asked)) + section.tau_tokens, min(target.max_positions, positions or target.max_positions)
    if longest > room:
        raise ValueError(
            f"the longest prompt for τ and train.tau_tokens={section.tau_tokens} make {longest} positions, there are {room}; "
            "lower it, or give shorter prompts: train.tau_file"
        )

    def tau() -> float:
        sampling = Sampling(temperature=section.tau_temperature)
        done = Decoder(target, drafter, slots=min(8, len(asked))).generate(asked, sampling, section.tau_tokens)
        return sum(len(answer.tokens) for answer in done) / sum(len(answer.rounds) for answer in done)

    return tau


def monitors(recipe: Recipe, target: Target, drafter: Drafter, taps: tuple[int, ...] = (), positions: int | None = None) -> dict[str, Any]:
    """What `loop.fit` measures beside the loss: τ, and the time of the target's forward where it runs."""
    return {
        "probe": tau_probe(recipe, target, drafter, positions),
        "together": recipe.target.parallel in COLLECTIVE,
        "reference": partial(target.features, taps=taps) if recipe.features.mode == "online" else None,
    }
