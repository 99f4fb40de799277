"""Draft models in the folder that vLLM, SGLang, TensorRT-LLM and transformers load: an ordinary checkpoint, with the keys that older readers need.

Letters: V the target's vocabulary · D rows of the draft model's logits.
"""

import copy
import json
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.inference import durable
from draftsmith.inference.reading import read_json
from draftsmith.models.saving import save_model

__all__ = ["GENERATION", "fitted", "rounded", "write_student"]

# generation_config.json: by these transformers' assisted generation drafts as here; without them it takes 20 tokens, and stops at 0.4.
GENERATION = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")


@torch.no_grad()
def fitted(model: PreTrainedModel, vocab_size: int) -> PreTrainedModel:
    """A copy with V rows of embeddings and logits, as engines want them; the model itself where it has them.

    Surplus rows stand for no token and go. A token that the draft model lacks gets a copy of its last row: this is what it reads for such a token here
    too, and as a logit it never comes before the last token's.
    """
    rows = len(model.get_input_embeddings().get_parameter("weight"))
    if rows == vocab_size:
        return model
    model = copy.deepcopy(model)
    tied = model.config.get_text_config().tie_word_embeddings

    def cut(weight: Tensor) -> Tensor:
        return torch.cat([weight[:vocab_size], weight[-1:].expand(max(0, vocab_size - rows), -1)]).clone()

    for module in (model.get_input_embeddings(), *(() if tied else (model.get_output_embeddings(),))):
        module = cast(Any, module)
        module.weight = nn.Parameter(cut(module.weight), requires_grad=False)
        for name in ("num_embeddings", "out_features"):
            if hasattr(module, name):
                setattr(module, name, vocab_size)
        if getattr(module, "bias", None) is not None:
            module.bias = nn.Parameter(cut(module.bias[:, None])[:, 0], requires_grad=False)
    cast(Any, model.config.get_text_config()).vocab_size = vocab_size
    cast(Any, model).tie_weights()
    return model


def write_student(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    vocab_size: int,
    entry: dict[str, Any],
    depth: int,
    dtype: torch.dtype,
) -> None:
    """Write the checkpoint and the target's tokenizer.

    Args:
        model: the draft model.
        tokenizer: the target's.
        folder: empty.
        vocab_size: V.
        entry: the key `draftsmith` of its config: target, tree, confidence, training.
        depth: tokens of a draft.
        dtype: of the weights.

    Raises:
        OSError: the disk.
    """
    model = copy.deepcopy(fitted(model, vocab_size)).to(dtype)  # pyright: ignore[reportArgumentType, reportCallIssue]
    cast(Any, model.config).draftsmith = entry
    save_model(model, folder)
    tokenizer.save_pretrained(folder)
    _change(folder / "config.json", older_keys)
    values = dict(zip(GENERATION, (depth, "constant", entry["confidence"]), strict=True))
    _change(folder / "generation_config.json", lambda raw: raw | values)
    _change(folder / "tokenizer_config.json", _older_tokenizer)


def rounded(model: PreTrainedModel, vocab_size: int, dtype: torch.dtype) -> PreTrainedModel:
    """What an engine computes with that has loaded such a checkpoint: the model with V rows and the weights of `dtype`, in float32. Buffers are
    no part of it: RoPE's frequencies are exact, whatever the weights are."""
    model = copy.deepcopy(fitted(model, vocab_size)).float()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).float()
    return model


def older_keys(raw: dict[str, Any]) -> dict[str, Any]:
    """A config.json with the keys of transformers 4 too, which takes θ = 10,000 and float32 without a word where they are missing."""
    rope = raw.get("rope_parameters") or {}
    kind = rope.get("rope_type", "default")
    older: dict[str, Any] = {}
    if "rope_theta" in rope:  # where layers differ, transformers 4 has keys of the architecture's own
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        older = {"rope_theta": rope["rope_theta"], "rope_scaling": None if kind == "default" else scaling}
    return raw | older | {"torch_dtype": raw.get("dtype")}


def _older_tokenizer(raw: dict[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json with a class that transformers 4 knows, and without what the loader noted of this machine."""
    raw = {key: value for key, value in raw.items() if key not in ("is_local", "local_files_only")}
    return raw | ({"tokenizer_class": "PreTrainedTokenizerFast"} if raw.get("tokenizer_class") == "TokenizersBackend" else {})


def _change(file: Path, change: Any) -> None:
    raw = read_json(file) if file.exists() else {}
    durable.write_text(file, json.dumps(change(raw), indent=2, ensure_ascii=False) + "\n")
