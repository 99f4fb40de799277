"""Measure a drafter's acceptance before it is deployed.

    draftsmith eval runs/medusa-tiny/artifact
    draftsmith eval runs/medusa-tiny/artifact --prompts my-prompts.jsonl --json > report.json

Half of the prompts choose the draft tree, the other half is reported. Every answer is compared with plain decoding's.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from draftsmith.data import prompts as prompt_files
from draftsmith.data.prompts import Prompt
from draftsmith.eval import card, cost, plot, session, table, trees
from draftsmith.eval.lossless import compare
from draftsmith.eval.records import PositionRecord, Report, RoundRecord, distinct_ngrams, rank_of, write_jsonl
from draftsmith.eval.summary import acceptance
from draftsmith.inference.decoder import Completion, Decoder
from draftsmith.inference.sampler import Sampling
from draftsmith.models.drafter import DrafterModel
from draftsmith.models.target import Target
from draftsmith.train.progress import Bar

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
) -> tuple[Report, list[RoundRecord]]:
    """The report of `drafter` on `prompts`, and its round records.

    `tree` fixes the draft tree. Otherwise half of the prompts choose it, the other half is reported: the best by τ/c(N), or with
    `largest` the best of `most_nodes` nodes.
    """
    cases = _cases(target, prompts, max_new_tokens)
    choosing, reporting = (cases[0::2], cases[1::2]) if tree is None else ([], cases)
    if not reporting:
        raise ValueError("one prompt is too few: half of the prompts choose the tree, the other half is reported; give more, or --tree")
    context = statistics.median_low([len(case.ids) for case in cases]) + max_new_tokens // 2
    seconds = cost.measure(target, context, most_nodes)
    by_nodes: list[dict[str, float]] = []
    if tree is None:
        records = positions(target, drafter, cases, max_new_tokens)
        order = trees.grow(records[0::2], most_nodes - 1)
        chosen = order if largest else trees.choose(records[0::2], cost.relative(seconds), most_nodes)
        by_nodes = _by_nodes(records[1::2], order, cost.relative(seconds))
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
    return report, rounds


def positions(target: Target, drafter: DrafterModel, cases: list[Case], max_new_tokens: int) -> list[PositionRecord]:
    """Run the drafter along the target's own greedy answers, from every position at once."""
    answers = Decoder(target, rows=8).generate([case.ids for case in cases], Sampling(), max_new_tokens)
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
    # Alternate within each domain, so that both halves have all of them.
    order = {domain: [case for case in cases if case.prompt.domain == domain] for domain in dict.fromkeys(p.domain for p in prompts)}
    return [case for domain in order.values() for case in domain[: len(domain) // 2 * 2 or 1]]


def _decode(
    target: Target, drafter: DrafterModel, cases: list[Case], max_new_tokens: int, temperature: float, report: Report
) -> tuple[list[RoundRecord], list[list[int]], dict[str, list[float]]]:
    """Each prompt plainly, drafted and (greedy) by transformers, one after the other in turning order, alone in its batch."""
    sampling = Sampling(temperature=temperature)
    context = max(len(case.ids) for case in cases) + max_new_tokens
    decoders = {"plain": Decoder(target, context=context), "drafted": Decoder(target, drafter, context=context)}
    seconds: dict[str, list[float]] = {name: [] for name in decoders} | ({"transformers": []} if temperature == 0 else {})
    seconds |= {"plain_verify": [], "drafted_verify": []}
    records, answers = [], []
    for name in decoders:  # warm up
        decoders[name].generate([cases[0].ids], sampling, 4)
    with Bar(f"decoding at T={temperature:g}", len(cases)) as bar:
        for turn, case in enumerate(cases):
            done: dict[str, Completion] = {}
            runners = [name for name in seconds if not name.endswith("_verify")]
            for name in runners[turn % len(runners) :] + runners[: turn % len(runners)]:
                start = time.perf_counter()
                if name == "transformers":
                    _generate(target, case.ids, max_new_tokens)
                else:
                    done[name] = decoders[name].generate([case.ids], sampling, max_new_tokens, requests=[case.key])[0]
                seconds[name].append(time.perf_counter() - start)
            for name in decoders:
                seconds[f"{name}_verify"] += [round.verify_s for round in done[name].rounds]
            plain, answer = done["plain"].tokens, done["drafted"].tokens
            parted = compare(target, case.prompt.id, case.ids, plain, answer, sampling, case.key)
            report.answers += 1
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


def _generate(target: Target, ids: list[int], max_new_tokens: int) -> None:
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cast(Any, target.model).generate(
            torch.tensor([ids], device=target.device),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64, device=target.device),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=sorted(target.stop_ids) or None,
            pad_token_id=min(target.stop_ids, default=0),
        )


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
        "--tree", help="`saved` (the artifact's), `chain`, or `largest` (--nodes nodes); by default the one of the best τ/c(N)"
    )
    described.add_argument("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto")
    described.add_argument("--json", action="store_true", help="print the report as JSON on stdout, and nothing else there")
    return described


def main(arguments: list[str]) -> None:
    options = parser().parse_args(arguments)
    if options.nodes < 2 or options.max_new_tokens < 2:
        raise ValueError(f"--nodes {options.nodes} and --max-new-tokens {options.max_new_tokens}: expected at least 2 of each")
    prompts = prompt_files.load(options.prompts, options.limit)
    target, drafter = session.open_pair(options.target, options.drafter, options.dtype)
    assert drafter is not None
    fixed = {"saved": drafter.config.tree, "chain": [[0] * k for k in range(1, drafter.depth_limit + 1)]}
    if options.tree not in (None, "largest", *fixed):
        raise ValueError(f"--tree {options.tree!r}: expected `saved`, `chain` or `largest`")
    report, rounds = evaluate(
        target,
        drafter,
        prompts,
        max_new_tokens=options.max_new_tokens,
        temperatures=options.temperature or [0.0, 1.0],
        most_nodes=options.nodes,
        tree=fixed.get(options.tree or ""),
        largest=options.tree == "largest",
    )
    folder = Path(options.drafter)
    if folder.is_dir():
        drafter.config.save_pretrained(folder)
        write_jsonl(folder / "rounds.jsonl", rounds)
        (folder / "acceptance.json").write_text(json.dumps(dataclasses.asdict(report), indent=1) + "\n")
        plot.survival(report, folder / "survival.png")
        card.write(folder, drafter.config, report)
    if options.json:
        print(json.dumps(dataclasses.asdict(report)))
        return
    table.show(report)
    if folder.is_dir():
        print(f"\nWritten to {folder}: README.md (model card), acceptance.json, rounds.jsonl, survival.png")
        print(f'Try it:  draftsmith generate --drafter {folder} --show-accepted "def parse_"')


if __name__ == "__main__":
    main(sys.argv[1:])
