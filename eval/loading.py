"""The target and the drafters that a command works with, as its options name them."""

import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch

from draftsmith.data import prompts as prompt_files
from draftsmith.data.prompts import Prompt
from draftsmith.inference import expand, machine
from draftsmith.inference.byte_vocabulary import ByteVocabulary
from draftsmith.inference.confidence import Confidence
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.drafts import HostDrafter
from draftsmith.inference.expand import DynamicTree, TreeSpec, parse_tree_spec
from draftsmith.inference.grammar import KINDS, Grammar, Kind, compile_grammar
from draftsmith.inference.hybrid import Hybrid
from draftsmith.inference.lookahead import Lookahead
from draftsmith.inference.lookup import Ngram, Suffix
from draftsmith.inference.packed_linear import pack
from draftsmith.inference.reading import read_text
from draftsmith.inference.recycling import Recycling
from draftsmith.inference.retrieval import FACTS, Datastore, Rest
from draftsmith.inference.self_speculation import SelfSpeculation, early_exit, skip_layers
from draftsmith.inference.shared_tokens import SharedTokens
from draftsmith.inference.stopping import Stopping, parse_stopping
from draftsmith.inference.string_matching import StringMatching
from draftsmith.inference.suffix_memory import StoredSuffix
from draftsmith.inference.tree import StaticTree
from draftsmith.models import ranks
from draftsmith.models.adapter import adapt
from draftsmith.models.artifact import mask_token, student_entry
from draftsmith.models.drafter import DrafterModel, default_paths, is_drafter, load_config, load_drafter
from draftsmith.models.feature_drafter import PairDrafter
from draftsmith.models.formats import published
from draftsmith.models.formats.mtp import shipped_mtp
from draftsmith.models.identity import recorded_revision
from draftsmith.models.pard import ParallelDraftModel
from draftsmith.models.rendering import render
from draftsmith.models.target import Target, TargetIdentity, check_same, resolve_path
from draftsmith.models.tokenizer_check import check_pair, have_same_tokens
from draftsmith.models.weights import Header, weights_hash

WEIGHTLESS = {"ngram": Ngram, "suffix": Suffix, "recycling": Recycling, "lookahead": Lookahead}
WITH_FILE = ("rest:", "suffix:")  # before a folder or a file
OF_THE_TARGET = ("early-exit:", "skip:")  # before layers of the target that drafts for itself
OTHER_TOKENS = ("strings:", "tli:")  # before a causal LM with another tokenizer than the target's: how it drafts
MTP = "mtp"  # the MTP layer that the target's checkpoint ships, as it is
HYBRID = "hybrid:"  # before the name of any other drafter
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

CACHE = 64 << 20  # bytes of float32 weights that a CPU may keep in its cache: halving them gains little

AnyDrafter = DrafterModel | DraftModel | SelfSpeculation | HostDrafter | Hybrid


def fastest_dtype(stored: dict[str, Header], precision: Callable[[], str]) -> torch.dtype:
    """The dtype in which a checkpoint is run where none is asked for: on a GPU bfloat16.

    On a CPU it is bfloat16 where the checkpoint is in half precision and `precision`, a measurement, gives "bf16"; else float32.

    Args:
        stored: the headers of the checkpoint's tensors.
        precision: the faster precision on this CPU, "bf16" or "fp32". It is not called where it decides nothing.
    """
    if torch.cuda.is_available() and torch.cuda.is_bf16_supported():
        return torch.bfloat16
    half = bool(stored) and all(header.dtype in ("BF16", "F16") for header in stored.values())
    return torch.bfloat16 if half and precision() == "bf16" else torch.float32


def decoding_dtype(stored: dict[str, Header]) -> torch.dtype:
    """`fastest_dtype` for decoding: on a CPU, weights that its cache holds are in float32. All ranks take what the first has measured."""
    large = sum(4 * header.size for header in stored.values()) > CACHE
    return fastest_dtype(stored, lambda: ranks.agreed(machine.decoding_precision()) if large else "fp32")


def chosen_dtype(dtype: str, begun: Callable[[], str | None]) -> str:
    """The dtype for `open_models`. Under "auto", the work of a stopped run stays in its dtype, since a second measurement may choose another.
    `begun` reads that dtype, in the first rank alone; None: there is no such work."""
    if dtype != "auto":
        return dtype
    own = ranks.agreed(begun() if ranks.state().is_main_process else None)
    return own if own in DTYPES else dtype


def command() -> str:
    """What to type to run `draftsmith`: its name where it is on the PATH, else its path beside this Python."""
    if shutil.which("draftsmith"):
        return "draftsmith"
    beside = Path(sys.executable).with_name("draftsmith")
    return str(beside.relative_to(Path.cwd()) if beside.is_relative_to(Path.cwd()) else beside)


def open_models(
    target: str | None, drafters: Sequence[str], dtype: str, trust_remote_code: bool = False, *, learn: bool = False
) -> tuple[Target, list[AnyDrafter]]:
    """Load a target and drafters for it. Configs and tokenizers are checked before any weights are read. The adapters of a drafter of Medusa-2
    are merged into the target; drafters of the target without them are refused then.

    Args:
        target: folder or Hub id. None takes the target of the first drafter that names one, else `tiny`.
        drafters: each is a key of WEIGHTLESS, mtp, suffix:FILE with its memory, rest:FOLDER with a datastore, early-exit:LAYERS or
            skip:LAYER,LAYER,… of the target's own, or the folder or Hub id of a trained drafter, of a published drafter
            (models/FORMATS.md), or of a causal LM. A distilled draft model starts with the tree and the confidence of its config. A
            causal LM with other tokens than the target's drafts as after strings:; tli: is the other way (inference/DECODING.md). HYBRID
            before a name puts a look-up beside it.
        dtype: a key of DTYPES, or "auto", which `decoding_dtype` chooses. Drafters take the target's.
        trust_remote_code: run the models' own code from the Hub.
        learn: suffix:FILE writes what it learns to its file.

    Raises:
        ValueError: a damaged config, a drafter of another target (the message names both), a draft model that shares no token with the
            target after tli:, or a target without a tokenizer.
    """
    hybrid, drafters = [name.startswith(HYBRID) for name in drafters], [name.removeprefix(HYBRID) for name in drafters]
    paths = [_way_and_path(name)[1] for name in drafters if not weightless(name)]
    _check_names(drafters, paths)
    imported = {path for path in paths if published.format_of(path)}
    trained = {path for path in paths if path not in imported and is_drafter(path)}
    entries = {path: student_entry(path) for path in paths if path not in trained | imported}
    for name in drafters:
        if name.startswith(OTHER_TOKENS) and _way_and_path(name)[1] not in entries:
            raise ValueError(
                f"drafter {name!r}: expected the folder or Hub id of a causal LM after {name.partition(':')[0]}:; leave that out"
            )
    configs = {path: load_config(path) for path in trained}
    recorded_targets = {path: published.target_of(path) for path in imported} | {path: configs[path].target for path in trained}
    targets = (recorded_targets[path] if path in recorded_targets else (entries[path] or {}).get("target") for path in paths)
    recorded = next(filter(None, targets), None) or {}
    name = target if target is not None else recorded.get("name") or "tiny"
    revision = recorded_revision(name, recorded)
    pair: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    ways = {drafter: _way(drafter, name, entries, pair) for drafter in drafters if _way_and_path(drafter)[1] in entries}
    settings: dict[str, Any] = {
        "dtype": decoding_dtype if dtype == "auto" else DTYPES[dtype],
        "device": str(ranks.state().device),
        "trust_remote_code": trust_remote_code,
    }
    loaded = Target.load(name, revision=revision, **settings)
    adapted = [path for path in paths if path in trained and (configs[path].target or {}).get("adapter_hash")]
    if adapted:
        adapt(loaded, adapted[0], configs[adapted[0]].target)
    loaded.require_tokenizer()
    trial = torch.arange(8, device=loaded.device)[None] % loaded.vocab_size
    machine.threads(lambda: loaded.forward(trial))
    loaded.pack()
    settings["dtype"] = loaded.dtype
    opened: list[AnyDrafter] = []
    for drafter in drafters:
        path = _way_and_path(drafter)[1]
        if weightless(drafter):
            opened.append(_open_weightless(drafter, loaded, learn))
        elif path in entries:
            opened.append(_draft_model(ways[drafter], path, entries[path], loaded, settings))
        else:
            opened.append(_trained(path, loaded, path in trained))
    return loaded, [Hybrid(drafter) if beside else drafter for drafter, beside in zip(opened, hybrid, strict=True)]


def _check_names(drafters: list[str], paths: list[str]) -> None:
    """Raises ValueError for a name that is none of those of `open_models`. paths: of the drafters with weights."""
    for path in paths:
        if not path or path.startswith(HYBRID) or ("/" not in path and not Path(resolve_path(path)).is_dir()):
            raise ValueError(
                f"drafter {path!r}: expected {', '.join(WEIGHTLESS)}, mtp, suffix:FILE, rest:FOLDER, early-exit:LAYERS, skip:LAYER,LAYER,…, the "
                "folder of a trained drafter or draft model, or a Hub id such as name/drafter"
            )
    for drafter in drafters:
        _layer_numbers(drafter)


def _trained(path: str, target: Target, ours: bool) -> DrafterModel:
    """A drafter with heads: trained here, or published by others."""
    model = load_drafter(path, target, dtype=target.dtype) if ours else published.read_published(path, target, target.dtype)
    pack(model)
    return model


def without_adapters(target: Target, trust_remote_code: bool = False) -> Target:
    """The target as it is without the adapters that `open_models` merged into it: a second model, in the same precision."""
    settings: dict[str, Any] = {"dtype": target.dtype, "device": target.device, "trust_remote_code": trust_remote_code}
    original = Target.load(target.name, revision=target.revision or None, **settings)
    original.pack()
    return original


def weightless(drafter: str) -> bool:
    """Whether a drafter of this name has no weights beside the target's checkpoint."""
    return drafter in (*WEIGHTLESS, MTP) or drafter.startswith(WITH_FILE + OF_THE_TARGET)


def _way_and_path(drafter: str) -> tuple[str, str]:
    """How a causal LM with other tokens is to draft, "" where that is left open, and the folder or Hub id of a drafter."""
    kind, colon, path = drafter.partition(":")
    return (kind, path) if kind + colon in OTHER_TOKENS else ("", drafter)


def _way(drafter: str, target: str, entries: dict[str, Any], pair: dict[str, Any]) -> str:
    """How a causal LM drafts for this target: as its name says, else "same" or "strings" by its tokens. A distilled one must have the target's.

    Raises:
        ValueError: as `check_pair` for a distilled draft model, as `have_same_tokens` for another.
    """
    way, path = _way_and_path(drafter)
    if entries[path] and not way:
        check_pair(target, path, **pair)
        return "same"
    same = have_same_tokens(target, path, **pair)
    return way or ("same" if same else "strings")


def _layer_numbers(drafter: str) -> list[int]:
    """The numbers in the name of a drafter that is layers of the target; [] for others. Raises ValueError for what is none."""
    if not drafter.startswith(OF_THE_TARGET):
        return []
    kind, _, words = drafter.partition(":")
    numbers = words.split(",")
    if not all(number.isascii() and number.isdigit() and len(number) < 6 for number in numbers) or (
        kind == "early-exit" and len(numbers) > 1
    ):
        expected = (
            "decoder layers counted from 0, as in skip:3,5,6" if kind == "skip" else "how many decoder layers draft, as in early-exit:4"
        )
        raise ValueError(f"drafter {drafter!r}: got {words!r}; expected {expected}; correct it")
    return [int(number) for number in numbers]


def _open_weightless(name: str, target: Target, learn: bool) -> HostDrafter | SelfSpeculation | DrafterModel:
    if name in WEIGHTLESS:
        return WEIGHTLESS[name]()
    if name == MTP:
        layer = shipped_mtp(target)
        pack(layer.to(target.dtype))  # pyright: ignore[reportArgumentType, reportCallIssue]
        return layer
    kind, _, path = name.partition(":")
    if numbers := _layer_numbers(name):
        return early_exit(target, numbers[0]) if kind == "early-exit" else skip_layers(target, numbers)
    file, tokenizer_hash = Path(path).expanduser(), target.identity.tokenizer_hash
    if kind == "suffix":
        return StoredSuffix(file, target.vocab_size, tokenizer_hash, write=learn)
    return Rest(Datastore.open(file, tokenizer_hash))


def provenance(drafter: str) -> dict[str, str]:
    """What a report says of a drafter: the name that was given, and the hash of its weights, its datastore or its memory, where it has any."""
    word = drafter.removeprefix(HYBRID)
    kind, _, path = word.partition(":")
    if word.startswith(WITH_FILE):
        file = Path(path).expanduser() / (FACTS if kind == "rest" else "")  # a datastore's facts have its checksum
        return {"name": drafter, "hash": sha256(file.read_bytes()).hexdigest() if file.is_file() else ""}
    path = _way_and_path(word)[1]
    folder = "" if weightless(path) else resolve_path(path)
    return {"name": drafter, "hash": weights_hash(folder) if folder and Path(folder).is_dir() else ""}


def open_named(
    target: str | None, drafters: Sequence[str], dtype: str, trust_remote_code: bool = False
) -> tuple[Target, dict[str, AnyDrafter]]:
    """`open_models`, with a distinct name for each drafter: its method, and where that is not enough the folder of its artifact."""
    loaded, opened = open_models(target, drafters, dtype, trust_remote_code)
    named: dict[str, AnyDrafter] = {}
    for word, drafter in zip(drafters, opened, strict=True):
        path = Path(_way_and_path(word)[1])
        full = f"{drafter.method} {(path.parent if path.name == 'artifact' else path).name or word}"
        names = [full] if isinstance(drafter, DraftModel) else [drafter.method, full]
        numbered = (f"{full} ({number})" for number in count(2))
        named[next(name for name in chain(names, numbered) if name not in named)] = drafter
    return loaded, named


def _draft_model(
    way: str, path: str, entry: dict[str, Any] | None, target: Target, settings: dict[str, Any]
) -> DraftModel | StringMatching:
    """A causal LM that drafts: "same" with the target's tokens, "strings" by text, "tli" with the tokens that both have."""
    entry = {"target": None, "tree": default_paths(3, 7), "confidence": 0.0} | (entry or {})
    mask = mask_token(path) if way == "same" else None
    if entry["target"] and way == "same" and mask is None:  # masks read the text alone, and draft for every target with its tokens
        warning = check_same(TargetIdentity.from_dict(entry["target"]), target.identity)
        if warning:
            warnings.warn(warning, stacklevel=3)
    model = Target.load(path, **settings)
    model.pack()
    stop = Stopping("confidence", entry["confidence"]) if entry["confidence"] else None
    tree_spec = parse_tree_spec(entry["tree"])
    if mask is not None:
        return ParallelDraftModel(model, tree_spec, mask, entry.get("parallel") or ParallelDraftModel.depth_limit)
    if way == "same":
        return DraftModel(model, tree_spec, stop=stop)
    ours = ByteVocabulary.of(model.tokenizer, path, model.vocab_size)
    theirs = ByteVocabulary.of(target.tokenizer, target.name, target.vocab_size)
    if way == "tli":
        return SharedTokens(model, ours, theirs, target.vocab_size, tree_spec, stop=stop)
    return StringMatching(model, ours, theirs)


def set_stop(drafter: AnyDrafter | None, text: str | None) -> None:
    """Let a drafter stop its drafts by a rule as --stop writes it. None changes nothing.

    Raises:
        ValueError: no such rule, a drafter that does not draft level by level, or `survival` with one that has no fitted confidence.
    """
    if text is None:
        return
    try:
        stop = parse_stopping(text)
    except ValueError as error:
        raise ValueError(f"--stop: {error}") from None
    drafter = drafter.trained if isinstance(drafter, Hybrid) else drafter  # pyright: ignore[reportAssignmentType]
    if not isinstance(drafter, DrafterModel | DraftModel | SelfSpeculation) or not drafter.can_stop:
        raise ValueError(
            f"--stop {text}: {drafter.method if drafter else 'none'} does not draft level by level; expected one that does; leave it out"
        )
    if stop is not None and stop.rule == "survival":
        weights = drafter.config.confidence_weights if isinstance(drafter, DrafterModel) else None
        if weights is None:
            raise ValueError(
                f"--stop {text}: this {drafter.method} drafter has no `confidence_weights` in its config; training fits them for Medusa, Hydra, MLP, EAGLE, MTP "
                "and Kangaroo drafters of a target that is not split by shard or tensor; train one of these anew, or take confidence:P"
            )
        stop = replace(stop, confidence=Confidence.parse(weights))
    drafter.stop = stop


def check_load_aware(drafter: AnyDrafter | None) -> None:
    """Raises ValueError where a drafter says nothing of how likely its drafts are to be accepted."""
    if not isinstance(drafter, DrafterModel | DraftModel | SelfSpeculation):
        raise ValueError(
            f"--load-aware: {drafter.method if drafter else 'none'} has no probabilities of its drafts; expected a drafter with weights; leave it out"
        )


def constraint_of(chosen: Any, target: Target) -> Grammar | None:
    """What answers must be, by the options --json-schema, --grammar and --regex; None where none of them is given.

    Raises:
        ValueError: a file that cannot be read, or what `compile_grammar` refuses; the message names the option.
    """
    given: list[tuple[Kind, str]] = [(kind, getattr(chosen, kind)) for kind in KINDS if getattr(chosen, kind) is not None]
    if not given:
        return None
    ((kind, word),) = given
    source = f"--{kind.replace('_', '-')} {word}"
    try:
        text = word if kind == "regex" else read_text(Path(word).expanduser())
        return compile_grammar(kind, text, target.tokenizer, target.vocab_size, target.stop_ids)
    except OSError as error:
        raise ValueError(f"{source}: {error.strerror or error}; give a file that can be read") from None
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def set_draft_window(drafter: AnyDrafter | None, window: int | None) -> None:
    """Let a drafter keep KV of the first and of the last `window` positions only. None changes nothing.

    Raises:
        ValueError: the drafter has no KV cache of its own.
    """
    if window is None:
        return
    drafting: Any = drafter.trained if isinstance(drafter, Hybrid) else drafter
    bounded = isinstance(drafting, DraftModel | PairDrafter) and not isinstance(drafting, SharedTokens)
    if not bounded or not getattr(drafting, "reads_context", True):
        raise ValueError(
            f"--draft-window {window}: {getattr(drafting, 'method', 'none')} has no KV that can be bounded here; expected a draft model "
            "with the target's tokens, or a drafter such as EAGLE; leave it out"
        )
    drafting.window = window


def check_rule(rule: str, drafter: Any) -> None:
    """Check that the rule can verify what the drafter proposes.

    Raises:
        ValueError: the rule needs sampled children, and the tree or the drafter has none.
    """
    if rule.startswith("rejection") and isinstance(drafter, HostDrafter | Hybrid):
        raise ValueError(
            f"--rule {rule}: {drafter.method} has no distribution to sample children from; expected another rule: target-sample does "
            "the same for it"
        )
    expand.check_rule(rule, drafter.tree_spec)


def tree_spec_from_options(tree: str, drafter: Any, depth: int | None, width: int | None, nodes: int | None) -> TreeSpec:
    """The draft tree that the options --tree, --depth, --width and --nodes describe.

    Args:
        tree: "saved" (the drafter's own), "chain" or "dynamic".
        drafter: knows its own tree, and how deep it can draft.
        depth: cuts the saved tree; 4 by default for the others, or as deep as the drafter can draft.
        width: of a dynamic tree, 4 by default.
        nodes: of a dynamic tree, 16 by default.

    Raises:
        ValueError: numbers that this kind of tree does not take, or a tree deeper than the drafter can draft.
    """
    if tree != "dynamic" and (width or nodes):
        raise ValueError(f"a {tree} tree takes a depth alone, got a width or nodes; leave them out, or take a dynamic tree")
    if tree == "chain":
        spec: TreeSpec = StaticTree.chain(depth or min(4, drafter.depth_limit))
    elif tree == "dynamic":
        spec = DynamicTree(depth or min(4, drafter.depth_limit), width or 4, nodes or 16)
    else:
        spec = drafter.tree_spec.cut(depth or drafter.tree_spec.max_depth)
    if spec.max_depth > drafter.depth_limit:
        raise ValueError(f"got a tree {spec.max_depth} deep; {drafter.method} looks {drafter.depth_limit} ahead at most; lower the depth")
    return spec


def shipped_prompts(target: Target, limit: int | None = None) -> list[Prompt]:
    """The shipped prompts for a target, where none are named: those by task if it has a chat template, else Python source.

    Args:
        target: with its tokenizer.
        limit: most prompts of each domain; None takes all.
    """
    return prompt_files.load(prompt_files.CHAT if target.require_tokenizer().chat_template else prompt_files.TINY, limit)


def encode(target: Target, prompt: Prompt, answer: str = "") -> list[int]:
    """Token ids of a prompt. A conversation goes through the target's chat template, which writes its own special tokens.

    A target without one continues the prompt's completion, if there is any, else its text. `answer` follows.

    Raises:
        ValueError: the template does not write this conversation.
    """
    tokenizer = target.require_tokenizer()
    if not prompt.messages or not tokenizer.chat_template:
        return tokenizer.encode(((not tokenizer.chat_template and prompt.completion) or prompt.text) + answer)
    try:
        template = tokenizer.get_chat_template()
        text, _ = render(template, list(prompt.messages), tokenizer.special_tokens_map, prompt=True)
    except ValueError as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"prompt {prompt.id!r}: the chat template of {target.name!r} does not write it ({reason}); give it as text, or mend the template"
        ) from None
    return tokenizer.encode(text + answer, add_special_tokens=False)
