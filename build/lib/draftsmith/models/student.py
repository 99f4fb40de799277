"""Students: small language models of their own that learn to draft for a frozen target (DistillSpec, Zhou et al. 2023,
https://arxiv.org/abs/2310.08461). A student is an ordinary transformers causal LM; here is where one comes from and how it is read.

Letters: B rows · S positions · V target vocabulary · D rows of the student's logits · H hidden size · L layers · W the student's hidden
size · M positions that bear loss.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers import initialization as init
from transformers.configuration_utils import PretrainedConfig

from draftsmith.inference.progress import Bar
from draftsmith.models.head import Head
from draftsmith.models.target import Target, apart, resolve_path
from draftsmith.models.tokenizer_check import check_draft

if TYPE_CHECKING:
    from peft import PeftModel

__all__ = [
    "existing",
    "fresh",
    "frozen",
    "head",
    "hidden",
    "merged",
    "outline",
    "pruned",
    "removals",
    "scale_residuals",
    "unread",
    "with_lora",
]

CHUNK = 1 << 22  # logits of one law that are looked at together

# What the dimensions of a weight stand for, by the name of its module; a bias has the first.
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
    """A Llama of random weights with the target's V, special tokens, context, RoPE base and norm epsilon; embeddings are tied.

    kv_heads: as many as heads by default · intermediate_size: 8/3 of hidden_size by default, up to a multiple of 8. The same for the same
    seed, whatever was drawn before; float32, on the target's device.

    Raises:
        ValueError: heads that do not divide the hidden size into even parts, or KV heads that do not divide the heads.
    """
    kv_heads = kv_heads or heads
    if hidden_size % (2 * heads) or heads % kv_heads:
        got = f"hidden_size {hidden_size}, {heads} heads, {kv_heads} KV heads"
        raise ValueError(f"got {got}; expected a size that is a multiple of twice the heads, and heads that are one of the KV heads")
    theirs: Any = target.config
    rope = getattr(theirs, "rope_parameters", None) or {}
    special: dict[str, Any] = {name: getattr(theirs, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size or -(-hidden_size // 3) * 8,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=target.max_positions,
        rms_norm_eps=getattr(theirs, "rms_norm_eps", 1e-6),
        rope_parameters={"rope_type": "default", "rope_theta": rope.get("full_attention", rope).get("rope_theta", 10_000.0)},
        tie_word_embeddings=True,
        **special,
    )
    with _seeded(seed):
        model = LlamaForCausalLM(config).float()
    scale_residuals(model)
    model.generation_config = copy.deepcopy(target.model.generation_config)
    return cast(Any, model).to(target.device).eval()


@torch.no_grad()
def scale_residuals(model: LlamaForCausalLM) -> None:
    """What is added to the residual stream starts smaller the deeper a fresh model is (GPT-2, section 2.3)."""
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.div_(math.sqrt(2 * model.config.num_hidden_layers))


def existing(path: str, target: Target, *, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedModel:
    """A checkpoint with the target's tokens, from a folder or the Hub; float32, on the target's device, trainable.

    Raises:
        FileNotFoundError, ValueError: what `check_draft` and `Target.load` refuse; other tokens before weights are read.
    """
    check_draft(target, path, revision=revision, trust_remote_code=trust_remote_code)
    loaded = Target.load(path, dtype=torch.float32, device=target.device, revision=revision, trust_remote_code=trust_remote_code)
    return loaded.model.requires_grad_(True)


def unread(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedModel:
    """A model of the config of a checkpoint, float32, its weights not read."""
    config = AutoConfig.from_pretrained(resolve_path(path), revision=revision, trust_remote_code=trust_remote_code)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)


def pruned(
    target: Target,
    *,
    layers: int | Sequence[int],
    hidden_size: int | None = None,
    heads: int | None = None,
    intermediate_size: int | None = None,
    rows: dict[str, Tensor] | None = None,
) -> PreTrainedModel:
    """A copy of the target with these layers, or the `layers` that `removals` leaves, and narrower where sizes are given; float32.

    Sizes, by activations (Minitron, Muralidharan et al. 2024, https://arxiv.org/abs/2407.14679): intermediate_size neurons of each MLP by
    the mean |input of down_proj|; of each attention `heads` query heads, in whole KV groups, by the mean norm of what they hand to o_proj;
    hidden_size channels by the mean |output| of the norms, summed over them; their gains grow by √(H/W). A head's size stays.
    rows: a packed batch (`data/packing.py`: input_ids, position_ids, loss_mask, document [B,S]) to measure on.

    Raises:
        ValueError: layers or sizes that the target has not, nothing to measure on, or an architecture that cannot be cut so, by name.
    """
    wanted = {"hidden_size": hidden_size, "num_attention_heads": heads, "intermediate_size": intermediate_size}
    sizes = {name: size for name, size in wanted.items() if size is not None}
    if rows is None and (sizes or isinstance(layers, int)):
        raise ValueError("got no rows to measure on what can go; give a packed batch, or name the layers and keep the sizes")
    kept, own = _kept(target, layers), target.num_layers
    config = _config(target, kept, sizes)  # what cannot be had is refused before anything is measured
    axes = _axes(target) if sizes else {}
    if isinstance(layers, int) and rows is not None:
        gone = removals(target, rows, own - layers)
        kept = sorted(set(range(own)) - gone.keys())
        left = ", ".join(f"{layer} {acceptance:.3f}" for layer, acceptance in gone.items())
        print(f"layers {', '.join(map(str, kept))} of {own} stay; acceptance left as others went: {left or 'all stay'}", flush=True)
        config = _config(target, kept, sizes)
    cut = _narrowing(target, kept, config, axes, _on(target, rows)) if sizes and rows is not None else lambda _name, tensor: tensor
    return _copy(target, kept, config, cut)


def outline(
    target: Target,
    *,
    layers: int | Sequence[int],
    hidden_size: int | None = None,
    heads: int | None = None,
    intermediate_size: int | None = None,
) -> PreTrainedModel:
    """A model of the sizes that `pruned` gives, float32, with none of the target's weights. Raises ValueError for sizes as it does."""
    wanted = {"hidden_size": hidden_size, "num_attention_heads": heads, "intermediate_size": intermediate_size}
    sizes = {name: size for name, size in wanted.items() if size is not None}
    return type(target.model)(_config(target, _kept(target, layers), sizes)).float()


def removals(target: Target, rows: dict[str, Tensor], count: int) -> dict[int, float]:
    """`count` layers, in the order in which they go: each time the one that the target's law misses least. The value is what is left
    then of the acceptance, the mean over M of Σ_v min(p, q) against the whole target. A trial makes a layer hand its input on.

    Removing layers by measured influence: ShortGPT (Men et al. 2024, https://arxiv.org/abs/2403.03853).

    Raises:
        ValueError: rows without loss, or an architecture whose layers do not give one tensor.
    """
    rows = _on(target, rows)
    bearing = rows["loss_mask"][:, 1:]  # a token's law is at the position before it
    if not bearing.any():
        raise ValueError("got rows without loss-bearing tokens to measure on; give others")

    def run() -> Tensor:
        return target.features(rows).hidden[:, :-1][bearing]

    def refuse(_module: nn.Module, _args: Any, output: Any) -> None:
        if not isinstance(output, Tensor):
            raise ValueError(f"a layer of {type(target.model).__name__} gives more than a tensor: none can be left out; name those to keep")

    with target.layers[0].register_forward_hook(refuse):
        whole = run()
    gone: dict[int, float] = {}
    done, trials = 0, sum(target.num_layers - i for i in range(count))
    with Bar("layers left out", trials, show=trials > 0) as bar:
        while len(gone) < count:
            left = {}
            for layer in sorted(set(range(target.num_layers)) - gone.keys()):
                with target.without([layer, *gone]):
                    left[layer] = _acceptance(target, whole, run())
                bar.update(done := done + 1, f"acceptance {left[layer]:.3f} without layer {layer}")
            best = max(left, key=left.__getitem__)
            gone[best] = left[best]
    return gone


def hidden(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The student's last hidden states [B,S,W] along a packed batch, with gradients, no document seeing another.

    A token that it lacks is read as its last one, as it is when it drafts.
    """
    base = _plain(model)
    ids = batch["input_ids"].clamp(max=len(base.get_input_embeddings().get_parameter("weight")) - 1)
    return base.get_decoder()(input_ids=ids, **apart(base.config.get_text_config(), base.dtype, batch), use_cache=False).last_hidden_state


def head(model: nn.Module, vocab_size: int) -> Tensor | Callable[[Tensor], Tensor]:
    """What the chunked losses take as its head: the weight [D,W], or hidden [m,W] -> logits [m,D] where the model does more than apply it.

    D is the student's rows, vocab_size at most: what a padded student has beyond them stands for no token.
    """
    base = _plain(model)
    own = Head.of(base)
    if own.plain and type(own.module) is nn.Linear and own.module.bias is None:
        return own.weight[:vocab_size]
    return lambda hidden: own(hidden)[..., :vocab_size]


def frozen(model: nn.Module, tokenizer: PreTrainedTokenizerBase | None) -> Target:
    """The student for decoding while it is being trained: a Target that shares its weights, which require gradients as before.

    The model is in eval mode afterwards; call `eval()` again before decoding where it was trained meanwhile.
    """
    base = _plain(model)
    before = [parameter.requires_grad for parameter in base.parameters()]
    try:
        return Target.wrap(base, tokenizer, name="student")
    finally:
        for parameter, trained in zip(base.parameters(), before, strict=True):
            parameter.requires_grad_(trained)


def with_lora(model: PreTrainedModel, rank: int, alpha: int | None = None, seed: int = 0) -> "PeftModel":
    """`model` with low-rank adapters (LoRA, Hu et al. 2021, https://arxiv.org/abs/2106.09685) in all linear layers but the head.

    Only they are trained; alpha is 2·rank by default. The layers are replaced in `model` itself.

    Raises:
        ValueError: peft is not installed.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ValueError("LoRA needs peft, which is not installed: pip install draftsmith[peft]") from None
    config = LoraConfig(r=rank, lora_alpha=2 * rank if alpha is None else alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    with _seeded(seed):
        return cast("PeftModel", get_peft_model(model, config))


def merged(model: nn.Module) -> PreTrainedModel:
    """A plain copy with adapters merged into its weights; the model itself, where it has none, is handed back."""
    return copy.deepcopy(cast(Any, model)).merge_and_unload() if _plain(model) is not model else cast(PreTrainedModel, model)


def _plain(model: nn.Module) -> PreTrainedModel:
    """The transformers model in a PeftModel, its adapters in place; any other as it is."""
    return cast(Any, model).get_base_model() if hasattr(model, "get_base_model") else cast(PreTrainedModel, model)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Within it the CPU's random numbers begin at `seed`; afterwards they go on as if nothing had been drawn."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def _on(target: Target, rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """The rows on the target's device, without features that they may carry."""
    return {name: rows[name].to(target.device) for name in ("input_ids", "position_ids", "loss_mask", "document")}


def _acceptance(target: Target, whole: Tensor, cut: Tensor) -> float:
    """Mean over M of Σ_v min(p, q), where p and q are the laws of hidden states whole and cut [M,H]."""
    total = 0.0
    size = max(1, CHUNK // target.vocab_size)
    for states in zip(whole.split(size), cut.split(size), strict=True):
        p, q = (target.logits(state).float().softmax(-1) for state in states)
        total += torch.minimum(p, q).sum().item()
    return total / len(whole)


def _heads(config: Any) -> tuple[int, int, int]:
    """Query heads, KV heads, the size of a head."""
    heads = config.num_attention_heads
    return heads, getattr(config, "num_key_value_heads", None) or heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def _kept(target: Target, layers: int | Sequence[int]) -> list[int]:
    """The layers that are named, or as many of the first. Raises ValueError for what the target has not."""
    kept, own = list(range(layers)) if isinstance(layers, int) else list(layers), target.num_layers
    if not kept or kept != sorted(set(kept)) or not 0 <= kept[0] <= kept[-1] < own:
        raise ValueError(f"got layers={layers!r}; expected 1 to {own} of the {own} layers of target {target.name!r}, in order")
    return kept


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
    """What the dimensions of each tensor of the target stand for. Raises ValueError for one of which that is not known."""
    heads, kv_heads, size = _heads(target.config)
    whole = {"q_norm": ("query", heads * size), "k_norm": ("key", kv_heads * size)}
    found = {}
    for name, tensor in target.model.state_dict().items():
        *_, module, kind = ("", *name.split("."))[-3:]
        axes = _AXES.get(module, ())
        if module in whole:
            axis, width = whole[module]
            axes = (axis if len(tensor) == width else "within a head",)
        elif module.endswith("norm") and len(tensor) == target.hidden_size:
            axes = ("hidden",)
        if not axes or kind not in ("weight", "bias"):
            raise ValueError(f"{type(target.model).__name__} has no rule for the width of {name}; prune its layers alone")
        found[name] = axes[: tensor.dim()]
    return found


def _copy(target: Target, layers: list[int], config: PretrainedConfig, cut: Callable[[str, Tensor], Tensor]) -> PreTrainedModel:
    """A model of the target's class and this config, in float32, with what `cut` makes of the weights of these layers and all others.

    Raises:
        ValueError: naming the first tensor that the config does not make like this.
    """
    prefix = next(name for name, module in target.model.named_modules() if module is target.layers) + "."
    state = {}
    for name, tensor in target.model.state_dict().items():
        place = name
        if name.startswith(prefix):
            number, _, rest = name.removeprefix(prefix).partition(".")
            if int(number) not in layers:
                continue
            place = f"{prefix}{layers.index(int(number))}.{rest}"
        state[place] = cut(name, tensor)
    kind = type(target.model)
    with init.no_init_weights():
        model = kind(config).float()
    model.tie_weights()
    made = model.state_dict()
    for name in sorted(made.keys() | state.keys()):
        makes, left = (str(list(tensors[name].shape)) if name in tensors else "none" for tensors in (made, state))
        if makes != left:
            raise ValueError(
                f"{kind.__name__} cannot be cut so: its config makes {name} {makes}, it is left with {left}; keep other layers"
            )
    model.load_state_dict(state)
    model.generation_config = copy.deepcopy(target.model.generation_config)
    return cast(Any, model).to(target.device).eval()


def _narrowing(
    target: Target, layers: list[int], config: PretrainedConfig, axes: dict[str, tuple[str, ...]], rows: dict[str, Tensor]
) -> Callable[[str, Tensor], Tensor]:
    """(name, tensor) of the target -> the tensor with the channels, heads and neurons alone that matter most on these rows."""
    heads, kv_heads, size = _heads(target.config)
    text: Any = config.get_text_config()
    counts = {"channel": text.hidden_size, "neuron": text.intermediate_size, "group": text.num_key_value_heads}
    widths = {"channel": {"hidden": 1}, "neuron": {"neuron": 1}, "group": {"query": heads // kv_heads * size, "key": size}}
    kept: dict[tuple[str, str], Tensor] = {}
    for (part, path), importance in _importance(target, layers, rows).items():
        chosen = importance.argsort(descending=True, stable=True)[: counts[part]].sort().values
        for axis, width in widths[part].items():
            kept[axis, path] = (chosen[:, None] * width + torch.arange(width)).flatten()
    gain = math.sqrt(target.hidden_size / text.hidden_size)

    def cut(name: str, tensor: Tensor) -> Tensor:
        path, module, kind = ("", *name.rsplit(".", 2))[-3:]
        if axes[name] == ("hidden",) and module.endswith("norm") and kind == "weight":
            # Had those that go been silent, the rest's mean square would be H/W of all's (tiny target to W 192: acceptance 0.63, else 0.55).
            added = _added(target.model.get_submodule(name.removesuffix(".weight")))
            tensor = (tensor.float() + added) * gain - added
        for dim, axis in enumerate(axes[name]):
            index = kept.get((axis, "" if axis == "hidden" else path))
            tensor = tensor if index is None else tensor.index_select(dim, index.to(tensor.device))
        return tensor

    return cut


def _added(norm: nn.Module) -> float:
    """What a norm adds to its weight before it multiplies: 1 (Gemma) or 0."""
    weight = norm.get_parameter("weight")
    x = torch.ones_like(weight)
    x[::2] = -1  # a mean to subtract would be 0
    return float((norm(x) * x - weight).mean().round())


def _importance(target: Target, layers: list[int], rows: dict[str, Tensor]) -> dict[tuple[str, str], Tensor]:
    """How much flows with these layers alone, on average over the rows' tokens: by ("neuron", path of an MLP) [I], ("group", path of an
    attention) [KV heads] and ("channel", "") [H]."""
    used = (rows["document"] >= 0).flatten()
    parts = {"down_proj": "neuron", "o_proj": "group"}
    found: dict[tuple[str, str], Tensor] = {}

    def note(at: tuple[str, str], x: Tensor) -> None:
        count = _heads(target.config)[1] if at[0] == "group" else x.shape[-1]
        mean = x.flatten(0, 1)[used.to(x.device)].float().unflatten(-1, (count, -1)).norm(dim=-1).mean(0).cpu()
        found[at] = found.get(at, 0) + mean

    with ExitStack() as held, target.without(set(range(target.num_layers)) - set(layers)):
        for name, module in target.model.named_modules():
            path, _, kind = name.rpartition(".")
            if kind in parts:
                held.enter_context(module.register_forward_pre_hook(lambda _, args, at=(parts[kind], path): note(at, args[0])))
            elif kind.endswith("norm") and kind not in ("q_norm", "k_norm"):
                held.enter_context(module.register_forward_hook(lambda _, _args, output: note(("channel", ""), output)))
        target.features(rows)
    return found
