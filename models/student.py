"""Students: small language models that learn to draft for a frozen target (DistillSpec, Zhou et al. 2023,
https://arxiv.org/abs/2310.08461). A student is an ordinary transformers causal LM. This module makes one, fresh, from a checkpoint or cut
out of the target, and reads its hidden states and its head.

Letters: B rows · S positions · V target vocabulary · D rows of the student's logits · H the target's hidden size · W the student's · m
supervised positions.
"""

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers import initialization as init
from transformers.configuration_utils import PretrainedConfig

from draftsmith.inference.progress import Bar
from draftsmith.models.adapter import plain, seeded
from draftsmith.models.head import Head
from draftsmith.models.model_files import read_config
from draftsmith.models.target import Target, apart
from draftsmith.models.target_defaults import rope_theta
from draftsmith.models.tokenizer_check import check_draft

CHUNK = 1 << 22  # logits of each model that are compared at a time

# The axes of a weight, by the name of its module; a bias has the first axis alone.
_AXES = {
    **dict.fromkeys(("embed_tokens", "lm_head"), ("token", "hidden")),
    **dict.fromkeys(("k_proj", "v_proj"), ("key", "hidden")),
    **dict.fromkeys(("gate_proj", "up_proj"), ("neuron", "hidden")),
    **{"q_proj": ("query", "hidden"), "o_proj": ("hidden", "query"), "down_proj": ("hidden", "neuron")},
}


def fresh(
    target: Target,
    *,
    layers: int,
    hidden_size: int,
    heads: int,
    kv_heads: int | None = None,
    intermediate_size: int | None = None,
    seed: int = 0,
) -> PreTrainedModel:
    """A float32 Llama with random weights and tied embeddings, and the target's V, special tokens, context, RoPE base and norm epsilon.

    Args:
        kv_heads: as many as heads by default.
        intermediate_size: by default 8/3 of hidden_size, rounded up to a multiple of 8.
        seed: the weights depend on it alone, not on what was drawn before.

    Raises:
        ValueError: heads that do not divide the hidden size into even parts, or KV heads that do not divide the heads.
    """
    kv_heads = kv_heads or heads
    if hidden_size % (2 * heads) or heads % kv_heads:
        got = f"hidden_size {hidden_size}, {heads} heads, {kv_heads} KV heads"
        raise ValueError(f"got {got}; expected a size that is a multiple of twice the heads, and heads that are a multiple of the KV heads")
    own: Any = target.config
    special: dict[str, Any] = {name: getattr(own, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size or -(-hidden_size // 3) * 8,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=target.max_positions,
        rms_norm_eps=getattr(own, "rms_norm_eps", 1e-6),
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta(own)},
        tie_word_embeddings=True,
        **special,
    )
    with seeded(seed):
        model = LlamaForCausalLM(config).float()
    scale_residuals(model)
    model.generation_config = copy.deepcopy(target.model.generation_config)
    return cast(Any, model).to(target.device).eval()


@torch.no_grad()
def scale_residuals(model: LlamaForCausalLM) -> None:
    """Divide the projections that add to the residual stream by √(2·layers) (GPT-2, section 2.3)."""
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.div_(math.sqrt(2 * model.config.num_hidden_layers))


def existing(path: str, target: Target, *, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedModel:
    """A checkpoint with the target's tokens, from a folder or the Hub: float32, on the target's device, trainable.

    Raises:
        FileNotFoundError, ValueError: as `check_draft` and `Target.load`; other tokens are refused before weights are read.
    """
    check_draft(target, path, revision=revision, trust_remote_code=trust_remote_code)
    loaded = Target.load(path, dtype=torch.float32, device=target.device, revision=revision, trust_remote_code=trust_remote_code)
    return loaded.model.requires_grad_(True)


def unread(path: str, key: str, *, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedModel:
    """A float32 model with a checkpoint's config; the checkpoint's weights are not read. Arguments and errors are those of `read_config`."""
    config = read_config(path, revision=revision, trust_remote_code=trust_remote_code, key=key)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)


def pruned(
    target: Target,
    *,
    layers: int | Sequence[int],
    hidden_size: int | None = None,
    heads: int | None = None,
    intermediate_size: int | None = None,
    rows: dict[str, Tensor] | None = None,
    choose: Callable[[Target, dict[str, Tensor], int], list[int]] | None = None,
) -> PreTrainedModel:
    """A float32 copy of the target with some of its layers, and narrower where sizes are given.

    Channels, heads and neurons stay by their activations (Minitron, Muralidharan et al. 2024, https://arxiv.org/abs/2407.14679). The
    size of a head does not change.

    Args:
        layers: the numbers of the layers that stay, or how many; then `choose` says which, by default `most_needed`.
        hidden_size: channels that stay, by the mean |output| of the norms, summed over the norms. Their gains are multiplied by √(H/W).
        heads: query heads that stay in each attention, in complete KV groups, by the mean norm of their input to o_proj.
        intermediate_size: neurons that stay in each MLP, by the mean |input of down_proj|.
        rows: a packed batch to measure on (`data/packing.py`: input_ids, position_ids, loss_mask, document [B,S]).
        choose: (target, rows, how many) -> the layers that stay, in order.

    Raises:
        ValueError: layers or sizes that the target has not, no rows where something is measured, or an architecture that cannot be cut.
    """
    sizes = _given_sizes(hidden_size, heads, intermediate_size)
    if rows is None and (sizes or isinstance(layers, int)):
        raise ValueError("got no rows to measure on what can go; give a packed batch, or name the layers and keep the sizes")
    staying = _checked_layers(target, layers)
    config = _config(target, staying, sizes)  # refuses impossible sizes before anything is measured
    axes = _axes(target) if sizes else {}
    if isinstance(layers, int) and rows is not None:
        staying = _checked_layers(target, (choose or most_needed)(target, rows, layers))
        config = _config(target, staying, sizes)
    if not sizes or rows is None:
        return _copy(target, staying, config, lambda _name, tensor: tensor)
    return _copy(target, staying, config, _narrowing(target, staying, config, axes, _without_features(target, rows)))


def outline(
    target: Target,
    *,
    layers: int | Sequence[int],
    hidden_size: int | None = None,
    heads: int | None = None,
    intermediate_size: int | None = None,
) -> PreTrainedModel:
    """A float32 model of the sizes that `pruned` gives, without the target's weights. Raises ValueError for sizes as `pruned` does."""
    sizes = _given_sizes(hidden_size, heads, intermediate_size)
    return type(target.model)(_config(target, _checked_layers(target, layers), sizes)).float()


def most_needed(target: Target, rows: dict[str, Tensor], count: int) -> list[int]:
    """The `count` layers that stay when `removals` has chosen the others, in order. It prints them. Arguments and errors are those of `removals`."""
    removed = removals(target, rows, target.num_layers - count)
    staying = sorted(set(range(target.num_layers)) - removed.keys())
    steps = ", ".join(f"{layer} {acceptance:.3f}" for layer, acceptance in removed.items()) or "all stay"
    print(f"layers {', '.join(map(str, staying))} of {target.num_layers} stay; acceptance left as others went: {steps}", flush=True)
    return staying


def removals(target: Target, rows: dict[str, Tensor], count: int) -> dict[int, float]:
    """Choose `count` layers to remove, one after the other: each time the layer whose loss changes the target's distribution least.

    A removed layer hands its input on. Removing layers by measured influence: ShortGPT (Men et al. 2024, https://arxiv.org/abs/2403.03853).
    Acceptance falls as layers go, so what was measured earlier without a layer bounds what would be measured now: only layers whose bound is
    ahead are measured again (Minoux's accelerated greedy search, 1978).

    Args:
        rows: a packed batch to measure on.
        count: layers to remove.

    Returns:
        Layer -> the acceptance that is left after its removal, the mean of Σ_v min(p, q) over supervised positions, where p is the
        distribution of the target with all its layers. In the order of removal.

    Raises:
        ValueError: rows without supervised tokens, or an architecture whose layers do not return one tensor.
    """
    rows = _without_features(target, rows)
    supervised = rows["loss_mask"][:, 1:]  # the distribution of a token is at the position before it
    if not supervised.any():
        raise ValueError("got rows without supervised tokens to measure on; give others")

    removed: dict[int, float] = {}
    outputs: dict[int, Tensor] = {}  # of each layer, where those that have gone hand their input on

    def run() -> Tensor:
        return target.features(rows).hidden[:, :-1][supervised]

    def run_and_record() -> Tensor:
        def record(number: int, output: Any) -> None:
            if not isinstance(output, Tensor):
                raise ValueError(
                    f"a layer of {type(target.model).__name__} gives more than a tensor: none can be left out; name those to keep"
                )
            outputs[number] = output

        with ExitStack() as hooks, target.without(removed):
            for number, layer in enumerate(target.layers):
                hooks.enter_context(layer.register_forward_hook(lambda _module, _args, output, number=number: record(number, output)))
            return run()

    def without(layer: int) -> float:
        """The acceptance without this layer and those that have gone. The layers before it are not run: what they give is recorded."""
        with ExitStack() as hooks, target.without({*range(layer + 1), *removed}):
            if layer:
                hooks.enter_context(target.layers[layer].register_forward_hook(lambda *_: outputs[layer - 1]))
            return _acceptance(target, full, run())

    full = run_and_record()
    bounds = dict.fromkeys(range(target.num_layers), math.inf)
    with Bar("layers left out", count, show=count > 0) as bar:
        while len(removed) < count:
            measured: set[int] = set()
            while (best := max(bounds, key=bounds.__getitem__)) not in measured:
                bounds[best] = without(best)
                measured.add(best)
                bar.update(len(removed), f"acceptance {bounds[best]:.3f} without layer {best}")
            removed[best] = bounds.pop(best)
            bar.update(len(removed))
            if len(removed) < count:
                run_and_record()
    return removed


def hidden(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The student's last hidden states [B,S,W] along a packed batch, with gradients. Documents do not see each other.

    A token that the student lacks is read as its last token, as in drafting.
    """
    base = plain(model)
    ids = batch["input_ids"].clamp(max=len(base.get_input_embeddings().get_parameter("weight")) - 1)
    return base.get_decoder()(input_ids=ids, **apart(base.config.get_text_config(), base.dtype, batch), use_cache=False).last_hidden_state


def head(model: nn.Module, vocab_size: int) -> Tensor | Callable[[Tensor], Tensor]:
    """The student's head for the chunked losses: its weight [D,W], or a function hidden [m,W] -> logits [m,D] where it does more.

    D is the number of the student's logits, at most `vocab_size`: further logits of a padded student stand for no token.
    """
    base = plain(model)
    own = Head.of(base)
    if own.plain and type(own.module) is nn.Linear and own.module.bias is None:
        return own.weight[:vocab_size]
    return lambda hidden: own(hidden)[..., :vocab_size]


def head_size(model: nn.Module, vocab_size: int) -> int:
    """D of `head`."""
    return min(vocab_size, len(Head.of(plain(model)).weight))


def frozen(model: nn.Module, tokenizer: PreTrainedTokenizerBase | None) -> Target:
    """A Target that shares the student's weights, for decoding during training. Weights that require gradients still do.

    The model is in eval mode afterwards; after further training call `eval()` before decoding.
    """
    base = plain(model)
    before = [parameter.requires_grad for parameter in base.parameters()]
    try:
        return Target.wrap(base, tokenizer, name="student")
    finally:
        for parameter, trained in zip(base.parameters(), before, strict=True):
            parameter.requires_grad_(trained)


def _without_features(target: Target, rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """The rows' token ids, positions, mask and documents, on the target's device."""
    return {name: rows[name].to(target.device) for name in ("input_ids", "position_ids", "loss_mask", "document")}


def _acceptance(target: Target, full: Tensor, cut: Tensor) -> float:
    """Mean over m positions of Σ_v min(p, q), where p and q are the distributions that the head gives for hidden states full, cut [m,H]."""
    total = 0.0
    size = max(1, CHUNK // target.vocab_size)
    for states in zip(full.split(size), cut.split(size), strict=True):
        p, q = (target.logits(state).float().softmax(-1) for state in states)
        total += torch.minimum(p, q).sum().item()
    return total / len(full)


def _heads(config: Any) -> tuple[int, int, int]:
    """Query heads, KV heads, the size of a head."""
    heads = config.num_attention_heads
    return heads, getattr(config, "num_key_value_heads", None) or heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def _checked_layers(target: Target, layers: int | Sequence[int]) -> list[int]:
    """The layers that are named, or the first so many. Raises ValueError for layers that the target has not."""
    numbers, count = list(range(layers)) if isinstance(layers, int) else list(layers), target.num_layers
    if not numbers or numbers != sorted(set(numbers)) or not 0 <= numbers[0] <= numbers[-1] < count:
        raise ValueError(f"got layers={layers!r}; expected 1 to {count} of the {count} layers of target {target.name!r}, in order")
    return numbers


def _given_sizes(hidden_size: int | None, heads: int | None, intermediate_size: int | None) -> dict[str, int]:
    sizes = {"hidden_size": hidden_size, "num_attention_heads": heads, "intermediate_size": intermediate_size}
    return {name: size for name, size in sizes.items() if size is not None}


def _config(target: Target, layers: list[int], sizes: dict[str, int]) -> PretrainedConfig:
    """The target's config with these layers and sizes. Raises ValueError for a size that it cannot have."""
    config = copy.deepcopy(target.model.config)
    text: Any = config.get_text_config()
    for name, value in list(vars(text).items()):
        if isinstance(value, (list, tuple)) and len(value) == target.num_layers and not name.endswith("token_id"):
            setattr(text, name, type(value)(value[layer] for layer in layers))
    text.num_hidden_layers = len(layers)
    if not sizes:
        return config
    heads, kv_heads, size = _heads(text)
    for name, count in sizes.items():
        step = heads // kv_heads if name == "num_attention_heads" else 1
        if not 0 < count <= getattr(text, name) or count % step:
            raise ValueError(f"got {name} {count}; target {target.name!r} has {getattr(text, name)}: expected no more, in steps of {step}")
        setattr(text, name, count)
    text.head_dim, text.num_key_value_heads = size, text.num_attention_heads * kv_heads // heads
    try:
        cast(Any, config).validate()
    except StrictDataclassError as error:
        raise ValueError(f"{config.model_type!r} cannot have {sizes}: {error.__cause__}") from None
    return config


def _axes(target: Target) -> dict[str, tuple[str, ...]]:
    """The axes of each tensor of the target. Raises ValueError for a tensor whose axes are unknown."""
    heads, kv_heads, size = _heads(target.config)
    all_heads = {"q_norm": ("query", heads * size), "k_norm": ("key", kv_heads * size)}
    axes_of = {}
    for name, tensor in target.model.state_dict().items():
        *_, module, kind = ("", *name.split("."))[-3:]
        axes = _AXES.get(module, ())
        if module in all_heads:
            axis, width = all_heads[module]
            axes = (axis if len(tensor) == width else "within a head",)
        elif module.endswith("norm") and len(tensor) == target.hidden_size:
            axes = ("hidden",)
        if not axes or kind not in ("weight", "bias"):
            raise ValueError(f"{type(target.model).__name__} has no rule for the width of {name}; prune its layers alone")
        axes_of[name] = axes[: tensor.dim()]
    return axes_of


def _copy(target: Target, layers: list[int], config: PretrainedConfig, cut: Callable[[str, Tensor], Tensor]) -> PreTrainedModel:
    """A float32 model of the target's class with this config. `cut` maps the target's weights (of `layers`, and outside layers) to its own.

    Raises:
        ValueError: naming the first tensor whose shape is not the one that the config gives.
    """
    prefix = next(name for name, module in target.model.named_modules() if module is target.layers) + "."
    state = {}
    for name, tensor in target.model.state_dict().items():
        new_name = name
        if name.startswith(prefix):
            number, _, rest = name.removeprefix(prefix).partition(".")
            if int(number) not in layers:
                continue
            new_name = f"{prefix}{layers.index(int(number))}.{rest}"
        state[new_name] = cut(name, tensor)
    kind = type(target.model)
    with init.no_init_weights():
        model = kind(config).float()
    model.tie_weights()
    expected = model.state_dict()
    for name in sorted(expected.keys() | state.keys()):
        config_shape, left = (str(list(tensors[name].shape)) if name in tensors else "none" for tensors in (expected, state))
        if config_shape != left:
            got = f"its config makes {name} {config_shape}, it is left with {left}"
            raise ValueError(f"{kind.__name__} cannot be cut so: {got}; keep other layers")
    model.load_state_dict(state)
    model.generation_config = copy.deepcopy(target.model.generation_config)
    return cast(Any, model).to(target.device).eval()


def _narrowing(
    target: Target, layers: list[int], config: PretrainedConfig, axes: dict[str, tuple[str, ...]], rows: dict[str, Tensor]
) -> Callable[[str, Tensor], Tensor]:
    """A function (name, tensor of the target) -> the tensor's channels, heads and neurons that matter most on these rows."""
    heads, kv_heads, size = _heads(target.config)
    text: Any = config.get_text_config()
    counts = {"channel": text.hidden_size, "neuron": text.intermediate_size, "group": text.num_key_value_heads}
    widths = {"channel": {"hidden": 1}, "neuron": {"neuron": 1}, "group": {"query": heads // kv_heads * size, "key": size}}
    chosen_of: dict[tuple[str, str], Tensor] = {}
    for (part, path), importance in _importance(target, layers, rows).items():
        chosen = importance.argsort(descending=True, stable=True)[: counts[part]].sort().values
        for axis, width in widths[part].items():
            chosen_of[axis, path] = (chosen[:, None] * width + torch.arange(width)).flatten()
    gain = math.sqrt(target.hidden_size / text.hidden_size)

    def cut(name: str, tensor: Tensor) -> Tensor:
        path, module, kind = ("", *name.rsplit(".", 2))[-3:]
        if axes[name] == ("hidden",) and module.endswith("norm") and kind == "weight":
            # Had the removed channels been zero, the mean square grows to H/W times. (Tiny target, W 192: acceptance 0.63, without 0.55.)
            added = _added(target.model.get_submodule(name.removesuffix(".weight")))
            tensor = (tensor.float() + added) * gain - added
        for dim, axis in enumerate(axes[name]):
            index = chosen_of.get((axis, "" if axis == "hidden" else path))
            tensor = tensor if index is None else tensor.index_select(dim, index.to(tensor.device))
        return tensor

    return cut


def _added(norm: nn.Module) -> float:
    """What a norm adds to its weight before it multiplies by it: 1 (Gemma) or 0."""
    weight = norm.get_parameter("weight")
    x = torch.ones_like(weight)
    x[::2] = -1  # a mean of zero, for norms that subtract it
    return float((norm(x) * x - weight).mean().round())


def _importance(target: Target, layers: list[int], rows: dict[str, Tensor]) -> dict[tuple[str, str], Tensor]:
    """Mean size of activations over the rows' tokens, with these layers alone.

    Returns:
        By ("neuron", path of an MLP): [neurons]; by ("group", path of an attention): [KV heads]; by ("channel", ""): [H].
    """
    used = (rows["document"] >= 0).flatten()
    parts = {"down_proj": "neuron", "o_proj": "group"}
    importance: dict[tuple[str, str], Tensor] = {}

    def add(key: tuple[str, str], x: Tensor) -> None:
        count = _heads(target.config)[1] if key[0] == "group" else x.shape[-1]
        mean = x.flatten(0, 1)[used.to(x.device)].float().unflatten(-1, (count, -1)).norm(dim=-1).mean(0).cpu()
        importance[key] = importance.get(key, 0) + mean

    with ExitStack() as hooks, target.without(set(range(target.num_layers)) - set(layers)):
        for name, module in target.model.named_modules():
            path, _, kind = name.rpartition(".")
            if kind in parts:
                hooks.enter_context(module.register_forward_pre_hook(lambda _, args, key=(parts[kind], path): add(key, args[0])))
            elif kind.endswith("norm") and kind not in ("q_norm", "k_norm"):
                hooks.enter_context(module.register_forward_hook(lambda _, _args, output: add(("channel", ""), output)))
        target.features(rows)
    return importance
