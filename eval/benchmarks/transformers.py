"""Speed from prompt to answer against transformers: contenders, their interleaved timing, and the report of `draftsmith bench`."""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import transformers
from rich import box
from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from draftsmith.eval import cost, interleaved
from draftsmith.eval.answers import EncodedPrompt, skipped_line
from draftsmith.eval.interleaved import AnswerFunction, TimedAnswers
from draftsmith.eval.lossless import first_divergence
from draftsmith.eval.output import cell
from draftsmith.eval.settings import label
from draftsmith.inference import machine
from draftsmith.inference.adaptive import AdaptiveDepth
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.drafts import forget
from draftsmith.inference.expand import tree_config
from draftsmith.inference.progress import Bar
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.terminal import printable
from draftsmith.models.target import Target

PLAIN, THEIRS = "plain", "transformers"
LOOKUP, COMPILED = f"{THEIRS}, prompt_lookup", f"{THEIRS}, static cache compiled"
GREEDY = Sampling()
UNCOMPARED = {"answers": None, "same": None, "ties": None}  # sampled by transformers, whose noise is another
MAX_NODES = 64  # of the c(N) table
MIN_COLUMNS = 100  # of the printed table where the output is no terminal

Repeats = list[list[TimedAnswers]]  # of one contender: [repeats][prompts]


def contenders(
    target: Target, drafters: dict[str, Any], prompt: EncodedPrompt, max_new_tokens: int, adaptive_depth: bool, sampling: Sampling = GREEDY
) -> tuple[dict[str, AnswerFunction], dict[str, str], dict[str, str]]:
    """What takes part.

    Args:
        target: of all contenders.
        drafters: by name.
        prompt: a trial for the contender that needs a compiler.
        max_new_tokens: most tokens of an answer.
        adaptive_depth: whether drafters draft only as deep as pays.
        sampling: of all contenders.

    Returns:
        The functions by name, ours first; for names of ours the counterpart in transformers; the names of those that are left out, with the
        reasons.
    """

    def ours(drafter: Any = None) -> AnswerFunction:
        adaptive = AdaptiveDepth() if adaptive_depth and drafter is not None else None
        return interleaved.answer_with_decoder(Decoder(target, drafter, adaptive=adaptive), sampling, max_new_tokens)

    functions = {PLAIN: ours()}
    for name, drafter in drafters.items():
        functions[name] = ours(drafter)
    theirs = partial(interleaved.answer_with_transformers, target, max_new_tokens, sampling=sampling)
    functions[THEIRS] = theirs()
    functions[LOOKUP] = theirs(prompt_lookup_num_tokens=10)
    left_out: dict[str, str] = {}
    if _compiles(target):
        functions[COMPILED] = theirs(cache_implementation="static")
        try:
            functions[COMPILED]([prompt])
        except RuntimeError as error:  # of the compiler; the others can be measured
            del functions[COMPILED]
            left_out[COMPILED] = " ".join(str(error).split())[:200]
    counterparts = {PLAIN: THEIRS}
    for name, drafter in drafters.items():
        if name in ("ngram", "suffix"):
            counterparts[name] = LOOKUP
        elif type(drafter) is DraftModel:
            assisted = f"{THEIRS}, assistant {name.removeprefix(drafter.method).strip()}"
            sizes = drafter.model.config.vocab_size, target.config.vocab_size
            if sizes[0] != sizes[1]:
                left_out[assisted] = f"{sizes[0]} logits, the target has {sizes[1]}"
                continue
            counterparts[name] = assisted
            functions[assisted] = theirs(assistant=drafter.model.model)
    return functions, counterparts, left_out


def _compiles(target: Target) -> bool:
    """Whether generate compiles the forward of a static cache, which it decides by itself."""
    return target.device.type == "cuda"


def _longest(prompts: list[EncodedPrompt]) -> EncodedPrompt:
    return max(prompts, key=lambda prompt: len(prompt.ids))


def time_contenders(
    functions: dict[str, AnswerFunction], drafters: Sequence[Any], prompts: list[EncodedPrompt], repeats: int
) -> dict[str, Repeats]:
    """Time all contenders, those with `drafters` among them, on all prompts, interleaved."""
    # The longest prompt comes first: the warm-up with it allocates all buffers and compiles all graphs.
    first = prompts.index(_longest(prompts))
    batches = [[prompt] for _ in range(repeats) for prompt in prompts[first:] + prompts[:first]]
    by_prompt: dict[str, dict[int, list[TimedAnswers]]] = {name: {prompt.index: [] for prompt in prompts} for name in functions}

    def reset() -> None:
        for drafter in drafters:
            forget(drafter)

    with Bar(f"{len(functions)} ways to answer", len(batches)) as bar:
        for done, (batch, timed) in enumerate(interleaved.interleave(functions, batches, reset, len(prompts)), 1):
            for name, turn in timed.items():
                by_prompt[name][batch[0].index].append(turn)
            bar.update(done)
    return {name: [list(repeat) for repeat in zip(*turns.values(), strict=True)] for name, turns in by_prompt.items()}


def speedup(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    """How many times as fast `ours` is: by prompt (median, 10th and 90th percentile), and of the total times.

    Times are per new token, so that an answer that ended early does not count as a fast one; for equal answers that is the ratio of times.
    A prompt's time is the median of its repeats.

    Args:
        ours: an entry of "contenders" in the report.
        theirs: another.
    """

    def seconds_per_token(entry: dict[str, Any]) -> list[float]:
        repeats = zip(entry["seconds"], entry["tokens"], strict=True)
        rates = [[s / n for s, n in zip(*repeat, strict=True)] for repeat in repeats]
        return [statistics.median(times) for times in zip(*rates, strict=True)]

    ratios = [b / a for a, b in zip(seconds_per_token(ours), seconds_per_token(theirs), strict=True)]
    quantiles = torch.tensor([0.5, 0.1, 0.9], dtype=torch.float64)
    median, low, high = torch.tensor(ratios, dtype=torch.float64).quantile(quantiles).tolist()
    return {"median": median, "p10": low, "p90": high, "total": ours["tokens_per_s"] / theirs["tokens_per_s"]}


def benchmark(
    target: Target,
    drafters: dict[str, Any],
    prompts: list[EncodedPrompt],
    max_new_tokens: int,
    repeats: int,
    adaptive_depth: bool,
    sampling: Sampling = GREEDY,
) -> dict[str, Any]:
    """The report as it is written to JSON; the raw times in seconds are `contenders[name]["seconds"]` [repeats][prompts]."""
    with _without_warnings():
        functions, counterparts, left_out = contenders(target, drafters, _longest(prompts), max_new_tokens, adaptive_depth, sampling)
        timed = time_contenders(functions, list(drafters.values()), prompts, repeats)
    entries = {}
    for name, turns in timed.items():
        ours = name in (PLAIN, *drafters)
        same = _equal_answers(target, prompts, timed[PLAIN], turns, sampling) if ours or sampling.greedy else UNCOMPARED
        entries[name] = _entry(turns, ours) | same
    for entry in entries.values():
        entry |= {"over_plain": speedup(entry, entries[PLAIN]), "over_transformers": speedup(entry, entries[THEIRS])}
    context = statistics.median_low([len(prompt.ids) for prompt in prompts]) + max_new_tokens // 2
    seconds = cost.measure_forward(target, context, MAX_NODES)
    c = cost.relative_forward(seconds)
    return {
        "machine": _machine(target),
        "target": target.identity.to_dict(),
        "settings": {
            "dtype": str(target.dtype).removeprefix("torch."),
            "max_new_tokens": max_new_tokens,
            "repeats": repeats,
            "adaptive_depth": adaptive_depth,
            "sampling": label(sampling),
            "trees": {name: tree_config(drafter.tree_spec) for name, drafter in drafters.items()},
        },
        "prompts": [{"id": prompt.prompt.id, "domain": prompt.prompt.domain, "tokens": len(prompt.ids)} for prompt in prompts],
        "contenders": entries,
        "pairs": [{"ours": a, "theirs": b} | speedup(entries[a], entries[b]) for a, b in counterparts.items()],
        "left_out": left_out,
        "cost": {"context": context, "seconds": seconds, "c": {nodes: c(nodes) for nodes in seconds}},
    }


def _entry(repeats: Repeats, ours: bool) -> dict[str, Any]:
    """Raw times and tokens [repeats][prompts], and their totals. τ is for our rounds, those that drafted nothing included."""
    seconds = [[turn.seconds for turn in turns] for turns in repeats]
    answers = [turn.answers[0] for turns in repeats for turn in turns]
    tokens = sum(len(answer.tokens) for answer in answers)
    return {
        "seconds": seconds,
        "tokens": [[len(turn.answers[0].tokens) for turn in turns] for turns in repeats],
        "total_s": [sum(repeat) for repeat in seconds],
        "tokens_per_s": tokens / sum(map(sum, seconds)),
        "tau": tokens / sum(len(answer.rounds) for answer in answers) if ours else None,
    }


def _equal_answers(
    target: Target, prompts: list[EncodedPrompt], plain: Repeats, repeats: Repeats, sampling: Sampling
) -> dict[str, int | None]:
    """How many answers equal plain decoding's; how many of the others differ at a tie within measured noise."""
    verdicts: list[str] = []
    judged: dict[tuple[int, ...], str] = {}
    for pair in zip(plain, repeats, strict=True):
        for prompt, *turns in zip(prompts, *pair, strict=True):
            expected, got = (turn.answers[0].tokens for turn in turns)
            if (prompt.index, *got) not in judged:
                divergence = first_divergence(target, prompt.prompt.id, prompt.ids, expected, got, sampling, prompt.index)
                judged[prompt.index, *got] = divergence.verdict if divergence else "same"
            verdicts.append(judged[prompt.index, *got])
    return {"answers": len(verdicts), "same": verdicts.count("same"), "ties": verdicts.count("tie")}


def not_lossless(report: dict[str, Any]) -> list[str]:
    """Those of ours with an answer that differs from plain decoding's for another reason than a tie."""
    return [name for name, entry in report["contenders"].items() if entry["tau"] and entry["same"] + entry["ties"] < entry["answers"]]


def _machine(target: Target) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else machine.processor(),
        "cores": machine.cores(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def print_benchmark(report: dict[str, Any]) -> None:
    """Print the report for a person."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(MIN_COLUMNS, console.width))
    say = partial(console.print, highlight=False, markup=False, emoji=False)
    say(printable(_heading(report)))
    say()
    table = _table("", "tokens/s", "τ", "× plain", "total", "× transformers", "total", "same")
    for name, entry in report["contenders"].items():
        tau = f"{entry['tau']:.2f}" if entry["tau"] else ""
        ratios = [*_cells(entry["over_plain"]), *_cells(entry["over_transformers"])]
        table.add_row(
            cell(name), f"{entry['tokens_per_s']:.0f}", tau, *ratios, "" if entry["same"] is None else f"{entry['same']}/{entry['answers']}"
        )
    pairs = _table("ours over theirs", "×", "total")
    for pair in report["pairs"]:
        pairs.add_row(cell(f"{pair['ours']}  /  {pair['theirs']}"), *_cells(pair))
    costs = _table("N", *(str(nodes) for nodes in report["cost"]["c"]))
    costs.add_row(f"c(N) at {report['cost']['context']} tokens", *(f"{c:.2f}" for c in report["cost"]["c"].values()))
    for part in (table, pairs, costs):
        say(part)
        say()
    say("×: times as fast, the median prompt (10th – 90th percentile); a prompt's time is the median of its repeats.")
    say("total: the same over all prompts.  τ: tokens a round, undrafted rounds included.  same: answers equal plain's.")
    if report["settings"].get("skipped"):
        say(skipped_line(report["settings"]["skipped"], report["settings"]["positions"]))
    for name, reason in report["left_out"].items():
        say(printable(f"left out: {name} ({reason})"))
    for name, entry in report["contenders"].items():
        if entry["same"] is not None and entry["same"] < entry["answers"]:
            unexplained = entry["answers"] - entry["same"] - entry["ties"]
            label = " (NOT LOSSLESS)" if name in not_lossless(report) else ""
            say(
                f"{printable(name)}: {entry['ties']} answers differ from plain's at a tie within measured noise, "
                f"{unexplained} for no such reason{label}"
            )


def _heading(report: dict[str, Any]) -> str:
    machine, settings, prompts = report["machine"], report["settings"], report["prompts"]
    lengths = sorted(prompt["tokens"] for prompt in prompts)
    return (
        f"{report['target']['name']} in {settings['dtype']} on {machine['device']}; CPU cores {machine['cores']}, threads "
        f"{machine['threads']}; torch {machine['torch']}, transformers {machine['transformers']}. {len(prompts)} prompts of {lengths[0]} "
        f"to {lengths[-1]} tokens, {settings['max_new_tokens']} new ones at most, repeats {settings['repeats']}; T={settings['sampling']}, batch 1, "
        f"adaptive depth {'on' if settings['adaptive_depth'] else 'off'}."
    )


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=number > 0, overflow="fold")
    return table


def _cells(ratio: dict[str, float]) -> tuple[str, str]:
    return f"{ratio['median']:.2f} ({ratio['p10']:.2f}–{ratio['p90']:.2f})", f"{ratio['total']:.2f}"


@contextmanager
def _without_warnings() -> Iterator[None]:
    """transformers without warnings: assisted generation warns of how it calls its own assistant."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
