"""Run by test_context_parallel.py: EAGLE trained in forked processes, one for each rank, with and without context parallelism.

context_ranks.py <folder>: each of JOBS writes its weights to <folder>/<job>, and the shapes that attention saw to seen-<rank>.json there.
"""

import json
import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from eagle_drafters import make
from fault_forks import Run
from launched import on_gloo
from packed_data import corpus_of
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import tiny

from draftsmith.data.packing import PackedDataset
from draftsmith.models import context_parallel as sharing
from draftsmith.models import feature_drafter as architecture
from draftsmith.models.context_parallel import ContextParallel
from draftsmith.models.target import Target
from draftsmith.train import eagle, loop
from draftsmith.train.eagle import EagleRecipe, EagleSection
from draftsmith.train.engine import processes
from draftsmith.train.recipe import DataSection, TrainSection

LENGTHS = [5, 9, 32, 1, 14, 9, 9, 27, 3, 3, 3, 18, 2, 14, 9, 30, 21, 5]
SHAPES = {3: ("3, small", {"num_heads": 4, "num_kv_heads": 2}), 1: ("1, deep", {"num_kv_heads": 2})}
LONG = 4096


def recipe_of(output: Path, seq_len: int, eagle: dict, **train) -> EagleRecipe:
    settings = {
        "steps": 4,
        "batch_size": 4,
        "micro_batch_size": 2,
        "lr": 0.003,
        "schedule": "constant",
        "precision": "fp32",
        "log_every": 1,
    }
    settings |= {"eval_every": 2, "eval_batches": 2, "output": str(output)}
    section = {"steps": 3, "loss": "0.8 kl + 0.2 nll"} | eagle
    return EagleRecipe(data=DataSection(seq_len=seq_len), eagle=EagleSection(**section), train=TrainSection(**(settings | train)))


def train(output: Path, rank: int, seq_len: int = 32, fault: Callable[[], None] | None = None, **settings) -> None:
    """A tiny random target's drafter, trained on packed rows; the first rank saves its weights."""
    recipe = recipe_of(output, seq_len, settings.pop("eagle", {}), **settings)
    context = processes.context_group(recipe.train.context_parallel)
    if fault:
        fault()
    seen: list[tuple[int, int]] = []
    plain = architecture.attend

    def attend(query: Tensor, keys: list[Tensor], *rest, **named) -> Tensor:
        seen.append((query.shape[2], keys[0].shape[2]))
        return plain(query, keys, *rest, **named)

    architecture.attend = attend
    target = Target.wrap(tiny("llama"), name="small")
    name, shape = SHAPES[recipe.eagle.version] if not recipe.eagle.regression else ("3, norms of speculators", {})
    drafter = make(target, name, steps=recipe.eagle.steps, **shape)
    rows = PackedDataset(corpus_of([min(length, seq_len) for length in LENGTHS], seq_len=seq_len), seq_len)
    loop.fit(recipe, drafter, eagle.choose_objective(recipe, target, context), rows, rows, {})
    (output / f"seen-{rank}.json").write_text(json.dumps(seen))
    if rank == 0:
        save_file({name: tensor.detach().contiguous() for name, tensor in drafter.named_parameters()}, output / "weights.safetensors")


class Live(TorchDispatchMode):
    """Bytes of tensors made within it, and the most that were there at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {one.untyped_storage()._cdata for one in args if isinstance(one, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and not {(key := tensor.untyped_storage()._cdata)} & (given | self.known):
                self.known.add(key)
                self.now += (size := tensor.untyped_storage().nbytes())
                self.peak = max(self.peak, self.now)
                weakref.finalize(tensor.untyped_storage(), self.freed, key, size)
        return out

    def freed(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def remember(output: Path, rank: int, size: int) -> None:
    """The most that training-time test holds of a row of LONG positions, forward and backward."""
    context = processes.context_group(size)
    target = Target.wrap(tiny("llama"))
    drafter = make(target, "3, small")
    ids, place = torch.arange(LONG)[None] % target.vocab_size, torch.arange(LONG)[None] % 200
    own = context.part(LONG)
    feature = torch.randn(1, LONG, 24, generator=torch.Generator().manual_seed(0))[:, own].clone().requires_grad_()
    with Live() as live:
        outputs = drafter.training_time_test(feature, ids, place, torch.arange(LONG)[None] // 200, 5, False, context)
        torch.stack(outputs).square().sum().backward()
    assert feature.grad is not None and feature.grad.abs().min() > 0
    output.mkdir(exist_ok=True)
    (output / f"peak-{rank}.json").write_text(json.dumps(live.peak))


def _own_gradient(ctx, grad):
    context: ContextParallel = ctx.context
    return grad.chunk(context.rank + 1, 2)[context.rank], None


def _from_the_beginning(query, keys, values, document, plain=architecture.attend, **named):
    first = slice(query.shape[2])
    return plain(query, [keys[0][:, :, first], *keys[1:]], [values[0][:, :, first], *values[1:]], document[:, first], **named)


FAULTS = {
    "gradients of other ranks' queries lost": lambda: setattr(sharing._UpTo, "backward", staticmethod(_own_gradient)),
    "keys of other ranks cut from the graph": lambda: setattr(
        ContextParallel, "upto", lambda self, part, plain=ContextParallel.upto: plain(self, part.detach())
    ),
    "distributions of the next rank's rows missing": lambda: setattr(
        ContextParallel, "part", lambda self, positions, more=0, plain=ContextParallel.part: plain(self, positions)
    ),
    "every rank at its row's beginning": lambda: setattr(architecture, "attend", _from_the_beginning),
    "weight counted by every rank": lambda: setattr(
        eagle, "supervised_tokens", lambda batch, here, plain=eagle.supervised_tokens: plain(batch)
    ),
}


def sharded() -> None:
    processes.accelerator = on_gloo


TWO = {"context_parallel": 2}
NARROW = {"seq_len": 8, "batch_size": 2}
MORE = {"eagle": {"regression": 2.0, "prompts": True}}
# Ranks, what to do, and how.
JOBS: dict[str, tuple[int, Callable, dict]] = {
    "one": (1, train, {}),
    "two": (2, train, TWO),
    "four": (4, train, TWO | {"micro_batch_size": 1}),
    "apart": (2, train, {"micro_batch_size": 1}),
    "recomputed": (2, train, TWO | {"eagle": {"checkpointing": True}}),
    "sharded": (2, train, TWO | {"fault": sharded}),
    "narrow, one": (1, train, NARROW),
    "narrow": (4, train, NARROW | {"context_parallel": 4}),
    "first, one": (1, train, {"eagle": {"version": 1, "steps": 1}}),
    "first": (2, train, TWO | {"eagle": {"version": 1, "steps": 1}}),
    "more, one": (1, train, MORE),
    "more": (2, train, TWO | MORE),
    "half by two": (2, train, TWO | {"steps": 2}),
    "half by one": (1, train, {"steps": 2}),
    "odd": (3, train, TWO),
    "long, one": (1, remember, {"size": 1}),
    "long": (2, remember, {"size": 2}),
} | {name: (2, train, TWO | {"fault": fault}) for name, fault in FAULTS.items()}
# Folder, and the job that goes on there.
AFTER = {"half by two": "one", "half by one": "two"}


def main(folder: Path) -> None:
    for name, (ranks, work, options) in JOBS.items():
        ended = Run(partial(_call, work, folder / name, options), folder / name, ranks).end()
        if name in AFTER and not any(ended.codes):
            ranks, work, options = JOBS[AFTER[name]]
            ended = Run(partial(_call, work, folder / name, options), folder / name, ranks).end()
        (folder / f"{name}.json").write_text(json.dumps({"codes": ended.codes, "err": ended.err, "seconds": ended.seconds}))


def _call(work: Callable, output: Path, options: dict, rank: int) -> None:
    work(output, rank, **options)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
