"""A frozen target that one GPU does not hold: the weights of its decoder layers laid out over GPUs or over the ranks of a run.

layers: whole layers on the GPUs that one process sees, one after another. shard: every weight cut over all ranks, a layer's gathered for its
forward and dropped after it (FSDP2, https://arxiv.org/abs/2304.11277); each rank runs rows of its own. tensor: each rank multiplies by its part
of the weights (https://arxiv.org/abs/1909.08053, by transformers' plan for the architecture); all ranks run the same rows.

Embedding, final norm and output head are whole on every rank: drafters read them, and logits wait for no other rank. Under shard and tensor
every forward of the decoder is for all ranks together: a rank that runs one more, or one fewer, waits for ever.

Letters: B rows · S positions.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.configuration_utils import PretrainedConfig
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.integrations import deepspeed

__all__ = ["COLLECTIVE", "check_parallel", "decoder_layers", "in_turn", "lay_out"]

COLLECTIVE = ("shard", "tensor")

Found = TypeVar("Found")
Read = Callable[..., Any]  # from_pretrained, told all but where to: (model, what transformers tells of the loading)


def check_parallel(how: str, name: str, quantised: str) -> None:
    """Whether this run can lay out target `name` so. Raises ValueError, in one line."""
    world = _world()
    if how == "layers" and world > 1:
        raise ValueError(
            f"target.parallel=layers spreads the target over the GPUs of one process, this run has {world}; "
            "take target.parallel=shard, or accelerate launch --num_processes 1"
        )
    if how in COLLECTIVE and world == 1:
        raise ValueError(
            f"target.parallel={how} lays the target out over the processes of a run, this one has one; "
            "accelerate launch --num_processes N, or take target.parallel=layers"
        )
    if how in COLLECTIVE and quantised:
        raise ValueError(
            f"target.parallel={how} cuts weights that are not quantised, those of {name!r} are {quantised}; "
            "take target.parallel=none or layers, or leave target.quantise out"
        )


def lay_out(read: Read, how: str, device: torch.device | str) -> tuple[PreTrainedModel, dict[str, Any]]:
    """`read` a model to where it is to lie, each process into `device` its part; with what transformers tells of the loading.

    Raises:
        ValueError: tensor parallelism of an architecture without a plan, or with heads that the ranks do not divide.
    """
    with not_partitioned():
        if how == "shard":
            return _sharded(read, torch.device(device))
        if how == "tensor":
            return _in_parts(read)
        return read(device_map="auto" if how == "layers" else {"": str(device)})


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The list of a model's decoder layers. Raises ValueError where there is not one such list."""
    decoder, count = model.get_decoder(), model.config.get_text_config().num_hidden_layers
    lists = [child for child in decoder.children() if isinstance(child, nn.ModuleList) and len(child) == count]
    if len(lists) != 1:
        raise ValueError(
            f"{type(decoder).__name__}: expected one list of {count} decoder layers, found {len(lists)}; this architecture cannot be tapped"
        )
    return lists[0]


def in_turn(run: Callable[[dict[str, Tensor]], Found], rows: dict[str, Tensor]) -> Found:
    """What `run` gives for this rank's rows. All ranks run those of each, one rank's after another's: no rank holds more than its own.

    rows: tensors of one shape [B,S] and one dtype; another rank's may be of another shape.
    """
    own = torch.stack(list(rows.values()))
    shapes = [torch.empty(own.dim(), dtype=torch.int64, device=own.device) for _ in range(_world())]
    dist.all_gather(shapes, torch.tensor(own.shape, device=own.device))
    found: list[Found] = []
    for rank, shape in enumerate(shapes):
        mine = rank == dist.get_rank()
        part = own if mine else own.new_empty(shape.tolist())
        dist.broadcast(part, rank)
        given = run(dict(zip(rows, part, strict=True)))
        if mine:
            found.append(given)
    return found[0]


def _sharded(read: Read, device: torch.device) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Rank 0 alone reads the weights, into its host's memory, and hands them out, one tensor at a time."""
    model, info = read(device_map="meta")
    whole: PreTrainedModel | None = read(device_map="cpu")[0] if dist.get_rank() == 0 else None
    model.requires_grad_(False)
    decoder, mesh = model.get_decoder(), init_device_mesh(device.type, (_world(),))
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh)
    kept = {parameter for parameter in decoder.parameters() if not isinstance(parameter, DTensor)}
    fully_shard(decoder, mesh=mesh, ignored_params=kept)  # layers of one root are gathered ahead, while the one before computes
    # Weights without a place are put beside those that have one; with a place of their own they would be there twice.
    model.get_input_embeddings().to_empty(device=device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole.state_dict() if whole else {}, options=options)
    model.tie_weights()
    for name, buffer in model.named_buffers():  # those too that no checkpoint holds, such as rotary frequencies
        owner, _, last = name.rpartition(".")
        value = whole.get_buffer(name).to(device) if whole else torch.empty_like(buffer, device=device)
        dist.broadcast(value, 0)
        model.get_submodule(owner)._buffers[last] = value
    with torch.no_grad():  # what weights are gathered into is made once, and could not be filled again if made in inference mode
        decoder(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device), use_cache=False)
    return model, info


def _in_parts(read: Read) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Each rank reads its parts, by transformers' rules for the layers of the architecture; embedding and output head stay whole."""
    empty: PreTrainedModel = read(device_map="meta")[0]
    ends = (empty.get_input_embeddings(), empty.get_output_embeddings())
    kept = [name for name, module in empty.named_modules() if module in ends]
    plan = {name: style for name, style in (empty.tp_plan or {}).items() if name not in kept}
    kind = empty.config.model_type
    if not plan:
        raise ValueError(
            f"transformers {transformers.__version__} has no plan for tensor parallelism of architecture {kind!r}; take target.parallel=shard"
        )
    _check_heads(empty.config.get_text_config(), kind, plan)
    # Newer transformers keep their rule for what is not named. This one shares out nothing, and sums gradients, of which there are none.
    plan |= dict.fromkeys(kept, "replicated_with_grad_allreduce")
    model, info = read(distributed_config=DistributedConfig(tp_size=_world(), tp_plan=plan))
    for name in kept:
        vars(model.get_submodule(name)).pop("forward", None)  # that of the rule
    return model, info


def _check_heads(config: PretrainedConfig, kind: str, plan: dict[str, str]) -> None:
    if not any(style == "colwise" and "att" in name for name, style in plan.items()):
        return  # the plan leaves attention whole
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    if heads % _world() or groups % _world():
        raise ValueError(
            f"target.parallel=tensor shares attention heads out over {_world()} processes, architecture {kind!r} has {heads} here, {groups} for "
            f"keys and values; launch as many processes as divide both, or take target.parallel=shard"
        )


def _world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


@contextmanager
def not_partitioned() -> Iterator[None]:
    """Within it transformers builds whole models: where a drafter is trained by ZeRO-3 it would partition the target too, for DeepSpeed's engine."""
    before = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = before
