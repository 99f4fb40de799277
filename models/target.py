"""The frozen target: any Hugging Face causal LM, read for its hidden states, its taps and its own logits.

Letters: B rows · S positions · V vocabulary · H hidden size · L layers · T taps.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from inspect import signature
from os.path import isdir
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.configuration_utils import PretrainedConfig
from transformers.masking_utils import create_masks_for_generate

from draftsmith.inference.attention import own_attention, running
from draftsmith.inference.drafter import TargetOutput
from draftsmith.inference.packed_linear import pack, packed_weights
from draftsmith.models.document_attention import Documents, attends_by_document, document_attention, documents_of
from draftsmith.models.head import Head, check_fits, load_ends
from draftsmith.models.identity import TargetIdentity, check_same, config_hash, tokenizer_hash
from draftsmith.models.model_files import (
    SHIPPED,
    TOKENIZER_FILES,
    UNEXPECTED,
    cached_commit,
    check_generation,
    check_stops,
    in_words,
    model_file,
    read_config,
    read_tokenizer,
    require_tokenizer,
    resolve_path,
)
from draftsmith.models.parallel import COLLECTIVE, check_parallel, decoder_layers, in_turn, lay_out, not_partitioned
from draftsmith.models.quantised import quantisation, quantised_as
from draftsmith.models.turn_end import stop_ids
from draftsmith.models.weights import Header, check_finite, check_folder, check_loaded, headers, weights_hash, without_mtp

__all__ = ["SHIPPED", "TOKENIZER_FILES", "Target", "TargetIdentity", "apart", "check_folder", "check_loaded", "check_same", "resolve_path"]

KEY = "target.path or --target"  # where people write the path of a target; error messages name it


class Target:
    """A frozen causal LM, which is never trained. `load` takes a path or a Hub id, `wrap` a model in memory.

    Attributes:
        model: the transformers model.
        tokenizer: its tokenizer, or None.
        config: the config of the text model.
        has_layers: whether the decoder layers are in memory; without them only `logits`, `embed` and what is read from configs work.
        parallel: how the decoder layers are laid out over devices or ranks (`models/parallel.py`).
        vocab_size: V, rows of the logits.
        hidden_size: H.
        num_layers: L.
        max_positions: the longest context of the model.
        stop_ids: the tokens at which an answer ends.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        name: str,
        revision: str,
        parallel: str = "none",
        has_layers: bool = True,
        weights: str = "",
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer, self.name, self.revision, self._weights_hash = tokenizer, name, revision, weights
        self.parallel, self.has_layers = parallel, has_layers
        self.config: PretrainedConfig = model.config.get_text_config()
        self.decoder: nn.Module = model.get_decoder()
        # transformers 5.24 renames the argument; models outside its library may keep the name before
        self._cache_name = "cache" if "cache" in signature(self.decoder.forward).parameters else "past_key_values"
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
        self._compiled: dict[int, Callable[..., Any]] = {}

    @classmethod
    def load(
        cls,
        path: str,
        *,
        dtype: torch.dtype | str | Callable[[dict[str, Header]], torch.dtype] | None = None,
        device: torch.device | str = "cpu",
        revision: str | None = None,
        trust_remote_code: bool = False,
        parallel: str = "none",
        quantise: str | None = None,
        layers: bool = True,
    ) -> "Target":
        """Load a target from a folder, from the Hub, or "tiny", the model inside the package (no network). Only safetensors are read.

        Args:
            path: folder, Hub id or "tiny".
            dtype: of the weights; None keeps the checkpoint's own. A function chooses it by the headers of the checkpoint's tensors.
            device: where the weights go.
            revision: branch, tag or commit on the Hub.
            trust_remote_code: run the model's own code from the Hub.
            parallel: none, layers, shard or tensor (`models/parallel.py`); shard and tensor are calls of all ranks at once.
            quantise: a kind of `models/quantised.py`, for a checkpoint that is not quantised already.
            layers: whether the decoder layers are read. False reads the input embeddings and the output head alone, complete on each rank:
                enough where features come from a store. (A checkpoint with an adapter, or with a quantised head, is read completely.)

        Raises:
            FileNotFoundError: no such folder, nothing of that name on the Hub, or not a complete model in the folder.
            ValueError: only pickled weights, tensors missing or unexpected, an architecture that cannot be tree-verified, or a layout or
                quantisation that this run, this architecture or this installation does not have.
        """
        source = resolve_path(path, KEY)
        if local := isdir(source):
            check_folder(source)
        config = read_config(path, revision=revision, trust_remote_code=trust_remote_code, key=KEY)
        if (own := quantised_as(config)) and quantise:
            raise ValueError(f"{path!r} is quantised already ({own}), got target.quantise={quantise}; leave it out")
        check_parallel(parallel, path, own or quantise or "")
        # Weights and tokenizer come from the very commit that the config came from.
        commit = "" if local else cached_commit(source, revision or "main")
        check_generation(source, commit)
        stored = (
            headers(source, commit) if layers or local else {}
        )  # for the ends alone of a model on the Hub, not all files are downloaded
        if stored:
            check_fits(path, config, stored, trust_remote_code)
        dtype = dtype(stored) if callable(dtype) else dtype
        arguments: dict[str, Any] = {
            "config": config,
            "dtype": dtype or "auto",
            "quantization_config": quantisation(quantise, dtype) if quantise else None,
            "trust_remote_code": trust_remote_code,
        }
        model = None if layers else _read_ends(path, source, commit, device, **arguments)
        has_layers = model is None
        if model is None:
            model = _read_complete(path, source, commit, device, parallel, own or quantise or "", **arguments)
        check_finite(path, model)
        for ids, file in (
            (model.generation_config and model.generation_config.eos_token_id, "generation_config.json"),
            (config.eos_token_id, "config.json"),
        ):
            check_stops(ids, f"{file} of {path!r}", config.get_text_config().vocab_size)
        tokenizer = read_tokenizer(path, revision=commit, trust_remote_code=trust_remote_code, key=KEY)
        target = cls(model, tokenizer, path, commit, parallel if has_layers else "none", has_layers, weights_hash(source) if local else "")
        if has_layers and parallel == "none" and not (own or quantise):  # a forward changes how bitsandbytes stores its weights
            target.check_trial()
        return target

    def check_trial(self) -> None:
        """Run a few tokens. Raises ValueError if what comes out is no number: a config's values may spoil weights that are right."""
        hidden = self.forward(torch.arange(4, device=self.device)[None] % self.vocab_size).hidden
        if not hidden.isfinite().all() or self.logits(hidden).isnan().any():
            raise ValueError(
                f"target {self.name!r} gives NaN or infinite hidden states in {self.dtype}; correct its config.json, or take another dtype"
            )

    @classmethod
    def wrap(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, name: str = "in-memory") -> "Target":
        """Take a model that is already in memory; it is frozen in place."""
        return cls(model, tokenizer, name, "")

    def mask_blocks(self) -> None:
        """On a GPU use FlexAttention if the model supports it: its mask has an entry for each block, not for each of [S,S] pairs."""
        if self.device.type == "cuda" and self.model._supports_flex_attn:
            self.model.set_attn_implementation("flex_attention")

    def pack(self) -> None:
        """For decoding on a CPU: keep the linear layers' weights in the CPU's own layout too, where that is faster (`inference/packed_linear.py`).

        Only for weights that are plain tensors, neither cut over ranks nor quantised.
        """
        if not self.collective and not quantised_as(self.model.config):
            pack(self.model)

    @property
    def by_document(self) -> bool:
        return self.has_layers and not self._compiled and attends_by_document(self.model)

    @property
    def collective(self) -> bool:
        """Whether a forward involves all ranks, so that each must run as many; `logits` and `embed` never do."""
        return self.parallel in COLLECTIVE

    @property
    def device(self) -> torch.device:
        return self.model.device if self.has_layers else self.head_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def require_tokenizer(self) -> PreTrainedTokenizerBase:
        """Its tokenizer. Raises ValueError where it has none."""
        return require_tokenizer(self.tokenizer, self.name)

    @property
    def head_weight(self) -> Tensor:
        """The output head's weight [V,H]; scaling and soft-capping after it are in `logits` only."""
        return self._head.weight

    @cached_property
    def identity(self) -> TargetIdentity:
        dtype = "+".join(filter(None, (str(self.dtype).removeprefix("torch."), quantised_as(self.model.config))))
        return TargetIdentity(
            self.name, self.revision, dtype, config_hash(self.model.config), tokenizer_hash(self.tokenizer), self._weights_hash
        )

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        tree: Any = None,
        documents: Documents | None = None,
        taps: Sequence[int] = (),
    ) -> TargetOutput:
        """Run the base decoder, without the head.

        Args:
            input_ids: [B,S].
            position_ids: [B,S]; None counts from 0.
            attention_mask: what transformers takes as one; None is causal.
            cache: a transformers cache to read and extend.
            tree, documents: inputs of `inference/attention.py` or of `models/document_attention.py`.
            taps: decoder layers, counted from 0, whose outputs are returned.

        Returns:
            hidden [B,S,H], after the final norm: what the head reads; and taps [B,S,T,H], or None without taps.

        Raises:
            ValueError: a tap outside 0..L-1, or a target that was loaded without its decoder layers.
            RuntimeError: a tap that did not arrive.
        """
        if not self.has_layers:
            raise ValueError(
                f"target {self.name!r} was loaded without its decoder layers, since its features come from a store, and cannot run; "
                "load it with layers=True, or take features.mode=online"
            )
        self.watch(taps)
        extra = {"tree_attention": tree} if tree is not None else {"documents": documents} if documents else {}
        attention = document_attention(self.model) if documents else nullcontext()
        # Features may be computed in one thread while another decodes.
        alone = running(self.model) if tree is not None else own_attention(self.model)
        with alone, packed_weights(), attention, self._catching(taps) as caught:
            output = self.decoder(
                input_ids=input_ids,
                position_ids=position_ids,
                attention_mask=attention_mask,
                **{self._cache_name: cache},
                use_cache=cache is not None,
                **extra,
            )
        if missing := [tap for tap in taps if tap not in caught]:
            raise RuntimeError(
                f"taps {missing} of target {self.name!r} did not arrive: their layers did not run, or were compiled before they were tapped; "
                "call target.watch(taps) before torch.compile"
            )
        hidden: Tensor = output.last_hidden_state
        return TargetOutput(hidden, torch.stack([caught[tap].to(hidden.device) for tap in taps], dim=2) if taps else None)

    __call__ = forward

    def features(self, batch: dict[str, Tensor], taps: Sequence[int] = ()) -> TargetOutput:
        """The features of a packed batch (`data/packing.py`), as `forward` returns them; no document sees another.

        Features that the batch brings from a store ("hidden" [B,S,H], "taps" [B,S,T,H]) are returned as they are. Under tensor parallelism
        each rank gives rows of its own, although all ranks run the same rows in a `forward`.
        """
        if "hidden" in batch:
            return TargetOutput(hidden=batch["hidden"], taps=batch.get("taps"))

        def run(inputs: dict[str, Tensor]) -> TargetOutput:
            ids, positions = inputs.values()
            with own_attention(self.model):
                real = self.by_document and type(positions) is Tensor  # `draftsmith plan` runs it on fake tensors
            more: dict[str, Any] = {"documents": documents_of(positions)} if real else apart(self.config, self.dtype, inputs)
            with self._replaced_forwards(self._compiled):
                return self.forward(ids, taps=taps, **{"position_ids": positions, **more})

        inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
        out = in_turn(run, inputs) if self.parallel == "tensor" else run(inputs)
        device = inputs["input_ids"].device
        return TargetOutput(out.hidden.to(device), None if out.taps is None else out.taps.to(device))

    @contextmanager
    def without(self, layers: Iterable[int]) -> Iterator[None]:
        """Context in which these decoder layers return their input unchanged."""

        def forward(hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
            return hidden_states

        # Another thread, which makes features ahead, must not meet them.
        with running(self.model), self._replaced_forwards(dict.fromkeys(layers, forward)):
            yield

    def compile(self) -> None:
        """Make `features` run compiled decoder layers: one graph for all of them. Hooks stay outside the graph, so that taps arrive."""
        self._compiled = {number: torch.compile(layer.forward) for number, layer in enumerate(self.layers)}

    @contextmanager
    def _replaced_forwards(self, forwards: dict[int, Callable[..., Any]]) -> Iterator[None]:
        """Context in which these decoder layers, by number, have other forwards."""
        # Accelerate gives instances a forward of their own, where the layers are spread over devices.
        before = [(self.layers[layer].__dict__, self.layers[layer].__dict__.get("forward")) for layer in forwards]
        for (attributes, _), forward in zip(before, forwards.values(), strict=True):
            attributes["forward"] = forward
        try:
            yield
        finally:
            for attributes, own in before:
                del attributes["forward"]
                if own is not None:
                    attributes["forward"] = own

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

    @contextmanager
    def _catching(self, taps: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Context in which the outputs of these layers arrive in the dictionary that it gives."""
        self._wanted, self._caught = frozenset(taps), {}
        try:
            yield self._caught
        finally:
            self._wanted, self._caught = frozenset(), {}

    def _catcher(self, tap: int) -> Callable[..., None]:
        def catch(_module: nn.Module, _args: Any, output: Any) -> None:
            if tap in self._wanted:
                self._caught[tap] = output[0] if isinstance(output, tuple) else output

        return catch

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [...,H] -> the model's own logits [...,V], scaling and soft-capping after the head included.

        Differentiable with respect to hidden.
        """
        with packed_weights():
            return self._head(hidden)

    def float32_logits(self, hidden: Tensor) -> Tensor:
        """hidden [...,H] -> logits [...,V] in float32 whatever the weights' dtype: the arbiter of near ties."""
        return self._head.in_float32(hidden)

    @property
    def head_scale(self) -> float:
        """What `logits` multiplies the bare head's output by (Cohere, Granite), soft-capping aside; 1.0 for most models."""
        return self._head.scale

    @property
    def soft_cap(self) -> float | None:
        """c of the soft-capping c · tanh(x / c) that `logits` ends with (Gemma 2); None for most models."""
        return self._head.soft_cap

    def embed(self, ids: Tensor) -> Tensor:
        """ids [...] -> input embeddings [...,H], as the model's embedding module returns them.

        A scaling inside that module (Gemma's √H, from transformers 5) is included; one that the decoder's forward applies
        afterwards (Granite's multiplier) is not.
        """
        return self.model.get_input_embeddings()(ids)


def apart(config: PretrainedConfig, dtype: torch.dtype, batch: dict[str, Tensor]) -> dict[str, Any]:
    """What a base decoder needs beside the tokens of a packed batch, so that no document sees another.

    transformers sees the documents in the position ids, and makes what the attention in use needs: a dense mask for SDPA, a block mask for
    FlexAttention, nothing for varlen. It is called here, since some models (gpt-oss) do not hand their positions to it.

    Args:
        config: the text model's config.
        dtype: of the hidden states.
        batch: position_ids [B,S], which begin at 0 in each document.

    Returns:
        The arguments position_ids and attention_mask of the decoder.
    """
    positions = batch["position_ids"]
    shape = torch.empty(*positions.shape, 0, dtype=dtype, device=positions.device)
    mask: Any = create_masks_for_generate(config, shape, None, None, position_ids=positions)
    return {"position_ids": positions, "attention_mask": mask}


def _read_complete(
    path: str, source: str, commit: str, device: torch.device | str, parallel: str, quantised: str, **arguments: Any
) -> PreTrainedModel:
    read = partial(
        AutoModelForCausalLM.from_pretrained,
        source,
        revision=commit or "main",
        local_files_only=isdir(source),
        use_safetensors=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # check_loaded names them
        **arguments,
    )
    try:
        model, info = lay_out(read, parallel, device)
    except (ImportError, *UNEXPECTED) as error:
        if not quantised:
            raise
        raise ValueError(f"{path!r} cannot be read as {quantised}: {in_words(error)}") from None
    check_loaded(path, without_mtp(info))
    return model


def _read_ends(
    path: str, source: str, commit: str, device: torch.device | str, *, config: PretrainedConfig, quantization_config: Any, **arguments: Any
) -> PreTrainedModel | None:
    """The model with its input embeddings and output head alone. None where these are quantised, or an adapter may change them."""
    if model_file(source, "adapter_config.json", commit) is not None:
        return None
    with not_partitioned():
        model, info = load_ends(source, config, commit, device=device, **arguments)
    if info["missing_keys"] and quantised_as(config):
        return None
    check_loaded(path, info)
    if quantization_config is not None:
        model.config.quantization_config = quantization_config  # the identity names how the target of the features is quantised
    return model
