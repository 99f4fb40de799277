"""A script for `accelerate launch`: trains, saves and resumes the numbers of test_loop.py and every method, and notes how they were wrapped.

launched.py <ddp | half | fsdp2 | zero2 | zero3> <folder>; METHODS and `words` are shared with test_launchers.py.
"""

import json
import shutil
import sys
from functools import partial
from pathlib import Path

import torch.distributed
from accelerate import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from training_cases import Numbers, new_model, new_recipe, objective

from draftsmith.inference.errors import exit_on_error
from draftsmith.train import distill, dspark, eagle, hydra, loop, medusa, mlp
from draftsmith.train.engine import processes, resume
from draftsmith.train.engine.sharded import ShardedModel

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
SETTINGS = {"schedule": "constant", "micro_batch_size": 2}
OPTIMIZERS = ("adamw", "muon")
HALF = {"weights": "bfloat16", "precision": "bf16"}
METHODS = {
    "medusa": (medusa.main, "medusa-tiny", ["medusa.heads=2"]),
    "hydra": (hydra.main, "hydra-tiny", ["hydra.heads=2", "hydra.layers=2", "hydra.prefix=true"]),
    "mlp": (mlp.main, "mlp-tiny", ["mlp.heads=3", "mlp.cell=lstm"]),
    "dspark": (
        dspark.main,
        "dspark-tiny",
        ["dspark.taps=[0,1]", "dspark.layers=1", "dspark.anchors=6", "dspark.block_size=3", "tree.depth=3"],
    ),
    "eagle": (eagle.main, "eagle3-tiny", ["eagle.taps=[0,1]", "eagle.steps=2", "tree.depth=2", "eagle.vocab_size=64"]),
    "distill": (
        distill.main,
        "distill-onpolicy-tiny",
        ["student.start=pruned", "student.layers=1", "train.tau_prompts=1", "train.tau_tokens=4", "tree.depth=2"]
        + ["distill.on_policy=0.5", "distill.refresh_every=4", "distill.prompts=2", "distill.new_tokens=4"],
    ),
}


def methods_of(kind):
    """The methods that a launcher trains: those that cut the weights all, ZeRO-2, which cuts none, the two that read them in most ways."""
    return {"ddp": (), "half": (), "zero2": ("eagle", "distill")}.get(kind, tuple(METHODS))


def words(method, folder, output):
    """What a recipe of this repository becomes for a few steps on a tiny random target."""
    _, recipe, own = METHODS[method]
    train = ["batch_size=4", "micro_batch_size=2", "warmup_steps=0", "eval_batches=1", "log_every=1", "precision=fp32", "schedule=constant"]
    train += [
        "steps=4",
        "save_every=2",
        f"output={output / method}",
        "eval_every=0",
        "lr=1e-3",
        "optimizer=adamw",
        f"tau_file={folder / 'asked.jsonl'}",
    ]
    data = [f"train={folder / 'text.txt'}", "valid=null", f"cache={output / 'cache'}", "seq_len=32", "num_proc=1", "template=null"]
    keys = [f"target.path={folder / 'target'}", *[f"train.{word}" for word in train], *[f"data.{word}" for word in data]]
    return [str(RECIPES / f"{recipe}.yaml"), *keys, *own]


class Watched(ShardedModel):
    """Notes how the model was wrapped, since a launcher may silently do something else."""

    seen: list[dict] = []

    def __init__(self, *arguments):
        super().__init__(*arguments)
        parameters = list(self.trained.parameters())
        self.seen.append(
            {
                "world": torch.distributed.get_world_size(),
                "type": self.accelerator.distributed_type.value,
                "module": type(self.module).__name__,
                "dtensors": any(isinstance(parameter, DTensor) for parameter in parameters),
                "partitioned": any(hasattr(parameter, "ds_id") for parameter in parameters),
                "optimizer": type(self.optimizer.optimizer).__name__,
            }
        )


def on_gloo(*arguments, plain=processes.accelerator, **options):
    """Accelerate allows FSDP2 on GPUs only, and runs DDP on a CPU without a word. With the type set afterwards it shards."""
    accelerator = plain(*arguments, **options)
    PartialState._shared_state["distributed_type"] = accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False
    )
    return accelerator


def train_numbers(folder, **settings):
    """Train the numbers of test_loop.py into `folder`; the main process leaves the weights there too."""
    model = new_model().float()
    rows = Numbers(single=True), Numbers(rows=3, single=True)
    accelerator, _ = loop.fit(new_recipe(folder, **(SETTINGS | settings)), model, objective, *rows, {})
    if accelerator.is_main_process:
        save_file({name: tensor.detach().contiguous() for name, tensor in model.named_parameters()}, folder / "weights.safetensors")


def main(kind: str, folder: Path) -> None:
    """`uninterrupted` is one run; another launch began `from_one`, and another launch will end `to_one`; by either optimizer.

    half: the same with bf16 weights; one process has one precision.
    """
    resume.ShardedModel = Watched
    if kind == "fsdp2":
        processes.accelerator = on_gloo
    jobs = {
        f"{optimizer}/{name}": own | {"optimizer": optimizer}
        for optimizer in OPTIMIZERS
        for name, own in (("uninterrupted", {}), ("from_one", {}), ("to_one", {"steps": 4}))
    }
    if kind == "half":
        jobs = {name: own | HALF for name, own in jobs.items()}
    if kind.startswith("zero"):
        jobs["bf16"] = {"precision": "bf16"}
    for name, own in jobs.items():
        train_numbers(folder / name, **own)
    for method in methods_of(kind):
        train, checkpoints = partial(METHODS[method][0], words(method, folder, folder / "two")), folder / "two" / method / "checkpoints"
        train()
        processes.on_main(partial(shutil.rmtree, checkpoints / "step-00000004"))  # so that the next run goes on from the one before
        train()
    if PartialState().is_main_process:
        (folder / "seen.json").write_text(json.dumps(Watched.seen))


if __name__ == "__main__":
    exit_on_error(lambda words: main(words[0], Path(words[1])), sys.argv[1:])
