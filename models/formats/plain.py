"""A second reading of exported folders, in plain torch and by the folder's own names: what `verify` holds our drafters to.

It shares nothing with the modules that train and decode, nor with the layouts that write: no cache, every step runs all pairs from the first.

Letters: S positions · V target vocabulary · D draft vocabulary · H hidden size · L target layers · K draft steps.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file
from torch import Tensor

__all__ = [
    "GGUF_KINDS",
    "Inputs",
    "dflash_logits",
    "eagle_logits",
    "gguf_content",
    "llama_logits",
    "medusa_logits",
    "mlp_logits",
    "read_folder",
    "tapped",
]

IDS = "eagle_aux_hidden_state_layer_ids"
# Our table of names of a GGUF file's parts, apart from the one that writes it.
_GGUF = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj"}
_GGUF |= {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_norm": "post_attention_layernorm"}
_GGUF |= {"attn_norm": "input_layernorm", "attn_norm_2": "hidden_norm"}
GGUF_KINDS = ("llama", "eagle3")
_GGUF_ENDS = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head", "fc": "fc"}

_DFLASH = [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
_DFLASH += [f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")] + ["input_layernorm", "post_attention_layernorm"]

Logits = dict[tuple[int, int], Tensor]  # (root, draft step) -> [V], −inf outside the draft vocabulary


class Inputs(NamedTuple):
    """What a drafter reads of a target along a text.

    Attributes:
        tokens: [S].
        states: [L+1,S,H], the input of each layer, and the last one's output.
        hidden: [S,H], after the target's last norm.
        embedding: the target's [V,H], for folders without one.
        head: the target's, hidden [...,H] -> [...,V].
    """

    tokens: Tensor
    states: Tensor
    hidden: Tensor
    embedding: Tensor
    head: Callable[[Tensor], Tensor]


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json, and all tensors in float32 but for integers and flags."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    for name in [name for name in tensors if name.endswith(".weight_scale")]:  # 8 bits, by channel
        base, scale = name.removesuffix("_scale"), tensors.pop(name).float()
        if base not in tensors:
            rows, columns = tensors.pop(f"{base}_shape").tolist()
            packed = tensors.pop(f"{base}_packed")
            steps = torch.stack([(packed >> shift & 255) - 128 for shift in (0, 8, 16, 24)], -1)
            tensors[base] = steps.reshape(rows, -1)[:, :columns]
        tensors[base] = tensors[base].float() * scale
    return config, {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def gguf_content(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The entries of a GGUF file and its tensors in float32 (int64 for maps), under safetensors' names; no tensors of other `GGUF_KINDS`.

    Raises:
        ValueError: a damaged file, or weights in a format that the package gguf does not read.
    """
    from gguf import GGUFReader
    from gguf.quants import dequantize

    try:
        reader = GGUFReader(file)
        entries = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, LookupError, OverflowError) as error:
        raise ValueError(f"{file} is damaged or no GGUF file ({error}); copy it again") from None
    tensors = {}
    for tensor in reader.tensors if entries.get("general.architecture") in GGUF_KINDS else ():
        pieces = str(tensor.name).split(".")
        layer = len(pieces) == 4 and pieces[0] == "blk"
        name = f"layers.{pieces[1]}.{_GGUF.get(pieces[2], pieces[2])}.weight" if layer else _GGUF_ENDS.get(pieces[0], pieces[0]) + ".weight"
        name = name.removesuffix(".weight") if pieces == ["d2t"] else name
        integer = tensor.data.dtype.kind == "i"
        try:
            values = tensor.data if integer else dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            raise ValueError(f"{file}: {tensor.name} is in {tensor.tensor_type.name}, which is not read here; export it again") from None
        tensors[name] = torch.from_numpy(values.copy()).reshape([int(size) for size in reversed(tensor.shape)])
    return entries, tensors


def tapped(engine: str, config: dict[str, Any], folder: Path, layers: int) -> list[int]:
    """The layers whose inputs an engine captures for a folder, ascending."""
    usual, inner = [2, layers // 2, layers - 3], config.get("eagle_config") or {}
    if engine == "eagle":
        return usual
    if engine == "sglang":
        return [layer + 1 for layer in inner[IDS]] if inner.get(IDS) else usual
    if engine == "tensorrt-llm":
        file = folder / "tensorrt-llm.yaml"
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))["speculative_config"] if file.is_file() else {}
        return [layer + 1 for layer in settings.get("eagle3_layers_to_capture", [layer - 1 for layer in usual])]
    if engine == "gguf":
        return list(config["eagle3.target_layers"])
    return sorted(set(config.get(IDS) or inner.get(IDS) or usual))


class _Sizes(NamedTuple):
    heads: int
    kv_heads: int
    dim: int
    eps: float
    theta: float
    interleaved: bool


def _sizes(config: dict[str, Any]) -> _Sizes:
    flat = config | (config.get("transformer_layer_config") or {})
    heads = flat["num_attention_heads"]
    theta = flat.get("rope_theta") or (flat.get("rope_parameters") or {}).get("rope_theta") or 10000.0
    dim = flat.get("head_dim") or flat["hidden_size"] // heads
    return _Sizes(heads, flat.get("num_key_value_heads") or heads, dim, flat.get("rms_norm_eps", 1e-6), theta, False)


def _gguf_sizes(entries: dict[str, Any], kind: str) -> _Sizes:
    keys = ("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon", "rope.freq_base")
    heads, kv_heads, dim, eps, theta = (entries[f"{kind}.{key}"] for key in keys)
    return _Sizes(heads, kv_heads, dim, eps, theta, True)


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _turn(x: Tensor, sizes: _Sizes) -> Tensor:
    """RoPE of x [heads,S,dim] at positions 0, 1, …: the halves turn against each other, or neighbours where they are interleaved."""
    angles = torch.arange(x.shape[1])[:, None] * sizes.theta ** (-torch.arange(0, sizes.dim, 2) / sizes.dim)
    cos, sin = angles.cos(), angles.sin()
    if sizes.interleaved:
        first, second = x[..., 0::2], x[..., 1::2]
        return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _layer(tensors: dict[str, Tensor], prefix: str, x: Tensor, residual: Tensor, sizes: _Sizes) -> Tensor:
    """A Llama layer after its first norm: x [S,·] is what attention reads, residual [S,H] what its output is added to."""

    def apply(name: str, value: Tensor) -> Tensor:
        return value @ tensors[f"{prefix}{name}_proj.weight"].T

    query, key, value = (apply(f"self_attn.{letter}", x).view(len(x), -1, sizes.dim).transpose(0, 1) for letter in "qkv")
    groups = sizes.heads // sizes.kv_heads
    query, key, value = _turn(query, sizes), _turn(key, sizes).repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    scores = query @ key.transpose(1, 2) / sizes.dim**0.5 + torch.full((len(x), len(x)), -torch.inf).triu(1)
    x = residual + apply("self_attn.o", (scores.softmax(-1) @ value).transpose(0, 1).flatten(1))
    y = _rms(x, tensors[f"{prefix}post_attention_layernorm.weight"], sizes.eps)
    return x + apply("mlp.down", F.silu(apply("mlp.gate", y)) * apply("mlp.up", y))


@torch.no_grad()
def llama_logits(config: dict[str, Any], tensors: dict[str, Tensor], tokens: Tensor, gguf: bool) -> Tensor:
    """tokens [S] -> logits [S,V] of a Llama, from a safetensors folder or from a GGUF file."""
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    sizes = _gguf_sizes(config, "llama") if gguf else _sizes(config)
    layers = config["llama.block_count"] if gguf else config["num_hidden_layers"]
    x = tensors["embed_tokens.weight"][tokens]
    for number in range(layers):
        prefix = f"layers.{number}."
        x = _layer(tensors, prefix, _rms(x, tensors[prefix + "input_layernorm.weight"], sizes.eps), x, sizes)
    return _rms(x, tensors["norm.weight"], sizes.eps) @ tensors.get("lm_head.weight", tensors["embed_tokens.weight"]).T


@torch.no_grad()
def medusa_logits(config: dict[str, Any], tensors: dict[str, Tensor], inputs: Inputs) -> Tensor:
    """hidden [S,H] -> logits [S,K,V]."""
    heads = config.get("medusa_num_heads") or config.get("num_heads") or config["num_medusa_heads"]
    layers = config.get("medusa_num_layers") or config.get("num_hidden_layers") or 1
    rows = []
    for i in range(heads):
        x = inputs.hidden
        for j in range(layers):
            name = f"{i}.{j}.linear" if f"{i}.{j}.linear.weight" in tensors else f"blocks.{i}.layers.{j}"
            x = x + F.silu(x @ tensors[name + ".weight"].T + (tensors[name + ".bias"] if config.get("medusa_fc_bias") else 0))
        own = next((tensors[name] for name in (f"{i}.{layers}.weight", f"lm_heads.{i}.weight") if name in tensors), None)
        weight = tensors.get("lm_head.weight") if config.get("original_lm_head") else own
        rows.append(inputs.head(x) if weight is None else x @ weight.T)
    return torch.stack(rows, 1)


@torch.no_grad()
def mlp_logits(config: dict[str, Any], tensors: dict[str, Tensor], inputs: Inputs) -> Logits:
    """The logits of every head from every root, drafting along the text itself."""
    heads, inner = config["n_predict"], config["inner_dim"] or config["emb_dim"]
    state_weight = 0.5 ** (0.5 / heads)
    token_weight = (1 - state_weight**2) ** 0.5 * (inner / 2) ** 0.5
    tensors = {name.removeprefix("speculator."): tensor for name, tensor in tensors.items()}
    rows: Logits = {}

    def weight(part: str, i: int, kind: str = "weight") -> Tensor:
        """Of tied weights an engine may read each index, or the first one alone; other files' may be at any one."""
        least = int(part == "proj" and i > 0)
        near = (i, *range(least, heads)) if config.get("tie_weights") else (i,)
        return next(tensors[f"{part}.{j}.{kind}"] for j in near if f"{part}.{j}.{kind}" in tensors)

    for root in range(1, len(inputs.tokens)):
        state = inputs.hidden[root - 1]
        state = _rms(state, torch.tensor(0.5**0.5), 1e-6) if config.get("scale_input") else state
        for i, token in enumerate(inputs.tokens[root : root + heads]):
            x = weight("proj", i) @ state + token_weight / state_weight * weight("emb", i)[token]
            state = F.gelu(_rms(x, weight("ln", i), 1e-6) + weight("ln", i, "bias"))
            rows[root, i] = weight("head", i) @ state
    return rows


@torch.no_grad()
def dflash_logits(config: dict[str, Any], tensors: dict[str, Tensor], inputs: Inputs) -> Logits:
    """The logits of every row of the blocks of DFlash or DSpark, from every root; DSpark's along the text itself."""
    inner, sizes = config.get("dflash_config") or config, _sizes(config)
    markov, size = "markov_rank" in config, config.get("block_size") or inner["block_size"]
    mask = tensors.get("mask_embedding", inputs.embedding[inner["mask_token_id"]])
    context = _rms(
        torch.cat([inputs.states[layer + 1] for layer in inner["target_layer_ids"]], -1) @ tensors["fc.weight"].T,
        tensors["hidden_norm.weight"],
        sizes.eps,
    )
    later = torch.full((size, size), -torch.inf).triu(1) if inner.get("causal") else torch.zeros(size, size)
    rows: Logits = {}
    for root in range(1, len(inputs.tokens)):
        x = torch.stack([inputs.embedding[inputs.tokens[root]], *[mask] * (size - 1)])
        for number in range(config["num_hidden_layers"]):
            weights = {name: tensors[f"layers.{number}.{name}.weight"] for name in _DFLASH}
            normed = _rms(x, weights["input_layernorm"], sizes.eps)
            both = torch.cat((context[:root], normed))  # at positions 0, 1, … root + size − 1
            query, key, value = (
                (both @ weights[f"self_attn.{letter}_proj"].T).view(len(both), -1, sizes.dim).transpose(0, 1) for letter in "qkv"
            )
            query, key = (
                _turn(_rms(heads, weights[f"self_attn.{letter}_norm"], sizes.eps), sizes) for letter, heads in (("q", query), ("k", key))
            )
            key, value = (side.repeat_interleave(sizes.heads // sizes.kv_heads, 0) for side in (key, value))
            scores = query[:, root:] @ key.transpose(1, 2) / sizes.dim**0.5
            scores[:, :, root:] += later
            x = x + (scores.softmax(-1) @ value).transpose(0, 1).flatten(1) @ weights["self_attn.o_proj"].T
            y = _rms(x, weights["post_attention_layernorm"], sizes.eps)
            x = x + (F.silu(y @ weights["mlp.gate_proj"].T) * (y @ weights["mlp.up_proj"].T)) @ weights["mlp.down_proj"].T
        logits = inputs.head(_rms(x, tensors["norm.weight"], sizes.eps))
        for step in range(size - (not markov)):
            rows[root, step] = logits[step + (not markov)]
            if markov and root + step < len(inputs.tokens):
                before = tensors["markov_head.markov_w1.weight"][inputs.tokens[root + step]]
                rows[root, step] = rows[root, step] + tensors["markov_head.markov_w2.weight"] @ before
            elif markov:
                del rows[root, step]
    return rows


@torch.no_grad()
def eagle_logits(
    config: dict[str, Any], tensors: dict[str, Tensor], inputs: Inputs, taps: list[int], steps: int, gguf: bool = False
) -> Logits:
    """The logits of every draft step from every root, drafting along the text itself; P-EAGLE reads masks in its place.

    Args:
        config: config.json, or the entries of a GGUF file.
        tensors: of the file.
        inputs: what the target gave.
        taps: the layers whose inputs are read; none is EAGLE-1, which reads `inputs.hidden`.
        steps: K.
        gguf: whether the file is a GGUF.
    """
    sizes = _gguf_sizes(config, "eagle3") if gguf else _sizes(config)
    flags = {"norm_before_residual": config.get("eagle3.norm_before_residual")} if gguf else config
    embedding = tensors.get("embed_tokens.weight", inputs.embedding)
    layers = 1 if gguf else (config | (config.get("transformer_layer_config") or {}))["num_hidden_layers"]

    def norm(x: Tensor, name: str) -> Tensor:
        return _rms(x, tensors[name + ".weight"], sizes.eps)

    def run(features: Tensor, tokens: Tensor) -> Tensor:
        """Pairs of a feature and the token after it -> outputs before the last norm."""
        e = embedding[tokens]
        x = features if taps else torch.cat((e, features), -1) @ tensors["fc.weight"].T + tensors.get("fc.bias", 0)
        for number in range(layers):
            prefix = "midlayer." if "midlayer.self_attn.q_proj.weight" in tensors else f"layers.{number}."
            y = x
            if taps and number == 0:
                normed = norm(x, prefix + "hidden_norm")
                y, x = torch.cat((norm(e, prefix + "input_layernorm"), normed), -1), normed if flags.get("norm_before_residual") else x
            elif number:
                y = norm(x, prefix + "input_layernorm")
            x = _layer(tensors, prefix, y, x, sizes)
        return x

    def feature_of(states: Sequence[Tensor]) -> Tensor:
        states = [norm(state, f"fc_norm.{number}") for number, state in enumerate(states)] if flags.get("fc_norm") else states
        joined = torch.cat(list(states), -1)
        return (norm(joined, "input_norm") if flags.get("norm_before_fc") else joined) @ tensors["fc.weight"].T

    features = feature_of([inputs.states[layer] for layer in taps]) if taps else inputs.hidden
    rows: Logits = {}
    mask = feature_of(tensors["mask_hidden"].flatten(0, 1).split(inputs.hidden.shape[1], -1)) if "mask_hidden" in tensors else None
    for root in range(1, len(inputs.tokens)):
        chain, text = features[:root], inputs.tokens[1:]
        if mask is not None:
            text = torch.cat((text[:root], torch.tensor([config["mask_token_id"]] * steps)))
        for step in range(min(steps, len(inputs.tokens) - root)):
            output = run(chain, text[: root + step])[-1]
            normed = norm(output, "norm") if taps else output
            logits = normed @ tensors["lm_head.weight"].T if "lm_head.weight" in tensors else inputs.head(normed)
            if "d2t" in tensors:
                targets = tensors["d2t"] + (0 if gguf else torch.arange(len(logits)))
                logits = torch.full((len(embedding),), -torch.inf).index_put((targets,), logits)
            rows[root, step] = logits
            own = (normed if flags.get("norm_output") else output)[None]
            chain = torch.cat((chain, own if mask is None else mask))
    return rows
