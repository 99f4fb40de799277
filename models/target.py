"""The frozen target: any Hugging Face causal LM, read for its hidden states, its taps and its own logits.

Letters: B rows · S positions · V vocabulary · H hidden size · L layers · T taps.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.configuration_utils import PretrainedConfig
from transformers.masking_utils import create_masks_for_generate

from draftsmith.inference.attention import check_supported
from draftsmith.inference.drafter import TargetOutput
from draftsmith.inference.packed_linear import PackedLinears
from draftsmith.models.head import Head
from draftsmith.models.identity import TargetIdentity, check_same, config_hash, tokenizer_hash
from draftsmith.models.parallel import COLLECTIVE, check_parallel, decoder_layers, in_turn, lay_out
from draftsmith.models.quantised import quantisation, quantised_as
from draftsmith.models.stops import stop_ids

__all__ = ["Target", "TargetIdentity", "apart", "check_folder", "check_loaded", "check_same", "resolve_path"]

SHIPPED = {"tiny": Path(__file__).parent / "tiny", "tiny-draft": Path(__file__).parent / "tiny_draft"}

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")
_FILE_ENDINGS = (".yaml", ".yml", ".json", ".safetensors", ".bin", ".pt", ".pth", ".gguf")


class Target:
    """A frozen causal LM. Never trained: eval mode, no parameter requires a gradient.

    Attributes: model, tokenizer (or None), config (the text config), device, dtype, vocab_size V (rows of the logits),
    hidden_size H, num_layers L, max_positions, stop_ids, identity, parallel (how it is laid out: `models/parallel.py`).

    Use `load` for a path or a Hub id and `wrap` for a model in memory.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, name: str, revision: str, parallel: str = "none"
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.revision = revision
        self.parallel = parallel
        self.config: PretrainedConfig = model.config.get_text_config()
        self.decoder: nn.Module = model.get_decoder()
        self._head = Head(model)
        self.head: nn.Module = self._head.module
        self.layers = decoder_layers(model)
        self.vocab_size: int = self.head_weight.shape[0]
        self.hidden_size: int = self.config.hidden_size
        self.num_layers: int = len(self.layers)
        self.max_positions: int = self.config.max_position_embeddings
        self.stop_ids: frozenset[int] = stop_ids(model, tokenizer)
        self._hooked: set[int] = set()
        self._wanted: frozenset[int] = frozenset()
        self._caught: dict[int, Tensor] = {}
        self._packing: PackedLinears | None = None
        self._compiled: dict[int, Callable[..., Any]] = {}

    @classmethod
    def load(
        cls,
        path: str,
        *,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str = "cpu",
        revision: str | None = None,
        trust_remote_code: bool = False,
        parallel: str = "none",
        quantise: str | None = None,
    ) -> "Target":
        """Load a target from a folder, from the Hub, or "tiny", the model inside the package (no network).

        Only safetensors are read. `dtype=None` keeps the checkpoint's own. parallel: none, layers, shard or tensor (`models/parallel.py`), the
        last two on all ranks at once; quantise: a kind of `models/quantised.py`, for a checkpoint that is not quantised already.

        Raises:
            FileNotFoundError: no such folder, or not a whole model in it.
            ValueError: only pickled weights, tensors missing or left over, an architecture that cannot be tree-verified, or a layout or
                quantisation that this run, this architecture or this installation has not.
        """
        source = resolve_path(path)
        local = os.path.isdir(source)
        if local:
            check_folder(source)
        common: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": local}
        config = AutoConfig.from_pretrained(source, revision=revision or "main", **common)
        check_supported(config)
        own = quantised_as(config)
        if own and quantise:
            raise ValueError(f"{path!r} is quantised already ({own}), got target.quantise={quantise}; leave it out")
        check_parallel(parallel, path, own or quantise or "")
        # Weights and tokenizer come from the very commit that the config came from.
        commit = "" if local else _cached_commit(source, revision or "main")
        read = partial(
            AutoModelForCausalLM.from_pretrained,
            source,
            config=config,
            revision=commit or "main",
            dtype=dtype or "auto",
            quantization_config=quantisation(quantise, dtype) if quantise else None,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # check_loaded names them
            **common,
        )
        try:
            model, info = lay_out(read, parallel, device)
        except ImportError as error:
            if not (own or quantise):
                raise
            raise ValueError(f"{path!r} cannot be read as {own or quantise}: {error}") from None
        check_loaded(path, info)
        has_tokenizer = not local or any((Path(source) / name).exists() for name in TOKENIZER_FILES)
        tokenizer = AutoTokenizer.from_pretrained(source, revision=commit or "main", **common) if has_tokenizer else None
        return cls(model, tokenizer, path, commit, parallel)

    @classmethod
    def wrap(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, name: str = "in-memory") -> "Target":
        """Take a model that is already in memory; it is frozen in place."""
        return cls(model, tokenizer, name, "")

    def mask_blocks(self) -> None:
        """On a GPU attend by FlexAttention where the model can, so that packed rows need no [S,S] mask, but one of its blocks."""
        if self.device.type == "cuda" and self.model._supports_flex_attn:
            self.model.set_attn_implementation("flex_attention")

    def pack(self) -> None:
        """For decoding on a CPU: keep the linear layers' weights in its own layout too, where that pays (`inference/packed_linear.py`) and they are
        plain tensors, whole and not quantised."""
        if not self.collective and not quantised_as(self.model.config):
            self._packing = self._packing or PackedLinears(self.model)

    @property
    def collective(self) -> bool:
        """Whether a forward is for all ranks together, so that each must run as many; `logits` and `embed` never are."""
        return self.parallel in COLLECTIVE

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def head_weight(self) -> Tensor:
        """The output head's weight [V,H]; scaling and soft-capping after it are in `logits` only."""
        return self._head.weight

    @cached_property
    def identity(self) -> TargetIdentity:
        dtype = "+".join(filter(None, (str(self.dtype).removeprefix("torch."), quantised_as(self.model.config))))
        return TargetIdentity(self.name, self.revision, dtype, config_hash(self.model.config), tokenizer_hash(self.tokenizer))

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        tree: Any = None,
        taps: Sequence[int] = (),
    ) -> TargetOutput:
        """Run the base decoder, without the head, on input_ids [B,S].

        Returns hidden [B,S,H] (after the final norm: what the head reads) and taps [B,S,T,H] (None without taps);
        tap i is the output of decoder layer i, counted from 0.

        Raises:
            ValueError: a tap outside 0..L-1.
            RuntimeError: a tap that did not arrive.
        """
        self.watch(taps)
        extra = {} if tree is None else {"tree_attention": tree}
        self._wanted, self._caught = frozenset(taps), {}
        try:
            with self._packing.on() if self._packing else nullcontext():
                output = self.decoder(
                    input_ids=input_ids,
                    position_ids=position_ids,
                    attention_mask=attention_mask,
                    past_key_values=cache,
                    use_cache=cache is not None,
                    **extra,
                )
            caught = self._caught
        finally:
            self._wanted, self._caught = frozenset(), {}
        missing = [tap for tap in taps if tap not in caught]
        if missing:
            raise RuntimeError(
                f"taps {missing} of target {self.name!r} did not arrive: their layers did not run, or were compiled before "
                "they were tapped; call target.watch(taps) before torch.compile"
            )
        hidden: Tensor = output.last_hidden_state
        stacked = torch.stack([caught[tap].to(hidden.device) for tap in taps], dim=2) if taps else None
        return TargetOutput(hidden=hidden, taps=stacked)

    __call__ = forward

    def features(self, batch: dict[str, Tensor], taps: Sequence[int] = ()) -> TargetOutput:
        """What `forward` gives for a packed batch (`data/packing.py`), no document seeing another; as stored, where the batch carries it.

        Under tensor parallelism each rank has rows of its own here, while the rows of a `forward` must be the same on all.
        """
        if "hidden" in batch:
            return TargetOutput(hidden=batch["hidden"], taps=batch.get("taps"))

        def run(rows: dict[str, Tensor]) -> TargetOutput:
            with self._running(self._compiled):
                return self.forward(rows["input_ids"], **apart(self.config, self.dtype, rows), taps=taps)

        rows = {name: batch[name] for name in ("input_ids", "position_ids")}
        out = in_turn(run, rows) if self.parallel == "tensor" else run(rows)
        device = rows["input_ids"].device
        return TargetOutput(out.hidden.to(device), None if out.taps is None else out.taps.to(device))

    @contextmanager
    def without(self, layers: Iterable[int]) -> Iterator[None]:
        """Within it these decoder layers hand their input on."""

        def forward(hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
            return hidden_states

        with self._running({layer: forward for layer in layers}):
            yield

    def compile(self) -> None:
        """Have `features` run compiled decoder layers, one graph for all, since they are alike; hooks stay outside, so that taps arrive."""
        self._compiled = {number: torch.compile(layer.forward) for number, layer in enumerate(self.layers)}

    @contextmanager
    def _running(self, forwards: dict[int, Callable[..., Any]]) -> Iterator[None]:
        """Within it these decoder layers have other forwards."""
        # Accelerate gives instances a forward of their own, where the layers are spread over devices.
        before = [(self.layers[layer].__dict__, self.layers[layer].__dict__.get("forward")) for layer in forwards]
        for (place, _), forward in zip(before, forwards.values(), strict=True):
            place["forward"] = forward
        try:
            yield
        finally:
            for place, own in before:
                del place["forward"]
                if own is not None:
                    place["forward"] = own

    def watch(self, taps: Iterable[int]) -> None:
        """Hook these decoder layers, once and for good. Call it before torch.compile: later hooks never fire.

        Raises:
            ValueError: a tap outside 0..L-1.
        """
        for tap in taps:
            if tap in self._hooked:
                continue
            if not 0 <= tap < self.num_layers:
                raise ValueError(f"tap {tap} of target {self.name!r}: expected a decoder layer 0..{self.num_layers - 1}")
            self.layers[tap].register_forward_hook(self._catcher(tap))
            self._hooked.add(tap)

    def _catcher(self, tap: int) -> Callable[..., None]:
        def catch(_module: nn.Module, _args: Any, output: Any) -> None:
            if tap in self._wanted:
                self._caught[tap] = output[0] if isinstance(output, tuple) else output

        return catch

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [...,H] -> the model's own logits [...,V], scaling and soft-capping after the head included.

        Differentiable with respect to hidden.
        """
        with self._packing.on() if self._packing else nullcontext():
            return self._head(hidden)

    @property
    def head_scale(self) -> float:
        """What `logits` multiplies the bare head's output by (Cohere, Granite), soft-capping aside; 1.0 for most models."""
        return self._head.scale

    def embed(self, ids: Tensor) -> Tensor:
        """ids [...] -> input embeddings [...,H], as the model's embedding module gives them.

        A scaling inside that module (Gemma's √H, from transformers 5) is included; one that the decoder's forward applies
        afterwards (Granite's multiplier) is not.
        """
        return self.model.get_input_embeddings()(ids)


def apart(config: PretrainedConfig, dtype: torch.dtype, batch: dict[str, Tensor]) -> dict[str, Any]:
    """What a base decoder needs beside the tokens, so that no document of a packed batch sees another: position_ids [B,S], attention_mask.

    transformers finds the documents in the position ids, and makes what the attention in use wants: a dense mask for SDPA, a block
    mask for FlexAttention, none for varlen. Made here, since some models (gpt-oss) forget to hand their positions to it.
    """
    positions = batch["position_ids"]
    shape = torch.empty(*positions.shape, 0, dtype=dtype, device=positions.device)
    mask: Any = create_masks_for_generate(config, shape, None, None, position_ids=positions)
    return {"position_ids": positions, "attention_mask": mask}


def resolve_path(path: str) -> str:
    """ "tiny", "tiny-draft" -> the folder in the package; a local folder -> itself; anything else that can be one is a Hub id.

    Raises:
        FileNotFoundError: a path that looks local and does not exist, so that it never becomes a request to the Hub.
        ValueError: a file where a folder is expected.
    """
    path = str(SHIPPED.get(path, path))
    source = os.path.expanduser(path)
    if os.path.isdir(source):
        return source
    if os.path.isfile(source):
        raise ValueError(f"{path!r} is a file; give the folder of the model, or a Hub id")
    looks_local = (
        path.startswith((".", "~", os.sep))
        or path.endswith((os.sep, *_FILE_ENDINGS))
        or path.count("/") > 1
        or (os.sep in path and os.path.isdir(os.path.dirname(path)))
    )
    if looks_local:
        raise FileNotFoundError(f"no folder {path!r}; give a folder with config.json and safetensors, or a Hub id such as Qwen/Qwen3-0.6B")
    return path


def _cached_commit(repo: str, revision: str) -> str:
    """The commit that `revision` stands for, from the folder that config.json was just cached in: snapshots/<commit>/."""
    cached = try_to_load_from_cache(repo, "config.json", revision=revision)
    return Path(cached).parent.name if isinstance(cached, str) else revision


def check_folder(folder: str) -> None:
    """Whether a local model folder is whole: config.json, and safetensors whose headers and lengths agree.

    Raises:
        FileNotFoundError: no config.json or no weights.
        ValueError: only pickled weights, or a file that is cut off.
    """
    names = set(os.listdir(folder))
    if "config.json" not in names:
        raise FileNotFoundError(f"no config.json in {folder!r}; give the folder that save_pretrained wrote")
    try:
        json.loads((Path(folder) / "config.json").read_text())
    except ValueError as error:
        raise ValueError(f"config.json in {folder!r} is not JSON ({error}); it may be cut off: copy or save it again") from None
    weights = sorted(name for name in names if name.endswith(".safetensors"))
    pickles = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth")))
    if not weights and pickles:
        raise ValueError(f"{folder!r} holds only pickled weights ({pickles[0]}); save it again with safetensors, pickles are never loaded")
    if not weights:
        raise FileNotFoundError(f"no weights in {folder!r}: expected model.safetensors; copy the whole model folder")
    for name in weights:
        try:
            with safe_open(os.path.join(folder, name), framework="pt"):
                pass
        except SafetensorError as error:
            raise ValueError(f"{name} in {folder!r} is damaged or cut off ({error}); copy or save it again") from None


def check_loaded(path: str, info: dict[str, Any]) -> None:
    """Refuse a load that left tensors out; `info` is what transformers gives with output_loading_info=True.

    Raises:
        ValueError: naming the tensors that are missing, left over or of another shape (tied ones are none of these).
    """
    misshapen = [f"{name} {list(found)} for {list(wanted)}" for name, found, wanted in info["mismatched_keys"]]
    for word, names in (("missing", info["missing_keys"]), ("unexpected", info["unexpected_keys"]), ("misshapen", misshapen)):
        if names:
            shown = ", ".join(sorted(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            raise ValueError(f"{path!r} has {len(names)} {word} tensors: {shown}; its weights do not fit its config.json")
