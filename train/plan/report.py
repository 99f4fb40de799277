"""The report of `draftsmith plan`: memory and time that a recipe needs. Of the target only the config is read.

Memory is what PyTorch allocates in a step (train/plan/memory.py); 7 % of a GPU are left for CUDA, NCCL and gaps. Times are predicted from the
FLOPs counted in the objective, τ from measured runs of the method (train/plan/scaling.py).
"""

import importlib
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from draftsmith.data import corpus
from draftsmith.eval import intervals
from draftsmith.models.model_files import read_tokenizer
from draftsmith.train import recipe as recipes
from draftsmith.train.engine import recipe_file
from draftsmith.train.plan import scaling
from draftsmith.train.plan.memory import GIB, USABLE, Machine, PlannedRun, fitting
from draftsmith.train.recipe import Recipe

SHORTEST = 512  # tokens of a row: the advice makes no row shorter than this
EFFICIENCY = 0.4  # the fraction of a GPU's peak FLOP/s that training reaches
# Columns of the table: field of MemoryEstimate -> title.
COLUMNS = {
    "target": "target",
    "weights": "weights",
    "gradients": "grads",
    "optimizer": "optimizer",
    "activations": "step",
    "buffers": "buffers",
    "total": "total",
    "host": "host",
}


def advice(path: str, overrides: list[str], method: ModuleType, run: PlannedRun) -> list[dict[str, Any]]:
    """Recipe keys with which a GPU needs less memory, the key that helps most first.

    Returns:
        For each suggestion its keys, the total of the launcher that needs least with them, and the fastest launcher that then fits, or None.
        If no single key is enough, the last entry has all of them together, with rows as short as necessary.
    """
    schema = schema_of(method)
    least = min(estimate.total for estimate in run.estimates())

    def tried(*keys: str) -> dict[str, Any]:
        # The target's layout changes nothing of what is traced.
        traces = run.traces if all(key.startswith("target.") for key in keys) else {}
        try:
            estimates = PlannedRun(recipes.load(schema, path, [*overrides, *keys]), method, run.machine, traces).estimates()
        except ValueError:  # keys that do not go with the recipe's others
            return {"keys": list(keys), "total": least, "fits": None}
        fits = fitting(estimates, run.machine)
        return {"keys": list(keys), "total": min(estimate.total for estimate in estimates), "fits": fits and fits.launcher}

    tries = [tried(key) for key in _candidates(run, recipes.keys(schema))]
    helpful = sorted((entry for entry in tries if entry["total"] < least), key=lambda entry: entry["total"])
    if any(entry["fits"] for entry in helpful):
        return helpful
    keys = [key for entry in helpful for key in entry["keys"]]
    target_keys = [key for key in keys if key.startswith("target.")]  # a target that is cut over ranks cannot be quantised: take the first
    together = [key for key in keys if not key.startswith("data.") and key not in target_keys[1:]]
    length = run.recipe.data.seq_len // (2 if together else 4)
    last = tried(*together, f"data.seq_len={length}")
    while not last["fits"] and length // 2 >= SHORTEST:
        length //= 2
        last = tried(*together, f"data.seq_len={length}")
    return [*helpful, last] if last["total"] < least else helpful


def _candidates(run: PlannedRun, known: dict[str, Any]) -> Iterator[str]:
    recipe, target = run.recipe, run.recipe.target
    if run.micro > 1:
        yield f"train.micro_batch_size={run.micro // 2}"
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
    """The script that trains a recipe: the one whose own sections its keys name, else the one that the name of its file begins with.

    Raises:
        ValueError: neither identifies one script.
    """
    recipes.load(Recipe, path, [], shared=True)  # says what is wrong with the file
    file = recipes.find(path)
    named = {key.split(".")[0] for key in (*recipe_file.read(file), *overrides)}
    scripts = sorted(
        script
        for script in Path(__file__).parents[1].glob("*.py")
        if re.search(r"^def build_untrained\(", script.read_text(encoding="utf-8"), re.M)
    )
    methods = {script.stem: importlib.import_module(f"draftsmith.train.{script.stem}") for script in scripts}
    own = {name: schema_of(method).model_fields.keys() - Recipe.model_fields.keys() for name, method in methods.items()}
    matching = [name for name, sections in own.items() if sections & named]
    if not matching:
        matching = [name for name in methods if re.match(rf"{name}\d*(-|$)", file.stem)]
    if not matching and re.match(r"target(-|$)", file.stem):
        raise ValueError(f"{path} trains a target (`draftsmith train target`), of which `plan` has no estimate; give a recipe of a drafter")
    if len(matching) != 1:
        sections = ", ".join(f"{section}.* for train/{name}.py" for name, sections in own.items() for section in sorted(sections))
        raise ValueError(
            f"{path}: cannot tell which script trains it; expected keys of one of {sections}, or a file named after the script"
        )
    return methods[matching[0]]


def schema_of(method: ModuleType) -> type[Recipe]:
    """The recipe class of a script."""
    return next(value for value in vars(method).values() if isinstance(value, type) and issubclass(value, Recipe) and value is not Recipe)


def report(path: str, overrides: list[str], machine: Machine, tflops: float | None = None, hours: float | None = None) -> dict[str, Any]:
    """Everything that `draftsmith plan` says, as numbers: bytes, FLOPs, tokens, seconds.

    Args:
        path: the recipe.
        overrides: recipe keys as key=value.
        machine: where it is to run.
        tflops: peak of one GPU, in 10¹² FLOP/s; None: no time is predicted.
        hours: that the run may take; None: no limit.
    """
    method = method_of(path, overrides)
    recipe = recipes.load(schema_of(method), path, overrides)
    run = PlannedRun(recipe, method, machine)
    estimates = run.estimates()
    chosen = fitting(estimates, machine)
    tokens, flops = recipe.train.steps * recipe.train.batch_size * recipe.data.seq_len, run.flops_per_token()
    rate = EFFICIENCY * tflops * 1e12 * run.ranks / flops if tflops else None
    wanted = tokens / (3600 * hours) if hours else None
    return {
        "recipe": path,
        "overrides": overrides,
        "script": f"train/{method.__name__.rpartition('.')[2]}.py",
        "machine": asdict(machine),
        "target": {
            "name": run.target.name,
            "parameters": run.target_parameters,
            "layers": run.has_layers,
            "layout": run.layout,
            "quantise": recipe.target.quantise,
        },
        "drafter": {"trained": run.trained, "frozen": run.frozen},
        "step": {
            "rows": recipe.train.batch_size,
            "positions": recipe.data.seq_len,
            "ranks": run.ranks,
            "micro": run.micro,
            "accumulation": run.accumulation,
            "bf16": run.bf16,
        },
        "launchers": [
            asdict(estimate) | {"total": estimate.total, "fits": fitting([estimate], machine) is not None} for estimate in estimates
        ],
        "chosen": chosen and chosen.launcher,
        "advice": [] if chosen else advice(path, overrides, method, run),
        "loading": run.loading_bytes,
        "work": {
            "steps": recipe.train.steps,
            "tokens": tokens,
            "flops_per_token": flops,
            "tflops": tflops,
            "hours": hours,
            "predicted_tokens_per_s": rate,
            "predicted_hours": rate and tokens / rate / 3600,
            "wanted_tokens_per_s": wanted,
        },
        "tau": {target: tau._asdict() for target, tau in scaling.expected(method.__name__.rpartition(".")[2], recipe, tokens).items()},
        "features": _features(recipe, run, tokens, wanted or rate),
    }


def _features(recipe: Recipe, run: PlannedRun, tokens: int, rate: float | None) -> dict[str, Any] | None:
    """The store that the recipe reads: bytes of the prepared data, or else of every token of the run; MB/s to feed it at `rate` tokens/s."""
    each = run.bytes_per_token()
    if not each:
        return None
    prepared = _prepared(recipe)
    return {
        "bytes_per_token": each,
        "prepared": prepared,
        "bytes": each * (tokens if prepared is None else prepared),
        "read_mb_per_s": each * rate / 1e6 if rate and recipe.features.mode == "offline" else None,
    }


def _prepared(recipe: Recipe) -> int | None:
    """Tokens of the recipe's data if data.cache has them; None if it does not, or if only the Hub could tell."""
    plan, section = recipe.data.plan(), recipe.target
    if not all(source.path == "stdlib" or Path(os.path.expanduser(source.path)).exists() for _, source in plan.sources()):
        return None
    try:
        tokenizer = read_tokenizer(section.path, revision=section.revision, trust_remote_code=section.trust_remote_code)
    except (OSError, ValueError):  # the run needs one, its plan does not
        return None
    if tokenizer is None:
        return None
    recipe.data.give_template(tokenizer)
    parts = [corpus.read(Path(recipe.data.cache) / f"{part}-{plan.key(tokenizer)}.safetensors") for part in ("train", "valid")]
    return sum(len(part.ids) for part in parts if part) if all(parts) else None


def show(plan: dict[str, Any]) -> None:
    """Print the report for a person."""
    machine, step, target, drafter = plan["machine"], plan["step"], plan["target"], plan["drafter"]
    where = "a CPU" if machine["cpu"] else f"{_many(machine['nodes'] * machine['gpus'], 'GPU')} of {machine['memory'] / GIB:g} GiB"
    console = Console(width=min(100, Console().width), highlight=False, markup=False)  # what a person typed is no markup
    console.print(f"{plan['recipe']} ({plan['script']}) on {where}, {'bf16' if step['bf16'] else 'fp32'}", style="bold")
    if not target["layers"]:
        layout = "embeddings and head alone"
    else:
        layout = {"none": "complete", "layers": "in layers"}.get(target["layout"], "in pieces")
    quantised = f", {target['quantise']}" if target["quantise"] else ""
    console.print(f"target   {target['name']}: {_count(target['parameters'])} parameters{quantised}, {layout}")
    frozen = f", {_count(drafter['frozen'])} frozen" if drafter["frozen"] else ""
    console.print(f"drafter  {_count(drafter['trained'])} parameters trained{frozen}")
    shape = f"{_many(step['ranks'], 'process')} × {_many(step['accumulation'], 'micro-batch')} of {step['micro']}"
    console.print(f"step     {_many(step['rows'], 'row')} of {step['positions']:,} tokens: {shape}")
    console.print(_table(plan))
    _show_advice(plan, console)
    _show_work(plan, console)
    for target, tau in plan["tau"].items():
        interval = intervals.shown(tau["low"], tau["high"], ".1f")
        console.print(
            f"τ        predicted {tau['estimate']:.1f} ({interval}) for a greedy chain of 4, by runs on {target}; another target or other data differ"
        )
    if plan["features"]:
        _show_features(plan["features"], console)


def _show_work(plan: dict[str, Any], console: Console) -> None:
    work = plan["work"]
    console.print(f"work     {work['steps']:,} steps, {_count(work['tokens'])} tokens, {work['flops_per_token'] / 1e9:,.3g} GFLOP each")
    if work["predicted_hours"]:
        console.print(
            f"time     predicted {_hours(work['predicted_hours'])}: {work['predicted_tokens_per_s']:,.0f} tokens/s "
            f"at {EFFICIENCY:.0%} of {work['tflops']:g} TFLOP/s"
        )
    if work["wanted_tokens_per_s"]:
        share = work["wanted_tokens_per_s"] * work["flops_per_token"] / plan["step"]["ranks"] / 1e12
        console.print(f"         {work['wanted_tokens_per_s']:,.0f} tokens/s to end in {work['hours']:g} h: {share:,.3g} TFLOP/s a process")


def _show_features(features: dict[str, Any], console: Console) -> None:
    each, prepared = f"{features['bytes_per_token'] / 1e3:,.1f} kB a token", features["prepared"]
    if prepared is None:
        console.print(f"features {_size(features['bytes'])} for the tokens of this run: {each}, the data is not prepared yet")
    else:
        console.print(f"features {_size(features['bytes'])}: {each}, {_count(prepared)} are prepared")
    if features["read_mb_per_s"]:
        console.print(f"         read at {features['read_mb_per_s']:,.0f} MB/s to feed that; the time to capture them comes on top")


def _table(plan: dict[str, Any]) -> Table:
    cpu, estimates = plan["machine"]["cpu"], plan["launchers"]
    unit, name = (GIB, "GiB") if min(estimate["total"] for estimate in estimates) >= GIB else (2**20, "MiB")
    shown = {key: title for key, title in COLUMNS.items() if any(estimate[key] for estimate in estimates)}
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    if cpu:
        table.title = f"{name} of memory"
    else:
        table.title = f"{name} of each GPU, {USABLE * plan['machine']['memory'] / GIB:.1f} GiB of which a run may fill"
    table.caption = "step: activations, chunks of losses" + (" · host: memory of each machine" if "host" in shown else "")
    table.title_justify = table.caption_justify = "left"
    titles = ["launcher", *shown.values()] if cpu else ["launcher", *shown.values(), "fits"]
    for title in titles:
        table.add_column(title, justify="left" if title == "launcher" else "right", no_wrap=True)
    for estimate in estimates:
        if estimate["launcher"] == plan["chosen"]:
            style = "bold"
        else:
            style = None if estimate["fits"] else "dim"
        cells = [estimate["launcher"], *(f"{estimate[key] / unit:,.1f}" for key in shown)]
        if not cpu:
            cells.append("yes" if estimate["fits"] else "no")
        table.add_row(*cells, style=style)
    return table


def _show_advice(plan: dict[str, Any], console: Console) -> None:
    """The launcher to take; or what would make one fit."""
    machine, step, overrides = plan["machine"], plan["step"], plan["overrides"]
    if plan["loading"]:
        console.print(f"loading  {_size(plan['loading'])} of the first machine's memory while the target is read")
    if plan["chosen"]:
        words = ["accelerate launch --config_file", f"recipes/accelerate-{plan['chosen']}.yaml"]
        if plan["chosen"] != "one":
            words += ["--num_processes", str(step["ranks"])]
            if machine["nodes"] > 1:
                words += ["--num_machines", str(machine["nodes"]), "--machine_rank $NODE_RANK", "--main_process_ip $MASTER_ADDR"]
                words.append("--main_process_port ${MASTER_PORT:-29500}")  # as recipes/accelerate-multi-node.yaml explains
        console.print("run     ", *words, plan["script"], shlex.quote(plan["recipe"]), *map(shlex.quote, overrides), soft_wrap=True)
        return
    least = min(estimate["total"] for estimate in plan["launchers"])
    usable = USABLE * machine["memory"] / GIB
    console.print(f"No launcher fits into {usable:.1f} GiB a GPU; the least is {least / GIB:.1f}. What helps:", style="bold")
    for entry in plan["advice"]:
        change = f"{entry['total'] / GIB:7.1f} GiB  {(entry['total'] - least) / GIB:+7.1f}"
        fits = f"  (fits: {entry['fits']})" if entry["fits"] else ""
        console.print(f"{change}  {' '.join(entry['keys'])}{fits}", soft_wrap=True)


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
