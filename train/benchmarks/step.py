"""A training step, compared with the frozen target's forward alone, the least that online training can take:
python -m draftsmith.train.benchmarks.step

The target is a random Llama with the proportions of an 8B model (--hidden 4096 --layers 32 --vocab 128256 is the real size): its layers cost 13 × its
head, and four query heads share a pair of keys and values. Rows are packed random tokens; the last part of each row is supervised, as an answer after
its prompt. The forms alternate in one process; the numbers are medians. Medusa has its own output layers, as trained for engines, or shares the
target's.

Letters: S positions · V vocabulary · H hidden size · L layers.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.inference.errors import exit_on_error
from draftsmith.models import vocab
from draftsmith.models.drafter import new_drafter
from draftsmith.models.target import Target
from draftsmith.train import eagle, medusa
from draftsmith.train.eagle import EagleSection
from draftsmith.train.medusa import MedusaSection
from draftsmith.train.objective import Batch, Objective


def random_target(hidden: int, layers: int, vocab: int, positions: int, device: str) -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=7 * hidden // 2,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
        vocab_size=vocab,
        max_position_embeddings=positions,
    )
    with torch.device(device):
        model: Any = cast(Any, LlamaForCausalLM(config)).to(torch.bfloat16 if device == "cuda" else torch.float32)
    target = Target.wrap(model)
    target.mask_blocks()
    return target


def random_batch(target: Target, rows: int, positions: int, supervised: float) -> Batch:
    """Rows [B,S] of one document each; the last `supervised` of their positions are."""
    ids = torch.randint(target.vocab_size, (rows, positions), device=target.device)
    position_ids = torch.arange(positions, device=target.device).expand(rows, positions)
    mask = position_ids >= round((1 - supervised) * positions)
    document = torch.zeros_like(ids)
    return {"input_ids": ids, "loss_mask": mask, "position_ids": position_ids, "document": document, "sample_id": position_ids[:, :1]}


def methods(target: Target) -> dict[str, tuple[Any, Objective]]:
    """Name -> an untrained drafter and its objective."""
    drafters: dict[str, tuple[Any, Objective]] = {}
    for shared in (False, True):
        section = MedusaSection(share_head=shared)
        drafter = new_drafter("medusa", target, num_heads=section.heads, num_layers=section.layers, share_head=shared)
        drafters["medusa, target's head" if shared else "medusa"] = (drafter, partial(medusa.objective, target=target, section=section))
    section = EagleSection(vocab_size=target.vocab_size // 4)
    drafter: Any = new_drafter("eagle", target, **eagle.architecture(section, target))
    drafter.take(vocab.choose(torch.ones(target.vocab_size, dtype=torch.int64), target.vocab_size // 4, frozenset()))
    drafters["eagle-3, 7 steps, D = V/4"] = (drafter, partial(eagle.objective3, target=target, section=section))
    return drafters


def train_step(drafter: Any, objective: Objective, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    with torch.autocast(batch["input_ids"].device.type, torch.bfloat16, enabled=batch["input_ids"].is_cuda):
        loss = objective(drafter, batch)
    (loss.sum / loss.weight).backward()
    torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def seconds(work: Callable[[], object], device: str) -> float:
    began = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def main(arguments: list[str]) -> None:
    described = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, about in (
        ("hidden", 512, "hidden size of the target"),
        ("layers", 16, "its decoder layers"),
        ("vocab", 8192, "its vocabulary"),
        ("positions", 256, "tokens of a row"),
        ("rows", 4, "rows of a batch"),
        ("repeats", 7, "steps of each method; medians are printed"),
    ):
        described.add_argument(f"--{name}", type=int, default=default, help=f"{about} (default {default})")
    described.add_argument("--supervised", type=float, default=0.6, help="share of the positions that are supervised")
    options = described.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = random_target(options.hidden, options.layers, options.vocab, options.positions, device)
    batch = random_batch(target, options.rows, options.positions, options.supervised)
    forms: dict[str, Callable[[], object]] = {"target's forward": partial(target.features, batch)}
    for name, (drafter, objective) in methods(target).items():
        optimizer = torch.optim.AdamW([parameter for parameter in drafter.parameters() if parameter.requires_grad], fused=True)
        forms[name] = partial(train_step, drafter, objective, optimizer, batch)
    times: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(options.repeats + 1):  # the first warms up
        for name, work in forms.items():
            times[name].append(seconds(work, device))
    floor = times["target's forward"]
    table = Table(
        title=f"{options.rows} × S = {options.positions}, H = {options.hidden}, L = {options.layers}, V = {options.vocab}, {device}"
    )
    for column in ("", "seconds", "× target's forward", "range"):
        table.add_column(column, justify="left" if not column else "right")
    for name, own in times.items():
        ratios = [step / forward for step, forward in zip(own[1:], floor[1:], strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        table.add_row(name, f"{statistics.median(own[1:]):.3f}", f"{statistics.median(ratios):.2f}", spread)
    Console().print(table)


if __name__ == "__main__":
    exit_on_error(main, sys.argv[1:])
