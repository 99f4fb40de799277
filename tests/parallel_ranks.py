"""Run by test_parallel.py under `accelerate launch`: compares targets that are laid out over two ranks with complete ones.

parallel_ranks.py <output folder> <shard | tensor> <folder of a model> ...: each rank writes what it saw to <output folder>/<kind>-<rank>.json.
"""

import json
import sys
from collections import Counter
from pathlib import Path

import torch
from accelerate import PartialState
from planting import PlantingDrafter
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from draftsmith.inference import packed_linear as packing
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.sampler import Sampling
from draftsmith.models.target import Target

TAPS = (1, 0)
NEW = 14


class Collectives(TorchDispatchMode):
    """Counts what is sent between ranks."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.seen[func.__name__.split(".")[0].strip("_")] += 1
        return func(*args, **(kwargs or {}))


def batch(vocab: int, rank: int) -> dict[str, torch.Tensor]:
    """Rows of two documents; another number of other rows on each rank."""
    rows, length = 2 + rank, 20 + 3 * rank
    ids = torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(rank))
    return {"input_ids": ids, "position_ids": torch.cat([torch.arange(8), torch.arange(length - 8)]).expand(rows, length)}


def counted(work):
    with Collectives() as collectives:
        result = work()
    return result, dict(collectives.seen)


def difference(actual, expected) -> float:
    assert type(actual) is torch.Tensor and actual.shape == expected.shape
    return float((actual - expected).abs().max())


def answers(target: Target, drafter=None) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(target.vocab_size, (count,), generator=generator).tolist() for count in (5, 9, 1)]
    if drafter is not None:
        drafter = PlantingDrafter(prompts, drafter, target.vocab_size)
    done = Decoder(target, drafter, slots=2).generate(prompts, Sampling(), NEW, ())
    if drafter is not None:
        assert drafter.mismatches == 0 and drafter.moves > 0
    return [answer.tokens for answer in done]


def look(kind: str, folder: str, rank: int) -> dict:
    devices = Counter()
    read = AutoModelForCausalLM.from_pretrained

    def noting(*args, **kwargs):
        devices[str(kwargs.get("device_map"))] += 1
        return read(*args, **kwargs)

    AutoModelForCausalLM.from_pretrained = noting
    target = Target.load(folder, dtype=torch.float32, parallel=kind)
    AutoModelForCausalLM.from_pretrained = read
    complete = Target.load(folder, dtype=torch.float32)
    rows = batch(complete.vocab_size, rank)
    expected = complete.features(rows, TAPS)
    with torch.inference_mode():  # before anything else: nothing of it may be left behind for training
        target.forward(torch.arange(5)[None])
    first = target.features(rows, TAPS)
    decoded = answers(target, answers(complete))
    second, sent = counted(lambda: target.features(rows, TAPS))
    logits, sent_by_logits = counted(lambda: target.logits(second.hidden))
    target.pack()
    again, _ = counted(lambda: target.features(rows, TAPS))
    ends = {"head": target.head, "embedding": target.model.get_input_embeddings()}
    cut = {name: parameter for name, parameter in target.decoder.named_parameters() if isinstance(parameter, DTensor)}
    return {
        "world": torch.distributed.get_world_size(),
        "layers": target.num_layers,
        "cut": sum(parameter.numel() for parameter in cut.values()),
        "local": sum(parameter.to_local().numel() for parameter in cut.values()),
        "bytes": sum(parameter.to_local().untyped_storage().nbytes() for parameter in cut.values()),
        "layers_numel": sum(parameter.numel() for layer in complete.layers for parameter in layer.parameters() if parameter.dim() > 1),
        "outside": sorted(name for name in cut if ".layers." not in f".{name}"),
        "ends": [type(module.weight.data).__name__ for module in ends.values()],
        "patched": [name for name in ("head", "embedding") if "forward" in vars(ends[name])],
        "tied": target.head_weight is target.model.get_input_embeddings().weight,
        "ties": complete.head_weight is complete.model.get_input_embeddings().weight,
        "hidden": max(difference(out.hidden, expected.hidden) for out in (first, second, again)),
        "taps": max(difference(out.taps, expected.taps) for out in (first, second, again)),
        "logits": difference(logits, complete.logits(expected.hidden)),
        "embed": difference(target.embed(rows["input_ids"]), complete.embed(rows["input_ids"])),
        "spread": float(expected.hidden.std()),
        "buffers": all(torch.equal(left, right) for left, right in zip(target.model.buffers(), complete.model.buffers(), strict=True)),
        "decoded": decoded == answers(complete),
        "sent": sent,
        "sent by logits": sent_by_logits,
        "read": dict(devices),
        "collective": [target.collective, complete.collective],
        "same": target.identity == complete.identity and target.stop_ids == complete.stop_ids,
    }


if __name__ == "__main__":
    output, kind, folders = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    state = PartialState(cpu=True)
    packing._least_tokens = lambda group: 1  # whatever this machine is good at
    facts = {Path(folder).name: look(kind, folder, state.process_index) for folder in folders}
    (output / f"{kind}-{state.process_index}.json").write_text(json.dumps(facts))
    state.wait_for_everyone()
    state.destroy_process_group()
