"""Measure a drafter's acceptance before it is deployed.

    draftsmith eval runs/medusa-tiny/artifact
    draftsmith eval runs/medusa-tiny/artifact --prompts my-prompts.jsonl --json > report.json

Half of the prompts choose the draft tree, the other half is reported. Every answer is compared with plain decoding's.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import GenerationConfig

from draftsmith.data import prompts as prompt_files
from draftsmith.data.prompts import Prompt
from draftsmith.eval import card, cost, plot, session, table, trees
from draftsmith.eval.lossless import compare
from draftsmith.eval.records import PositionRecord, Report, RoundRecord, as_json, distinct_ngrams, rank_of, write_positions, write_rounds
from draftsmith.eval.summary import acceptance
from draftsmith.inference.decoder import Completion, Decoder
from draftsmith.inference.progress import Bar
from draftsmith.inference.sampler import Sampling
from draftsmith.models.drafter import DrafterModel
from draftsmith.models.target import Target

RANKS_KEPT = 32


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt with its ids; `key` is the noise key of its request."""

    prompt: Prompt
    ids: list[int]
    key: int


def evaluate(
    target: Target,
    drafter: DrafterModel,
    prompts: list[Prompt],
    *,
    max_new_tokens: int,
    temperatures: list[float],
    most_nodes: int,
    tree: list[list[int]] | None = None,
    largest: bool = False,
) -> tuple[Report, list[RoundRecord], list[PositionRecord]]:
    """The report of `drafter` on `prompts`, its round records and (where the tree was chosen) position records.

    `tree` fixes the draft tree. Otherwise half of the prompts choose it, the other half is reported: the best by τ/c(N), or with
    `largest` the best of `most_nodes` nodes.
    """
    cases = _cases(target, prompts, max_new_tokens)
    choosing, reporting = ([], cases) if tree is not None else _halves(cases)
    context = statistics.median_low([len(case.ids) for case in cases]) + max_new_tokens // 2
    seconds = cost.measure(target, context, most_nodes)
    by_nodes: list[dict[str, float]] = []
    records: list[PositionRecord] = []
    if tree is None:
        records = positions(target, drafter, choosing + reporting, max_new_tokens)
        chosen_on, reported_on = records[: len(choosing)], records[len(choosing) :]
        order = trees.grow(chosen_on, most_nodes - 1)
        chosen = order if largest else trees.choose(chosen_on, cost.relative(seconds), most_nodes)
        by_nodes = _by_nodes(reported_on, order, cost.relative(seconds))
        tree = [list(path) for path in chosen]
    drafter.config.tree = tree
    settings = {"max_new_tokens": max_new_tokens, "prompts": len(reporting), "dtype": str(target.dtype).removeprefix("torch.")}
    settings["threads"] = torch.get_num_threads()
    report = Report(target.identity.to_dict(), drafter.config.model_type, settings, tree, len(tree) + 1, seconds, by_nodes)
    rounds: list[RoundRecord] = []
    for temperature in temperatures:
        found, answers, seconds_by = _decode(target, drafter, reporting, max_new_tokens, temperature, report)
        rounds += found
        report.overall[f"{temperature:g}"] = acceptance(found, drafter.max_depth)
        if temperature == temperatures[0]:
            report.distinct = distinct_ngrams(answers)
            for domain in dict.fromkeys(case.prompt.domain for case in reporting):
                report.domains[domain] = acceptance([record for record in found if record.domain == domain], drafter.max_depth)
            report.speed = _speed(seconds_by, found, report.overall[f"{temperature:g}"].tau)
    return report, rounds, records


def positions(target: Target, drafter: DrafterModel, cases: list[Case], max_new_tokens: int) -> list[PositionRecord]:
    """Run the drafter along the target's own greedy answers, from every position at once."""
    answers = [Completion() for _ in cases]
    with Bar("the target's own answers", len(cases)) as bar:
        for steps in Decoder(target, rows=8).stream([case.ids for case in cases], Sampling(), max_new_tokens):
            for step in steps:
                answers[step.prompt_index].tokens += step.tokens
                answers[step.prompt_index].reason = step.reason
            bar.update(sum(bool(answer.reason) for answer in answers))
    records = []
    for case, answer in zip(cases, answers, strict=True):
        ids = torch.tensor(case.ids + answer.tokens, device=target.device)
        with torch.inference_mode():
            hidden = target.forward(ids[None]).hidden[0]
            # A round whose root is at i reads the hidden state at i − 1; its draft at depth d is token i + d.
            roots = range(max(1, len(case.ids) - 1), len(ids) - 1)
            depth = drafter.depth_limit
            ranks = torch.full((len(roots), depth), -1)
            logs = torch.full((len(roots), depth), -torch.inf)
            for start in range(0, len(roots), 64):
                at = torch.arange(roots[start], min(roots[start] + 64, roots.stop), device=target.device)
                logits = drafter.position_logits(hidden[at - 1])  # [64,K,V]
                for k in range(depth):
                    inside = at + k + 1 < len(ids)
                    here = (at[inside] - roots.start).cpu()
                    rank, log = rank_of(logits[inside, k], ids[at[inside] + k + 1], RANKS_KEPT)
                    ranks[here, k], logs[here, k] = rank.cpu(), log.cpu()
        records.append(PositionRecord(case.prompt.id, case.prompt.domain, ranks, logs))
    return records


def _by_nodes(records: list[PositionRecord], order: list[trees.Path], price: Callable[[int], float]) -> list[dict[str, float]]:
    rows = []
    for size in [size for size in (2, 4, 8, 12, 16, 24, 32, 48, 64, 128) if size <= len(order) + 1]:
        tau = trees.tau(records, order[: size - 1])
        rows.append({"nodes": size, "tau": tau, "c": price(size), "tau_over_c": tau / price(size)})
    return rows


def _cases(target: Target, prompts: list[Prompt], max_new_tokens: int) -> list[Case]:
    cases = [Case(prompt, session.encode(target, prompt), key) for key, prompt in enumerate(prompts)]
    for case in cases:
        if len(case.ids) + max_new_tokens > target.max_positions:
            raise ValueError(
                f"prompt {case.prompt.id!r} has {len(case.ids)} tokens; with {max_new_tokens} new ones it does not fit the target's "
                f"context of {target.max_positions}; shorten it or lower --max-new-tokens"
            )
    return cases


def _halves(cases: list[Case]) -> tuple[list[Case], list[Case]]:
    """Every other prompt of each domain to choose the tree on, the rest to report; a domain's only prompt is reported."""
    domains = {domain: [case for case in cases if case.prompt.domain == domain] for domain in dict.fromkeys(c.prompt.domain for c in cases)}
    choosing = [case for found in domains.values() if len(found) > 1 for case in found[0::2]]
    reporting = [case for found in domains.values() for case in (found[1::2] if len(found) > 1 else found)]
    if not choosing:
        raise ValueError("one prompt of a domain is too few: half of them choose the tree, the others are reported; give more, or --tree")
    return choosing, reporting


def _decode(
    target: Target, drafter: DrafterModel, cases: list[Case], max_new_tokens: int, temperature: float, report: Report
) -> tuple[list[RoundRecord], list[list[int]], dict[str, list[float]]]:
    """Each prompt plainly, drafted and (greedy) by transformers, one after the other in turning order, alone in its batch."""
    sampling = Sampling(temperature=temperature)
    context = max(len(case.ids) for case in cases) + max_new_tokens
    decoders = {"plain": Decoder(target, context=context, timed=True), "drafted": Decoder(target, drafter, context=context, timed=True)}
    seconds: dict[str, list[float]] = {name: [] for name in decoders} | ({"transformers": []} if temperature == 0 else {})
    seconds |= {"plain_verify": [], "drafted_verify": []}
    records, answers = [], []
    for name in decoders:  # warm up
        decoders[name].generate([cases[0].ids], sampling, 4)
    _generate(target, cases[0].ids, 4)
    with Bar(f"decoding at T={temperature:g}", len(cases)) as bar:
        for turn, case in enumerate(cases):
            done: dict[str, Completion] = {}
            theirs: list[int] | None = None
            runners = [name for name in seconds if not name.endswith("_verify")]
            for name in runners[turn % len(runners) :] + runners[: turn % len(runners)]:
                start = time.perf_counter()
                if name == "transformers":
                    theirs = _generate(target, case.ids, max_new_tokens)
                else:
                    done[name] = decoders[name].generate([case.ids], sampling, max_new_tokens, requests=[case.key])[0]
                seconds[name].append(time.perf_counter() - start)
            for name in decoders:
                seconds[f"{name}_verify"] += [round.verify_s for round in done[name].rounds]
            plain, answer = done["plain"].tokens, done["drafted"].tokens
            parted = compare(target, case.prompt.id, case.ids, plain, answer, sampling, case.key)
            report.answers += 1
            report.compared += theirs is not None
            report.like_transformers += theirs == plain
            if parted:
                report.divergences.append(parted)
            answers.append(answer)
            records += _records(case, done["drafted"], temperature)
            bar.update(turn + 1, f"tau {sum(r.committed for r in records) / len(records):.2f}")
    return records, answers, seconds


def _records(case: Case, completion: Completion, temperature: float) -> list[RoundRecord]:
    return [
        RoundRecord(
            case.prompt.id,
            case.prompt.domain,
            temperature,
            round.position,
            round.size,
            round.length,
            round.length - 1,
            round.draft_s,
            round.verify_s,
            round.other_s,
        )
        for round in completion.rounds
    ]


def _generate(target: Target, ids: list[int], max_new_tokens: int) -> list[int]:
    """transformers' own greedy answer, whatever else the target's generation_config asks for."""
    stops = sorted(target.stop_ids)
    config = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=stops or None, pad_token_id=stops[0] if stops else 0
    )
    prompt = torch.tensor([ids], device=target.device)
    with torch.inference_mode():
        answer = cast(Any, target.model).generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)
    return answer[0, len(ids) :].tolist()


def _speed(seconds: dict[str, list[float]], records: list[RoundRecord], tau: float) -> dict[str, float]:
    """Speedups are of total times over the same prompts; c(N) is the verifying time of a round over a plain one's, medians."""
    total = {name: sum(times) for name, times in seconds.items()}
    c = statistics.median(seconds["drafted_verify"]) / statistics.median(seconds["plain_verify"])
    tokens = sum(record.committed for record in records)
    speed = {
        "tau": tau,
        "c": c,
        "tau_over_c": tau / c,
        "speedup": total["plain"] / total["drafted"],
        "plain_tokens_per_s": tokens / total["plain"],
        "drafted_tokens_per_s": tokens / total["drafted"],
    }
    if "transformers" in total:
        speed["speedup_over_transformers"] = total["transformers"] / total["drafted"]
        speed["plain_over_transformers"] = total["transformers"] / total["plain"]
    return speed | {"share_of_limit": speed["speedup"] / speed["tau_over_c"]}


def parser() -> argparse.ArgumentParser:
    described = argparse.ArgumentParser("draftsmith eval", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    described.add_argument("drafter", help="folder or Hub id of a trained drafter")
    described.add_argument("--target", help="folder or Hub id; by default the one that the drafter was trained for")
    described.add_argument("--prompts", help=".jsonl file with `prompt` (or `turns`, `messages`) and `domain`; by default the shipped ones")
    described.add_argument("--limit", type=int, help="prompts of each domain")
    described.add_argument("--max-new-tokens", type=int, default=96)
    described.add_argument("--temperature", type=float, action="append", help="may be given more than once (default: 0 and 1)")
    described.add_argument("--nodes", type=int, default=64, help="most nodes of a draft tree, the root included (default 64)")
    described.add_argument(
        "--tree",
        choices=["best", "largest", "saved", "chain"],
        default="best",
        help="best: by τ/c(N), and written to the artifact (default); largest: of --nodes nodes; saved: the artifact's",
    )
    described.add_argument("--trust-remote-code", action="store_true", help="run the target's model code from the Hub")
    described.add_argument("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto")
    described.add_argument("--json", action="store_true", help="print the report as JSON on stdout, and nothing else there")
    return described


def main(arguments: list[str]) -> None:
    options = parser().parse_args(arguments)
    temperatures = list(dict.fromkeys(options.temperature or [0.0, 1.0]))
    checks = (
        ("--nodes", options.nodes, 2, 256),
        ("--max-new-tokens", options.max_new_tokens, 2, 1 << 20),
        ("--limit", 1 if options.limit is None else options.limit, 1, 1 << 20),
        ("--temperature", min(temperatures), 0, float("inf")),
    )
    for name, value, low, high in checks:
        if not low <= value <= high:
            raise ValueError(f"{name} {value}: expected {low} to {high}")
    prompts = prompt_files.load(options.prompts, options.limit)
    target, drafter = session.open_pair(options.target, options.drafter, options.dtype, options.trust_remote_code)
    assert drafter is not None
    fixed = {"saved": drafter.config.tree, "chain": [[0] * k for k in range(1, drafter.depth_limit + 1)]}
    report, rounds, records = evaluate(
        target,
        drafter,
        prompts,
        max_new_tokens=options.max_new_tokens,
        temperatures=temperatures,
        most_nodes=options.nodes,
        tree=fixed.get(options.tree),
        largest=options.tree == "largest",
    )
    if options.json:
        print(as_json(report), flush=True)
    else:
        table.show(report)
    folder = Path(options.drafter)
    if folder.is_dir() and options.tree == "best":
        _keep(folder, drafter, report, rounds, records)
        if not options.json:
            print(
                f"\nWritten to {folder}: README.md (model card), config.json (the tree), acceptance.json, rounds.jsonl, positions.jsonl, survival.png"
            )
            print(f'Try it:  {session.command()} generate --drafter {folder} --show-accepted "def parse_"')
    if any(parted.verdict == "bug" for parted in report.divergences):
        raise SystemExit(1)


def _keep(folder: Path, drafter: DrafterModel, report: Report, rounds: list[RoundRecord], records: list[PositionRecord]) -> None:
    """Write the measurements and the chosen tree into the artifact; the rest of its config stays as it is."""
    config = json.loads((folder / "config.json").read_text()) | {"tree": report.tree}
    part = folder / "config.json.part"
    part.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    part.replace(folder / "config.json")
    write_rounds(folder / "rounds.jsonl", rounds)
    write_positions(folder / "positions.jsonl", records)
    (folder / "acceptance.json").write_text(as_json(report) + "\n")
    plot.survival(report, folder / "survival.png")
    card.write(folder, drafter.config, report)


if __name__ == "__main__":
    main(sys.argv[1:])
