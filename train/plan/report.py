"""What a recipe needs, memory and time, said before anything is loaded: of the target only its config is read.

    draftsmith plan recipes/eagle3-llama3.1-8b.yaml                              # eight GPUs of 80 GiB
    draftsmith plan recipes/eagle3-llama3.3-70b.yaml --gpus 4 --nodes 2 --gpu-memory 141 --hours 24
    draftsmith plan recipes/medusa-tiny.yaml --cpu

Recipe keys can follow as key=value. Memory is what PyTorch allocates in a step (train/plan/memory.py); 7 % of a GPU are left for CUDA, NCCL and gaps.
Times are predicted from the products counted in the objective.
"""

import argparse
import importlib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from draftsmith.data import corpus
from draftsmith.models.target import resolve_path
from draftsmith.train import recipe as recipes
from draftsmith.train.plan.memory import FILLED, GIB, Case, Machine, fitting
from draftsmith.train.recipe import Recipe

SHORTEST = 512  # tokens of a row: none is made shorter than this
USED = 0.4  # of a GPU's products a second: what training comes to
SHOWN = {"target": "target", "weights": "weights", "gradients": "grads", "moments": "moments", "activations": "step", "buffers": "buffers"}
SHOWN |= {"total": "total", "host": "host"}


def advice(path: str, overrides: list[str], method: ModuleType, case: Case) -> list[dict[str, Any]]:
    """Keys that make a GPU need less, the one that helps most first: keys, the total of the launcher that then asks least, and the fastest
    launcher that then fits (None: none). Where no key is enough, all come last, with rows as short as it takes."""
    schema = schema_of(method)

    least = min(need.total for need in case.needs())

    def tried(*keys: str) -> dict[str, Any]:
        # How the target lies on the GPUs changes nothing of what is traced.
        traces = case.traces if all(key.startswith("target.") for key in keys) else {}
        try:
            needs = Case(recipes.load(schema, path, [*overrides, *keys]), method, case.machine, traces).needs()
        except ValueError:  # keys that do not go with the recipe's others
            return {"keys": list(keys), "total": least, "fits": None}
        fits = fitting(needs, case.machine)
        return {"keys": list(keys), "total": min(need.total for need in needs), "fits": fits and fits.launcher}

    found = [one for key in _candidates(case, recipes.keys(schema)) if (one := tried(key))["total"] < least]
    found.sort(key=lambda one: one["total"])
    if any(one["fits"] for one in found):
        return found
    keys = [key for one in found for key in one["keys"]]
    laid_out = [key for key in keys if key.startswith("target.")]  # a target cut into pieces is not quantised
    others = [key for key in keys if not key.startswith("data.") and key not in laid_out[1:]]
    length = case.recipe.data.seq_len // (2 if others else 4)
    while not (last := tried(*others, f"data.seq_len={length}"))["fits"] and length // 2 >= SHORTEST:
        length //= 2
    return [*found, last] if last["total"] < least else found


def _candidates(case: Case, known: dict[str, Any]) -> Iterator[str]:
    recipe, target = case.recipe, case.recipe.target
    if case.micro > 1:
        yield f"train.micro_batch_size={case.micro // 2}"
    yield f"data.seq_len={recipe.data.seq_len // 2}"
    yield f"train.context_parallel={2 * recipe.train.context_parallel}"
    for key in known:
        section, name = key.split(".")
        if name == "checkpointing" and not getattr(getattr(recipe, section), name):
            yield f"{key}=true"
    if target.parallel == "none":
        yield "target.parallel=shard"
    if not target.quantise:
        yield "target.quantise=bnb-nf4"


def method_of(path: str, overrides: list[str]) -> ModuleType:
    """The script that a recipe is for: the one whose own sections its keys name, else the one that its file's name begins with.

    Raises ValueError where neither says it.
    """
    recipes.load(Recipe, path, [], shared=True)  # says what is wrong with the file
    file = recipes.find(path)
    named = {key.split(".")[0] for key in (*yaml.safe_load(file.read_text(encoding="utf-8")), *overrides)}
    scripts = sorted(
        one for one in Path(__file__).parents[1].glob("*.py") if re.search(r"^def build_untrained\(", one.read_text(encoding="utf-8"), re.M)
    )
    methods = {one.stem: importlib.import_module(f"draftsmith.train.{one.stem}") for one in scripts}
    own = {name: schema_of(method).model_fields.keys() - Recipe.model_fields.keys() for name, method in methods.items()}
    found = [name for name, sections in own.items() if sections & named] or [
        name for name in methods if re.match(rf"{name}\d*(-|$)", file.stem)
    ]
    if len(found) != 1:
        sections = ", ".join(f"{section}.* for train/{name}.py" for name, sections in own.items() for section in sorted(sections))
        raise ValueError(
            f"{path}: cannot tell which script trains it; expected keys of one of {sections}, or a file named after the script"
        )
    return methods[found[0]]


def schema_of(method: ModuleType) -> type[Recipe]:
    """The recipe class of a script."""
    return next(one for one in vars(method).values() if isinstance(one, type) and issubclass(one, Recipe) and one is not Recipe)


def report(path: str, overrides: list[str], machine: Machine, tflops: float | None = None, hours: float | None = None) -> dict[str, Any]:
    """All that `draftsmith plan` says, as numbers: bytes, FLOPs, tokens, seconds. tflops: products of one GPU, 10¹² a second."""
    method = method_of(path, overrides)
    recipe = recipes.load(schema_of(method), path, overrides)
    case = Case(recipe, method, machine)
    needs = case.needs()
    chosen = fitting(needs, machine)
    tokens, products = recipe.train.steps * recipe.train.batch_size * recipe.data.seq_len, case.products()
    rate = USED * tflops * 1e12 * case.ranks / products if tflops else None
    wanted = tokens / (3600 * hours) if hours else None
    return {
        "recipe": path,
        "overrides": overrides,
        "script": f"train/{method.__name__.rpartition('.')[2]}.py",
        "machine": asdict(machine),
        "target": {"name": case.target.name, "parameters": case.held, "layout": case.layout, "quantise": recipe.target.quantise},
        "drafter": {"trained": case.trained, "frozen": case.frozen},
        "step": {"rows": recipe.train.batch_size, "positions": recipe.data.seq_len, "ranks": case.ranks, "micro": case.micro}
        | {"accumulation": case.accumulation, "bf16": case.half},
        "launchers": [asdict(need) | {"total": need.total, "fits": fitting([need], machine) is not None} for need in needs],
        "chosen": chosen and chosen.launcher,
        "advice": [] if chosen else advice(path, overrides, method, case),
        "loading": case.loading,
        "work": {"steps": recipe.train.steps, "tokens": tokens, "flops_per_token": products, "tflops": tflops, "hours": hours}
        | {"predicted_tokens_per_s": rate, "predicted_hours": rate and tokens / rate / 3600, "wanted_tokens_per_s": wanted},
        "features": _features(recipe, case, tokens, wanted or rate),
    }


def _features(recipe: Recipe, case: Case, tokens: int, rate: float | None) -> dict[str, Any] | None:
    """The store that the recipe reads: bytes, of the data that was prepared or else of every token of the run; MB/s to feed it at `rate`."""
    each = case.bytes_per_token()
    if not each:
        return None
    prepared = _prepared(recipe)
    reading = {"read_mb_per_s": each * rate / 1e6 if rate and recipe.features.mode == "offline" else None}
    return {"bytes_per_token": each, "prepared": prepared, "bytes": each * (tokens if prepared is None else prepared)} | reading


def _prepared(recipe: Recipe) -> int | None:
    """Tokens of the recipe's data where they lie in data.cache; None where they do not, or where only the Hub could say."""
    plan, section = recipe.data.plan(), recipe.target
    if not all(source.path == "stdlib" or Path(source.path).expanduser().exists() for _, source in plan.sources()):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(resolve_path(section.path), revision=section.revision)
    except (OSError, ValueError):  # the run needs one, its plan does not
        return None
    recipe.data.give_template(tokenizer)
    found = [corpus.read(Path(recipe.data.cache) / f"{part}-{plan.key(tokenizer)}.safetensors") for part in ("train", "valid")]
    return sum(len(one.ids) for one in found if one) if all(found) else None


def show(found: dict[str, Any]) -> None:
    """Print the report for a person."""
    machine, step, work, target = found["machine"], found["step"], found["work"], found["target"]
    where = "a CPU" if machine["cpu"] else f"{_many(machine['nodes'] * machine['gpus'], 'GPU')} of {machine['memory'] / GIB:g} GiB"
    console = Console(width=min(100, Console().width), highlight=False, markup=False)  # what a person typed is no markup
    console.print(f"{found['recipe']} ({found['script']}) on {where}, {'bf16' if step['bf16'] else 'fp32'}", style="bold")
    laid = {"none": "whole", "layers": "in layers"}.get(target["layout"], "in pieces")
    quantised = f", {target['quantise']}" * bool(target["quantise"])
    console.print(f"target   {target['name']}: {_count(target['parameters'])} parameters{quantised}, {laid}")
    frozen = found["drafter"]["frozen"]
    console.print(f"drafter  {_count(found['drafter']['trained'])} parameters trained" + f", {_count(frozen)} frozen" * bool(frozen))
    shape = f"{_many(step['ranks'], 'process')} × {_many(step['accumulation'], 'micro-batch')} of {step['micro']}"
    console.print(f"step     {_many(step['rows'], 'row')} of {step['positions']:,} tokens: {shape}")
    console.print(_table(found))
    _advise(found, console)
    console.print(f"work     {work['steps']:,} steps, {_count(work['tokens'])} tokens, {work['flops_per_token'] / 1e9:,.3g} GFLOP each")
    if work["predicted_hours"]:
        console.print(
            f"time     predicted {_hours(work['predicted_hours'])}: {work['predicted_tokens_per_s']:,.0f} tokens/s "
            f"at {USED:.0%} of {work['tflops']:g} TFLOP/s"
        )
    if work["wanted_tokens_per_s"]:
        share = work["wanted_tokens_per_s"] * work["flops_per_token"] / step["ranks"] / 1e12
        console.print(f"         {work['wanted_tokens_per_s']:,.0f} tokens/s to end in {work['hours']:g} h: {share:,.3g} TFLOP/s a process")
    if features := found["features"]:
        each, prepared = f"{features['bytes_per_token'] / 1e3:,.1f} kB a token", features["prepared"]
        of = f"{_count(prepared)} are prepared" if prepared is not None else "the data is not prepared yet"
        console.print(f"features {_size(features['bytes'])}{' at most' * (prepared is None)}: {each}, {of}")
        if features["read_mb_per_s"]:
            console.print(f"         read at {features['read_mb_per_s']:,.0f} MB/s to feed that; the time to capture them comes on top")


def _table(found: dict[str, Any]) -> Table:
    cpu, needs = found["machine"]["cpu"], found["launchers"]
    unit, name = (GIB, "GiB") if min(need["total"] for need in needs) >= GIB else (2**20, "MiB")
    shown = {key: title for key, title in SHOWN.items() if any(need[key] for need in needs)}
    room = f", {FILLED * found['machine']['memory'] / GIB:.1f} GiB of which a run may fill"
    host = " · host: memory of each machine" * ("host" in shown)
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.title, table.caption = f"{name} of {'memory' if cpu else 'each GPU' + room}", f"step: activations, chunks of losses{host}"
    table.title_justify = table.caption_justify = "left"
    for title in ("launcher", *shown.values(), *(["fits"] * (not cpu))):
        table.add_column(title, justify="left" if title == "launcher" else "right", no_wrap=True)
    for need in needs:
        style = "bold" if need["launcher"] == found["chosen"] else None if need["fits"] else "dim"
        verdict = [] if cpu else ["yes" if need["fits"] else "no"]
        table.add_row(need["launcher"], *(f"{need[key] / unit:,.1f}" for key in shown), *verdict, style=style)
    return table


def _advise(found: dict[str, Any], console: Console) -> None:
    """The launcher to take; or what would make one fit."""
    machine, step, overrides = found["machine"], found["step"], found["overrides"]
    if found["loading"]:
        console.print(f"loading  {_size(found['loading'])} of the first machine's memory while the target is read")
    if found["chosen"]:
        words = ["accelerate launch --config_file", f"recipes/accelerate-{found['chosen']}.yaml"]
        if found["chosen"] != "one":
            words += ["--num_processes", str(step["ranks"]), *(["--num_machines", str(machine["nodes"])] * (machine["nodes"] > 1))]
        console.print("run     ", *words, found["script"], found["recipe"], *overrides, soft_wrap=True)
        return
    least = min(need["total"] for need in found["launchers"])
    room = FILLED * machine["memory"] / GIB
    console.print(f"No launcher fits into {room:.1f} GiB a GPU; the least is {least / GIB:.1f}. What helps:", style="bold")
    for one in found["advice"]:
        change = f"{one['total'] / GIB:7.1f} GiB  {(one['total'] - least) / GIB:+7.1f}"
        console.print(f"{change}  {' '.join(one['keys'])}" + (f"  (fits: {one['fits']})" if one["fits"] else ""), soft_wrap=True)


def _many(count: int, word: str) -> str:
    return f"{count:,} {word}" + ("" if count == 1 else "es" if word.endswith(("s", "ch")) else "s")


def _count(number: float) -> str:
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return f"{number:,.0f}"


def _size(number: float) -> str:
    for size, word in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB")):
        if number >= size:
            return f"{number / size:,.3g} {word}"
    return f"{number / 1e6:,.3g} MB"


def _hours(hours: float) -> str:
    if hours < 1 / 60:
        return "under a minute"
    return f"{60 * hours:,.0f} min" if hours < 1 else f"{hours:,.1f} h" if hours < 72 else f"{hours / 24:,.1f} days"


def parser() -> argparse.ArgumentParser:
    described = argparse.ArgumentParser("draftsmith plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    described.add_argument("recipe", help="YAML file, or the name of one that is shipped")
    described.add_argument("overrides", nargs="*", metavar="key=value", help="recipe keys")
    described.add_argument("--gpus", type=int, default=8, help="of each machine (default 8)")
    described.add_argument("--nodes", type=int, default=1, help="machines (default 1)")
    described.add_argument("--gpu-memory", type=float, default=80, metavar="GiB", help="of each GPU (default 80)")
    described.add_argument("--cpu", action="store_true", help="one process without a GPU")
    described.add_argument("--tflops", type=float, help="products of one GPU, in 10^12 a second (default 989, an H100's in bf16)")
    described.add_argument("--hours", type=float, help="that the run may take: says the tokens/s that this needs")
    described.add_argument("--json", action="store_true", help="print the report as JSON on stdout, and nothing else there")
    return described


def main(arguments: list[str]) -> None:
    options = parser().parse_intermixed_args(arguments)
    for name in ("gpus", "nodes", "gpu_memory", "tflops", "hours"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ValueError(f"--{name.replace('_', '-')} {value:g}: expected a number above 0")
    machine = Machine(options.gpus, options.nodes, options.gpu_memory * GIB, options.cpu)
    tflops = options.tflops or (None if options.cpu else 989.0)
    found = report(options.recipe, options.overrides, machine, tflops, options.hours)
    print(json.dumps(found)) if options.json else show(found)
