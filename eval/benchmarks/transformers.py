"""Measure speed from prompt to answer against transformers: the same models and prompts, in one process, in turn; greedy, batch 1.

    draftsmith bench                                                  # what ships here: target, draft model, drafters without weights
    draftsmith bench --drafter runs/target-tiny-draft/artifact --drafter ngram
    draftsmith bench --target Qwen/Qwen3-8B --drafter Qwen/Qwen3-0.6B --prompts my-prompts.jsonl --out speed.json

Every contender answers a prompt before the next prompt comes, and another one is the first each time.
"""

import argparse
import json
import os
import platform
import statistics
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
import transformers
from rich import box
from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from draftsmith.data import prompts as prompt_files
from draftsmith.eval import cost, interleaved, loading, ranks
from draftsmith.eval.benchmarks import rounds as bench_rounds
from draftsmith.eval.interleaved import Case, Runner
from draftsmith.eval.lossless import compare
from draftsmith.inference.adaptive import AdaptiveDepth
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.expand import tree_config
from draftsmith.inference.progress import Bar
from draftsmith.inference.sampler import Sampling
from draftsmith.models.target import Target

DRAFTERS = ("ngram", "suffix")  # where none is named; for the target that ships here its draft model too
PLAIN, THEIRS = "plain", "transformers"
LOOKUP, COMPILED = f"{THEIRS}, prompt_lookup", f"{THEIRS}, static cache compiled"
MOST_NODES = 64  # of the c(N) table
NARROWEST = 100  # columns of the table where the output is no terminal


def contenders(
    target: Target, drafters: dict[str, Any], case: Case, max_new_tokens: int, governed: bool
) -> tuple[dict[str, Runner], dict[str, str], dict[str, str]]:
    """Runners by name, ours first; of ours by name the counterpart in transformers; why a contender is left out, by name. `case` is
    tried on the contender that needs a compiler."""

    def ours(drafter: Any = None) -> Runner:
        governor = AdaptiveDepth() if governed and drafter is not None else None
        return interleaved.ours(Decoder(target, drafter, governor=governor), Sampling(), max_new_tokens)

    runners = {PLAIN: ours()} | {name: ours(drafter) for name, drafter in drafters.items()}
    runners[THEIRS] = interleaved.transformers(target, max_new_tokens)
    runners[LOOKUP] = interleaved.transformers(target, max_new_tokens, prompt_lookup_num_tokens=10)
    left_out: dict[str, str] = {}
    if _compiles(target):
        runners[COMPILED] = interleaved.transformers(target, max_new_tokens, cache_implementation="static")
        try:
            runners[COMPILED]([case])
        except RuntimeError as error:  # of the compiler: the others can be measured
            del runners[COMPILED]
            left_out[COMPILED] = " ".join(str(error).split())[:200]
    counterparts = {PLAIN: THEIRS}
    for name, drafter in drafters.items():
        if name in loading.WEIGHTLESS:
            counterparts[name] = LOOKUP
        elif isinstance(drafter, DraftModel):
            rival = f"{THEIRS}, assistant {name.removeprefix(drafter.method).strip()}"
            sizes = drafter.model.config.vocab_size, target.config.vocab_size
            if sizes[0] != sizes[1]:
                left_out[rival] = f"{sizes[0]} logits, the target has {sizes[1]}"
                continue
            counterparts[name] = rival
            runners[rival] = interleaved.transformers(target, max_new_tokens, drafter.model.model)
    return runners, counterparts, left_out


def _compiles(target: Target) -> bool:
    """Whether generate compiles the forward of a static cache, which it does by itself."""
    return target.device.type == "cuda"


def _longest(cases: list[Case]) -> Case:
    return max(cases, key=lambda case: len(case.ids))


def measure(runners: dict[str, Runner], cases: list[Case], repeats: int) -> dict[str, list[list[interleaved.Turn]]]:
    """The turns of each runner, [repeats][cases]."""
    # Buffers grow and graphs are compiled in the warm-up, which is on the first case.
    first = _longest(cases).key
    units = [[case] for _ in range(repeats) for case in cases[first:] + cases[:first]]
    found: dict[str, list[list[interleaved.Turn]]] = {name: [[] for _ in cases] for name in runners}
    with Bar(f"{len(runners)} ways to answer", len(units)) as bar:
        for done, (some, turns) in enumerate(interleaved.take_turns(runners, units), 1):
            for name, turn in turns.items():
                found[name][some[0].key].append(turn)
            bar.update(done)
    return {name: [list(repeat) for repeat in zip(*by_case, strict=True)] for name, by_case in found.items()}


def faster(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    """How many times as fast as `theirs` `ours` is: by prompt (median, 10th and 90th percentile), and of the total times.

    Times are per new token, so that an answer that ended early is not taken for a fast one; of equal answers it is the times' ratio.
    A prompt's time is the median of its repeats."""

    def by_prompt(one: dict[str, Any]) -> list[float]:
        repeats = zip(one["seconds"], one["tokens"], strict=True)
        rates = [[s / n for s, n in zip(*repeat, strict=True)] for repeat in repeats]
        return [statistics.median(times) for times in zip(*rates, strict=True)]

    ratios = torch.tensor([b / a for a, b in zip(by_prompt(ours), by_prompt(theirs), strict=True)], dtype=torch.float64)
    median, low, high = ratios.quantile(torch.tensor([0.5, 0.1, 0.9], dtype=torch.float64)).tolist()
    return {"median": median, "p10": low, "p90": high, "total": ours["tokens_per_s"] / theirs["tokens_per_s"]}


def evaluate(
    target: Target, drafters: dict[str, Any], cases: list[Case], max_new_tokens: int, repeats: int, governed: bool
) -> dict[str, Any]:
    """The report, as JSON has it; its raw times, in seconds, are `contenders[name]["seconds"]` [repeats][prompts]."""
    runners, counterparts, left_out = contenders(target, drafters, _longest(cases), max_new_tokens, governed)
    turns = measure(runners, cases, repeats)
    ways = {name: _way(found, name in (PLAIN, *drafters)) | _same(target, cases, turns[PLAIN], found) for name, found in turns.items()}
    for way in ways.values():
        way |= {"over_plain": faster(way, ways[PLAIN]), "over_transformers": faster(way, ways[THEIRS])}
    context = statistics.median_low([len(case.ids) for case in cases]) + max_new_tokens // 2
    seconds = cost.measure(target, context, MOST_NODES)
    c = cost.relative(seconds)
    settings = {"dtype": str(target.dtype).removeprefix("torch."), "max_new_tokens": max_new_tokens, "repeats": repeats}
    return {
        "machine": _machine(target),
        "target": target.identity.to_dict(),
        "settings": settings
        | {"governor": governed, "trees": {name: tree_config(drafter.tree_spec) for name, drafter in drafters.items()}},
        "prompts": [{"id": case.prompt.id, "domain": case.prompt.domain, "tokens": len(case.ids)} for case in cases],
        "contenders": ways,
        "pairs": [{"ours": a, "theirs": b} | faster(ways[a], ways[b]) for a, b in counterparts.items()],
        "left_out": left_out,
        "cost": {"context": context, "seconds": seconds, "c": {nodes: c(nodes) for nodes in seconds}},
    }


def _way(turns: list[list[interleaved.Turn]], ours: bool) -> dict[str, Any]:
    """Raw times and tokens [repeats][prompts], and what comes of them all; τ is of our rounds, those that drafted nothing included."""
    seconds = [[turn.seconds for turn in repeat] for repeat in turns]
    answers = [turn.answers[0] for repeat in turns for turn in repeat]
    tokens = sum(len(answer.tokens) for answer in answers)
    return {
        "seconds": seconds,
        "tokens": [[len(turn.answers[0].tokens) for turn in repeat] for repeat in turns],
        "total_s": [sum(repeat) for repeat in seconds],
        "tokens_per_s": tokens / sum(map(sum, seconds)),
        "tau": tokens / sum(len(answer.rounds) for answer in answers) if ours else None,
    }


def _same(target: Target, cases: list[Case], plain: list[list[interleaved.Turn]], turns: list[list[interleaved.Turn]]) -> dict[str, int]:
    """How many answers equal plain decoding's; of the others, how many part at a tie within measured noise."""
    verdicts: list[str] = []
    judged: dict[tuple[int, ...], str] = {}
    for pair in zip(plain, turns, strict=True):
        for case, *both in zip(cases, *pair, strict=True):
            expected, got = (turn.answers[0].tokens for turn in both)
            if (case.key, *got) not in judged:
                parted = compare(target, case.prompt.id, case.ids, expected, got, Sampling(), case.key)
                judged[case.key, *got] = parted.verdict if parted else "same"
            verdicts.append(judged[case.key, *got])
    return {"answers": len(verdicts), "same": verdicts.count("same"), "ties": verdicts.count("tie")}


def lossy(report: dict[str, Any]) -> list[str]:
    """Those of ours with an answer that is not plain decoding's for another reason than a tie."""
    return [name for name, way in report["contenders"].items() if way["tau"] and way["same"] + way["ties"] < way["answers"]]


def _machine(target: Target) -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    cpu = (named or [platform.processor() or platform.machine()])[0]
    return {
        "device": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else cpu,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def show(report: dict[str, Any]) -> None:
    """Print the report for a person."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(NARROWEST, console.width))
    say = partial(console.print, highlight=False, markup=False)
    machine, settings, prompts = report["machine"], report["settings"], report["prompts"]
    lengths = sorted(prompt["tokens"] for prompt in prompts)
    say(
        f"{report['target']['name']} in {settings['dtype']} on {machine['device']}; CPU cores {machine['cores']}, threads "
        f"{machine['threads']}; torch {machine['torch']}, transformers {machine['transformers']}. {len(prompts)} prompts of {lengths[0]} "
        f"to {lengths[-1]} tokens, {settings['max_new_tokens']} new ones at most, repeats {settings['repeats']}; greedy, batch 1, "
        f"governor {'on' if settings['governor'] else 'off'}.\n"
    )
    table = _table("", "tokens/s", "τ", "× plain", "total", "× transformers", "total", "same")
    for name, way in report["contenders"].items():
        ratios = [cell for other in ("over_plain", "over_transformers") for cell in _cells(way[other])]
        tau = f"{way['tau']:.2f}" if way["tau"] else ""
        table.add_row(name, f"{way['tokens_per_s']:.0f}", tau, *ratios, f"{way['same']}/{way['answers']}")
    pairs = _table("ours over theirs", "×", "total")
    for pair in report["pairs"]:
        pairs.add_row(f"{pair['ours']}  /  {pair['theirs']}", *_cells(pair))
    costs = _table("N", *(str(nodes) for nodes in report["cost"]["c"]))
    costs.add_row(f"c(N) at {report['cost']['context']} tokens", *(f"{c:.2f}" for c in report["cost"]["c"].values()))
    for one in (table, pairs, costs):
        say(one)
        say()
    say("×: times as fast, the median prompt (10th – 90th percentile); a prompt's time is the median of its repeats.")
    say("total: ratio of all seconds.  τ: tokens a round, undrafted rounds included.  same: answers equal plain's.")
    for name, reason in report["left_out"].items():
        say(f"left out: {name} ({reason})")
    for name, way in report["contenders"].items():
        if way["same"] < way["answers"]:
            other = way["answers"] - way["same"] - way["ties"]
            lost = " (NOT LOSSLESS)" if name in lossy(report) else ""
            say(f"{name}: {way['ties']} answers part from plain's at a tie within measured noise, {other} for no such reason{lost}")


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if place else "left", no_wrap=place > 0, overflow="fold")
    return table


def _cells(ratio: dict[str, float]) -> tuple[str, str]:
    return f"{ratio['median']:.2f} ({ratio['p10']:.2f}–{ratio['p90']:.2f})", f"{ratio['total']:.2f}"


def open_all(target: str | None, words: Sequence[str], dtype: str, trust_remote_code: bool) -> tuple[Target, dict[str, Any]]:
    """One target, and the drafters by the names of their contenders."""
    loaded, found = loading.open_models(target, words, dtype, trust_remote_code)
    drafters: dict[str, Any] = {}
    for word, drafter in zip(words, found, strict=True):
        drafters[_name(word, drafter, drafters)] = drafter
    return loaded, drafters


def _name(word: str, drafter: Any, taken: Container[str]) -> str:
    """The method's name where that says enough; an artifact is known by the folder that it is in."""
    path = Path(word)
    full = f"{drafter.method} {(path.parent if path.name == 'artifact' else path).name or word}"
    names = chain([full] if isinstance(drafter, DraftModel) else [drafter.method, full], (f"{full} ({n})" for n in count(2)))
    return next(name for name in names if name not in taken)


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers without warnings: assisted generation warns of how it calls its own assistant."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def parser() -> argparse.ArgumentParser:
    described = argparse.ArgumentParser("draftsmith bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    described.add_argument("--target", help="folder or Hub id; by default the one that a drafter was trained for, else `tiny`")
    described.add_argument(
        "--drafter",
        action="append",
        help="ngram, suffix, or folder or Hub id of a trained drafter or of a causal LM with the target's tokens; may be given more than "
        f"once (default: {', '.join(DRAFTERS)}, and tiny-draft for tiny)",
    )
    described.add_argument("--prompts", help=".jsonl file with `prompt` (or `turns`, `messages`) and `domain`; by default the shipped ones")
    described.add_argument("--limit", type=int, default=3, help="prompts of each domain (default 3)")
    described.add_argument("--max-new-tokens", type=int, default=96)
    described.add_argument("--repeats", type=int, default=3, help="passes over the prompts (default 3)")
    described.add_argument(
        "--tree", choices=["saved", "chain", "dynamic"], default="saved", help="the drafters' own draft trees, or another for all"
    )
    described.add_argument("--depth", type=int, help="draft no deeper than this")
    described.add_argument("--width", type=int, help="of a dynamic tree (default 4)")
    described.add_argument("--nodes", type=int, help="of a dynamic tree, the root included (default 16)")
    described.add_argument("--no-governor", action="store_true", help="draft in every round, whether it pays or not")
    described.add_argument("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto")
    described.add_argument("--trust-remote-code", action="store_true", help="run the models' code from the Hub")
    described.add_argument("--kernels", action="store_true", help="measure the Triton kernels and whole rounds with them instead, on a GPU")
    described.add_argument("--json", action="store_true", help="print the report as JSON on stdout, and nothing else there")
    described.add_argument("--out", type=Path, help="write the JSON to this file too")
    return described


def main(arguments: list[str]) -> None:
    options = parser().parse_args(arguments)
    loading.check_numbers(options)
    if ranks.count() > 1:
        raise ValueError(
            f"draftsmith bench in {ranks.count()} processes: they would disturb each other's clocks; expected one; run it alone"
        )
    if options.out and (options.out.is_dir() or not options.out.absolute().parent.is_dir()):
        raise ValueError(f"--out {options.out}: expected a file in a folder that exists; make the folder first")
    if options.kernels:
        bench_rounds.main(options.out, options.json)
        return
    prompts = prompt_files.load(options.prompts, options.limit)
    words = list(dict.fromkeys(options.drafter or (*DRAFTERS, *["tiny-draft"] * (options.target in (None, "tiny")))))
    target, drafters = open_all(options.target, words, options.dtype, options.trust_remote_code)
    for drafter in drafters.values():
        drafter.tree_spec = loading.tree_spec_from_options(options.tree, drafter, options.depth, options.width, options.nodes)
    cases = interleaved.cases(target, prompts, options.max_new_tokens)
    with _quiet():
        report = evaluate(target, drafters, cases, options.max_new_tokens, options.repeats, not options.no_governor)
    report["settings"]["drafters"] = dict(zip(drafters, words, strict=True))
    text = json.dumps(report, allow_nan=False)
    if options.out:
        part = options.out.with_name(options.out.name + ".part")
        part.write_text(text + "\n")
        part.replace(options.out)
    if options.json:
        print(text, flush=True)
    else:
        show(report)
    if lossy(report):
        raise SystemExit(1)
