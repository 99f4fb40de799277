"""What every method does before its loop: the target, an untrained drafter, the data, and what is measured beside the loss."""

import hashlib
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import nn

from draftsmith.data import capture, feature_dataset, prompts
from draftsmith.data.corpus import Corpus
from draftsmith.data.feature_dataset import FeatureDataset
from draftsmith.data.features import FeatureStore, Index
from draftsmith.data.packing import PackedDataset, keeps_apart
from draftsmith.data.prepare import load
from draftsmith.data.prompts import Prompt
from draftsmith.data.report import many_dropped
from draftsmith.eval.loading import DTYPES, chosen_dtype, encode, fastest_dtype, shipped_prompts, tree_spec_from_options
from draftsmith.inference import machine
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.drafter import Drafter
from draftsmith.inference.kernels import missing
from draftsmith.inference.memory import free_memory
from draftsmith.inference.sampler import Sampling
from draftsmith.models import drafter as drafters
from draftsmith.models import vocab
from draftsmith.models.drafter import DrafterConfig, DrafterModel, load_drafter, new_drafter
from draftsmith.models.parallel import COLLECTIVE
from draftsmith.models.target import Target
from draftsmith.models.weights import Header
from draftsmith.train.engine import output, processes, resume
from draftsmith.train.engine.best import MeasureTau
from draftsmith.train.engine.resume import TARGET_DTYPE, TARGET_FILES, TAU_PROMPTS
from draftsmith.train.engine.say import say
from draftsmith.train.recipe import Recipe, TrainSection, TreeSection


def new_drafter_and_data(
    recipe: Recipe, method: str, target: Target, corpora: dict[str, Corpus], **architecture: Any
) -> tuple[DrafterModel, PackedDataset | FeatureDataset, PackedDataset | FeatureDataset]:
    """An untrained drafter for the target, and the training and held-out sequences.

    Args:
        recipe: its seed and its tree are used.
        method: name of an architecture, a file in models/.
        target: the frozen target.
        corpora: "train" and "valid".
        architecture: fields of the architecture's Config.
    """
    kinds = drafters.architecture(method)
    identity = target.identity.to_dict()
    sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size, "target": identity, **architecture}
    check_memory(lambda: kinds.Model(kinds.Config(**sizes)), f"{method}.*", target.device, recipe.train)
    torch.manual_seed(recipe.train.seed)
    drafter = new_drafter(method, target, training={"positions": recipe.data.seq_len}, **architecture)
    set_tree(drafter, recipe.tree, "dynamic")
    train, valid = datasets(recipe, target, corpora, drafter.taps)
    if isinstance(train, FeatureDataset):
        drafter.config.target["dtype"] = train.store.index.target.dtype  # the precision that its features had
    return drafter, train, valid


def set_tree(drafter: Any, tree: TreeSection, usual: str) -> None:
    """Give the drafter the recipe's tree, if it names one. usual: "chain" or "dynamic", where depth or nodes are set and the width is not."""
    if tree.depth or tree.width or tree.nodes:
        kind = usual if tree.width is None else "chain" if tree.width == 1 else "dynamic"
        drafter.tree_spec = tree_spec_from_options(kind, drafter, tree.depth, tree.width if kind == "dynamic" else None, tree.nodes)


def frequent_tokens(train: PackedDataset | FeatureDataset, target: Target, size: int) -> vocab.DraftVocabulary:
    """A draft vocabulary of `size` tokens: the most frequent supervised tokens of an epoch, and the tokens that stop."""
    pieces = train.corpus.tokens_by_domain().values()
    counts = torch.stack([vocab.count(ids, times, target.vocab_size) for ids, times in pieces]).sum(0)
    vocabulary = vocab.choose(counts, size, target.stop_ids)
    share = vocab.coverage(counts, vocabulary).overall
    say(f"draft vocabulary: {size:,} of {target.vocab_size:,} tokens, {share:.2%} of the supervised ones")
    return vocabulary


def start_from(drafter: DrafterModel, path: str, target: Target, key: str) -> None:
    """Copy the weights of another drafter of this target.

    Args:
        drafter: takes the weights.
        path: folder or Hub id of the other one.
        target: of both.
        key: the recipe's, for the error.

    Raises:
        ValueError: the other one has another architecture or other sizes.
    """
    start = load_drafter(path, target)
    names = {field.name for field in fields(drafter.config)} - {field.name for field in fields(DrafterConfig)} | {"model_type"}
    names -= {"confidence", "temperatures", "steps", "block_size", "causal"}  # how it is trained and drafts: no weight's shape or meaning
    differing = sorted(name for name in names if getattr(start.config, name, None) != getattr(drafter.config, name))
    if differing:
        raise ValueError(
            f"{key}={path}: {start.method} differs in {', '.join(differing)}; give a drafter of the same architecture and sizes"
        )
    drafter.load_state_dict(start.state_dict())


def datasets(
    recipe: Recipe, target: Target, corpora: dict[str, Corpus], reads: tuple[int, ...] = ()
) -> tuple[PackedDataset | FeatureDataset, PackedDataset | FeatureDataset]:
    """Training and held-out sequences, with the target's features (taps `reads`) where features.mode is not online."""
    section = recipe.features
    if section.mode == "online":
        target.mask_blocks()
        if recipe.train.compile:
            target.compile()
        return packed_dataset(recipe, target, corpora["train"]), packed_dataset(recipe, target, corpora["valid"])
    store = open_store(recipe, target, reads)
    return feature_data(recipe, target, corpora["train"], store, reads), feature_data(recipe, target, corpora["valid"], store, reads)


def feature_data(recipe: Recipe, target: Target, corpus: Corpus, store: FeatureStore, reads: tuple[int, ...]) -> FeatureDataset:
    """The sequences of a corpus with features from the store; in mode offline only of samples whose features are there."""
    cached = recipe.features.mode == "cache"
    corpus = corpus if cached else feature_dataset.available(corpus, store, recipe.features.allow_missing)
    return FeatureDataset(packed_dataset(recipe, target, corpus), store, reads, computing=cached)


def load_target_and_data(recipe: Recipe, *, training: bool = True) -> tuple[Target, dict[str, Corpus]]:
    """The recipe's target, and its data as corpora "train" and "valid". Rank 0 prepares the data, the others read what it wrote.

    Args:
        recipe: of any method.
        training: False for a capture of features, which needs all layers of the target, and has no run whose keys could be wrong.

    Raises:
        ValueError: a target that cannot be laid out or quantised so, keys that do not go together with that, or kernels that cannot run.
    """
    machine.threads()
    state = processes.join()
    section, data = recipe.target, recipe.data
    check_layout(recipe)
    if training:
        processes.check_weights(recipe.train)
        processes.on_main(lambda: output.check(recipe))
        processes.split_batch(recipe.train, state.num_processes)
        if recipe.train.kernels and (reason := missing(torch.device(str(state.device)))):
            raise ValueError(f"train.kernels=true: {reason}; leave it out")
    dtype = chosen_dtype(section.dtype, lambda: resume.target_dtype_of(recipe.train.output)) if training else section.dtype
    target = Target.load(
        section.path,
        dtype=DTYPES.get(dtype, _training_dtype),
        device=str(state.device),
        revision=section.revision,
        trust_remote_code=section.trust_remote_code,
        parallel=section.parallel,
        quantise=section.quantise,
        layers=not training or recipe.needs_target_layers,
    )
    tokenizer = target.require_tokenizer()
    if len(tokenizer) > target.vocab_size:
        raise ValueError(
            f"the tokenizer of {section.path!r} has {len(tokenizer)} entries, its model only {target.vocab_size} logits; "
            "they do not belong together: copy the model's own tokenizer there"
        )
    if data.seq_len > target.max_positions:
        raise ValueError(f"data.seq_len={data.seq_len} is longer than the target's context of {target.max_positions}; lower it")
    if training:
        _check_micro_batch(recipe, target, processes.split_batch(recipe.train, state.num_processes)[0])
    data.give_template(tokenizer)
    corpora = processes.main_first(lambda: load(data.plan(), tokenizer, data.cache, data.num_proc))
    if state.is_main_process and (line := many_dropped(corpora["train"])):
        say(line)
    return target, corpora


def _training_dtype(stored: dict[str, Header]) -> torch.dtype:
    """`fastest_dtype` of a target whose recipe says auto: the main process measures for all ranks."""
    return fastest_dtype(stored, lambda: processes.on_main(lambda: str(machine.precision())))


def check_layout(recipe: Recipe) -> None:
    """Raises ValueError if some ranks would run a target that all ranks must run at once. A method checks its own keys."""
    section = recipe.target
    if section.parallel in COLLECTIVE and recipe.features.mode == "cache":
        raise ValueError(
            f"features.mode=cache runs the target when a process lacks something, under target.parallel={section.parallel} all must run it "
            "at once; take features.mode=online, or capture first and take offline"
        )


def check_memory(build: Callable[[], nn.Module], keys: str, device: torch.device, section: TrainSection) -> None:
    """Check that a model's weights fit into the memory that is free, and what training adds where a single process holds it all.

    Args:
        build: makes the model; it is called where tensors have no values.
        keys: which of the recipe's decide its size, for the error.
        device: where it will be.
        section: its train.weights and train.optimizer are used.

    Raises:
        ValueError: it does not fit.
    """
    with torch.device("meta"):
        check_parameters(sum(parameter.numel() for parameter in build().parameters()), keys, device, section)


def check_parameters(count: int, keys: str, device: torch.device, section: TrainSection) -> None:
    """`check_memory` for a model of so many parameters."""
    alone = processes.join().num_processes == 1 and not processes.deepspeed()
    trained = (12 if section.weights == "bfloat16" else 16) - (4 if section.optimizer == "muon" else 0)  # bytes, with gradient and state
    needed, free = count * (trained if alone else 4), free_memory(device)
    if needed > free:
        raise ValueError(
            f"{keys}: {count / 1e9:.3g} billion parameters need at least {needed / 1e9:.3g} GB of memory to be trained, "
            f"{free / 1e9:.3g} GB are free; make the model smaller"
        )


def _check_micro_batch(recipe: Recipe, target: Target, micro_batch: int) -> None:
    """Raise ValueError where not even the ids and the last hidden state of a micro-batch fit into the memory that is free."""
    length = recipe.data.seq_len
    needed, free = micro_batch * length * (target.hidden_size * target.dtype.itemsize + 40), free_memory(target.device)
    if needed > free:
        raise ValueError(
            f"train.micro_batch_size={micro_batch} sequences of data.seq_len={length} tokens need at least {needed / 1e9:.3g} GB of memory, "
            f"{free / 1e9:.3g} GB are free; lower one of them"
        )


def packed_dataset(recipe: Recipe, target: Target, corpus: Corpus) -> PackedDataset:
    """The sequences of a corpus, packed unless the recipe says otherwise.

    Raises:
        ValueError: the target runs on packed documents and lets them see each other.
    """
    data = recipe.data
    if data.pack and target.has_layers and not keeps_apart(target):
        raise ValueError(f"target {target.name!r} attends from one packed document to another; train it with data.pack=false")
    return PackedDataset(
        corpus, data.seq_len, recipe.train.seed, one_sample_each=not data.pack, count_all_tokens=recipe.train.normalise == "all"
    )


def open_store(recipe: Recipe, target: Target, taps: tuple[int, ...]) -> FeatureStore:
    """The recipe's feature store, open for reading; in mode cache a store that does not exist is created, empty."""
    section = recipe.features
    if section.store is None:
        raise ValueError(f"features.mode={section.mode} needs features.store, the folder of the store")
    folder, cached = Path(section.store), section.mode == "cache"

    def begin() -> None:
        before = Index.read(folder)
        own_taps, precision = (before.taps, before.precision) if before else (section.taps or taps, section.precision)
        capture.begin(folder, Index.of(target, own_taps, precision), target)

    if cached:
        processes.on_main(begin)
    return FeatureStore(folder, target, taps, allow_missing=cached or section.allow_missing, show=PartialState().is_main_process)


def fingerprint(recipe: Recipe, target: Target, train: PackedDataset | FeatureDataset) -> dict[str, Any]:
    """What must be the same for a run to be resumed: its data, its target, where its features come from, and the prompts for τ."""
    identity = target.identity
    facts: dict[str, Any] = {"data": train.key, "target's config": identity.config_hash, "target's tokenizer": identity.tokenizer_hash}
    facts |= {TARGET_FILES: identity.weights_hash or identity.revision, TARGET_DTYPE: identity.dtype}
    if isinstance(train, FeatureDataset):
        # features.allow_missing may leave some out
        samples = hashlib.sha256(train.packed.corpus.epoch_samples.numpy().tobytes()).hexdigest()
        facts |= {"features' precision": train.store.index.precision, "features' samples": samples}
    if recipe.train.tau_prompts:
        texts = repr(_tau_prompts(recipe.train, target)).encode("utf-8", "backslashreplace")
        facts[TAU_PROMPTS] = hashlib.sha256(texts).hexdigest()[:20]
    return facts


def _tau_prompts(section: TrainSection, target: Target) -> list[Prompt]:
    """The prompts on which a run measures τ."""
    return prompts.load(section.tau_file, section.tau_prompts) if section.tau_file else shipped_prompts(target, section.tau_prompts)


def tau_probe(recipe: Recipe, target: Target, drafter: Drafter, positions: int | None = None) -> MeasureTau | None:
    """A function that measures τ itself on train.tau_prompts prompts of each domain; None if there are to be none.

    Args:
        recipe: its section `train` says what is decoded.
        target: where it is `collective`, all ranks must call the returned function.
        drafter: what is measured.
        positions: the drafter's longest context, where it has a limit of its own.

    Raises:
        ValueError: prompts that leave no space for the answers.
    """
    section = recipe.train
    if not section.tau_prompts:
        return None
    encoded = [encode(target, prompt) for prompt in _tau_prompts(section, target)]
    longest, limit = max(map(len, encoded)) + section.tau_tokens, min(target.max_positions, positions or target.max_positions)
    if longest > limit:
        raise ValueError(
            f"the longest prompt for τ and train.tau_tokens={section.tau_tokens} make {longest} positions, there are {limit}; "
            "lower it, or give shorter prompts: train.tau_file"
        )

    def tau(report: Callable[[], None]) -> float:
        sampling, tokens, rounds = Sampling(temperature=section.tau_temperature), 0, 0
        for steps in Decoder(target, drafter, slots=min(8, len(encoded))).stream(encoded, sampling, section.tau_tokens):
            tokens, rounds = tokens + sum(len(step.tokens) for step in steps), rounds + len(steps)
            report()
        return tokens / rounds

    return tau


def monitors(recipe: Recipe, target: Target, drafter: Drafter, positions: int | None = None) -> dict[str, Any]:
    """What `loop.fit` measures beside the loss: τ, and the time of the target's forward if training runs it."""
    return {
        "measure_tau": tau_probe(recipe, target, drafter, positions),
        "collective": recipe.target.parallel in COLLECTIVE,
        "target_forward": partial(target.features, taps=drafter.taps) if recipe.features.mode == "online" else None,
    }
