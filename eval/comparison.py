"""Several drafters on the same prompts and texts, and differences of their τ paired by prompt.

Letters: S positions · V target vocabulary · H hidden size. P is the number of prompts, M the number of drafters, n that of new tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from draftsmith.eval.answers import EncodedPrompt, TargetText, decode_all, skipped_line, target_texts
from draftsmith.eval.expected import acceptance_probabilities, expected_rounds
from draftsmith.eval.intervals import of_difference, of_ratio, shown
from draftsmith.eval.output import cell
from draftsmith.eval.paired import sign_flip, wins
from draftsmith.eval.report import greedy
from draftsmith.eval.settings import label
from draftsmith.eval.totals import columns, first_turns
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.drafts import forget
from draftsmith.inference.expand import tree_config
from draftsmith.inference.progress import Bar
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.terminal import printable
from draftsmith.models.target import Target

AT_ONCE = 64  # positions whose distributions exist at a time, [64,V] for each model
HEADER = ("domain", "drafter", "T", "τ", "rounds")
DIFFERENCES = ("domain", "drafter", "T", "Δτ", "p", "+ = −")


@dataclass(frozen=True, slots=True)
class Settings:
    """How drafters are compared.

    Attributes:
        max_new_tokens: most tokens of an answer.
        samplings: each is measured, by one rule.
        slots: prompts decoded at a time.
        expected: compute the expected rounds instead of decoding. The drafters are then draft models with chains of one depth.
    """

    max_new_tokens: int
    samplings: list[Sampling]
    slots: int
    expected: bool


def rounds_along_texts(
    target: Target, drafters: Sequence[DraftModel], texts: Sequence[TargetText], depth: int, sampling: Sampling
) -> tuple[Tensor, Tensor]:
    """The rounds that draft models take for given texts. Each model runs once along each text.

    Args:
        target: sampled the texts.
        drafters: each drafts chains.
        texts: prompts with the target's own answers.
        depth: of the chains.
        sampling: how the texts were sampled.

    Returns:
        The tokens [P] of the texts, and the rounds [M,P], both float64: exact for greedy, else the expectation under rejection sampling.

    Raises:
        ValueError: a text is longer than a draft model's context.
    """
    rounds = torch.zeros(len(drafters), len(texts), dtype=torch.float64)
    for drafter in drafters:
        drafter.check(max(len(text.prompt) + len(text.tokens) for text in texts))
    with Bar("the drafters along the texts", len(texts)) as bar, torch.inference_mode():
        for number, text in enumerate(texts):
            probabilities = _acceptance(target, drafters, text, sampling)
            rounds[:, number] = torch.tensor([expected_rounds(row, depth) for row in probabilities], dtype=torch.float64)
            bar.update(number + 1)
    return torch.tensor([len(text.tokens) for text in texts], dtype=torch.float64), rounds


def _acceptance(target: Target, drafters: Sequence[DraftModel], text: TargetText, sampling: Sampling) -> Tensor:
    """[M,n]: the acceptance probabilities of each drafter along a text."""
    ids = torch.tensor(text.prompt + text.tokens, device=target.device)
    output = target.forward(ids[None])
    hidden = [drafter.position_features(ids, output) for drafter in drafters]  # [S,H] each
    parts = []
    for start in range(len(text.prompt), len(ids), AT_ONCE):
        tokens = ids[start : start + AT_ONCE]
        before = slice(start - 1, start - 1 + len(tokens))
        p_logits = target.logits(output.hidden[0, before])
        q_logits = (drafter.logits(states[before]) for drafter, states in zip(drafters, hidden, strict=True))
        parts.append(torch.stack([acceptance_probabilities(p_logits, logits, tokens, sampling) for logits in q_logits]))
    return torch.cat(parts, dim=1).cpu()


def summarise(names: Sequence[str], setting: str, tokens: Tensor, rounds: Tensor) -> list[dict[str, Any]]:
    """Rows of the report, one for each drafter at one setting. All but the first have the difference to the first, the p-value of a sign-flip
    test, and the prompts that they win, tie and lose.

    Args:
        names: of the drafters.
        setting: label of the sampling.
        tokens: [M,P].
        rounds: [M,P].
    """
    rows = []
    for number, name in enumerate(names):
        tau = of_ratio(tokens[number], rounds[number])
        row = {
            "drafter": name,
            "setting": setting,
            "tau": tau.estimate,
            "low": tau.low,
            "high": tau.high,
            "tokens": int(tokens[number].sum()),
            "rounds": float(rounds[number].sum()),
        }
        if number:
            pair = tokens[[0, number]], rounds[[0, number]]
            row["delta"], row["delta_low"], row["delta_high"] = of_difference(*pair)
            row["p"] = sign_flip(*pair)
            row["wins"], row["ties"], row["losses"] = wins(*pair)
        rows.append(row)
    return rows


def by_domain(names: Sequence[str], setting: str, domains: Sequence[str], tokens: Tensor, rounds: Tensor) -> list[dict[str, Any]]:
    """`summarise` for each domain, where there are several. Each row has its `domain`; domains [P] are those of the prompts."""
    rows = []
    for domain in dict.fromkeys(domains) if len(set(domains)) > 1 else ():
        chosen = torch.tensor([each == domain for each in domains])
        rows += [{"domain": domain} | row for row in summarise(names, setting, tokens[:, chosen], rounds[:, chosen])]
    return rows


def compare_drafters(
    target: Target, drafters: dict[str, Any], encoded: list[EncodedPrompt], skipped: dict[str, int], settings: Settings
) -> dict[str, Any]:
    """The report as it is written to JSON.

    Args:
        target: of all drafters.
        drafters: by name.
        encoded: the prompts.
        skipped: by domain, prompts that do not fit the target's context.
        settings: how they are compared.

    Returns:
        target, settings, trees (the draft tree of each drafter), rows (one for each drafter at each setting), domains (likewise
        for each domain), and same: by setting, to how many prompts all drafters gave the same answer. same is empty where nothing was
        decoded.
    """
    rows, domain_rows, same = [], [], {}
    prompts, names = [prompt.ids for prompt in encoded], [prompt.prompt.id for prompt in encoded]
    domains = {prompt.prompt.id: prompt.prompt.domain for prompt in encoded}
    for sampling in settings.samplings:
        setting = label(sampling)
        if settings.expected:
            models = list(drafters.values())
            texts = target_texts(target, prompts, sampling, settings.max_new_tokens)
            length, expected = rounds_along_texts(target, models, texts, models[0].max_depth, sampling)
            counts = [dict(zip(names, zip(length.tolist(), each.tolist(), strict=True), strict=True)) for each in expected]
        else:
            answers = []
            for drafter in drafters.values():
                forget(drafter)
                decoder = Decoder(target, drafter, slots=settings.slots)
                answers.append(decode_all(drafter.method, decoder, prompts, sampling, settings.max_new_tokens))
            counts = [{name: (len(each.tokens), len(each.rounds)) for name, each in zip(names, row, strict=True)} for row in answers]
            distinct = [len({tuple(answer.tokens) for answer in column}) for column in zip(*answers, strict=True)]
            same[setting] = distinct.count(1)
        tokens, rounds = columns(counts, names)
        rows += summarise(list(drafters), setting, tokens, rounds)
        domain_rows += by_domain(list(drafters), setting, [domains[name] for name in first_turns(names)], tokens, rounds)
    return {
        "target": target.identity.to_dict(),
        "settings": {
            "prompts": len(prompts),
            "skipped": skipped,
            "positions": target.max_positions,
            "max_new_tokens": settings.max_new_tokens,
            "dtype": str(target.dtype).removeprefix("torch."),
            "rule": settings.samplings[0].rule,
            "slots": settings.slots,
            "expected": settings.expected,
        },
        "trees": {
            name: {"tree": tree_config(drafter.tree_spec), "nodes": drafter.max_nodes, "depth": drafter.max_depth}
            for name, drafter in drafters.items()
        },
        "rows": rows,
        "domains": domain_rows,
        "same": same,
    }


def print_comparison(report: dict[str, Any]) -> None:
    """Print the report for a person."""
    settings, expected = report["settings"], report["settings"].get("expected", False)
    how = "measured" if "expected" not in settings else "expected" if expected else "decoded"
    title = f"{settings['prompts']} prompts, {settings['max_new_tokens']} new tokens, {how}"
    if "rule" in settings and not all(greedy(row["setting"]) for row in report["rows"]):  # of measured folders each row's label has it
        title += f", rule {settings['rule']}"
    console, everything = Console(), [*report["domains"], *report["rows"]]
    rounds = ".1f" if expected else ".0f"
    console.print(
        _table(
            f"Drafters for {report['target']['name']}: {title}",
            HEADER,
            everything,
            lambda row: (f"{row['tau']:.2f} ({shown(row['low'], row['high'])})", f"{row['rounds']:{rounds}}"),
        )
    )
    console.print(
        _table(
            f"Differences to {report['rows'][0]['drafter']}",
            DIFFERENCES,
            [row for row in everything if "delta" in row],
            lambda row: (
                f"{row['delta']:+.2f} ({shown(row['delta_low'], row['delta_high'], '+.2f')})",
                f"{row['p']:.3f}" if row["p"] >= 0.001 else "< 0.001",
                f"{row['wins']} {row['ties']} {row['losses']}",
            ),
        )
    )
    print("In brackets: 95 % intervals over prompts; those of differences are paired. p: a sign-flip test of Δτ = 0, over prompts.")
    print("+ = −: prompts on which τ is higher than the first drafter's, the same, and lower.")
    if settings.get("skipped"):
        print(skipped_line(settings["skipped"], settings["positions"]))
    for name, tree in report["trees"].items():
        cost = _budget(report.get("budgets", {}).get(name, {}))
        print(f"{printable(name, keep='')}: up to {tree['nodes']} nodes a round, {tree['depth']} deep{cost}")
    for row in report.get("differences", []):
        values = ", ".join(f"{name} {value}" for name, value in row["values"].items())
        print(printable(f"not measured in the same way: {row['what']} ({values})", keep=""))
    for setting, same in report["same"].items():
        print(f"T = {setting}: {same} of {settings['prompts']} answers are the same with every drafter")


def _table(title: str, header: Sequence[str], rows: Sequence[dict[str, Any]], cells: Callable[[dict[str, Any]], tuple[str, ...]]) -> Table:
    """A table with `cells` of each row after its domain (where there are several), drafter and setting."""
    table = Table(title=cell(title), title_style="italic", box=box.SIMPLE_HEAD)
    several = any("domain" in row for row in rows)
    for name in header if several else header[1:]:
        text = name in ("domain", "drafter")
        # A setting may be long; it must not take the names' place.
        least = min(12, max((len(row["drafter"]) for row in rows), default=0)) if name == "drafter" else None
        wraps = text or name == "T"
        table.add_column(name, justify="left" if text else "right", no_wrap=not wraps, overflow="fold", min_width=least)
    for row in rows:
        first = (cell(row.get("domain", "all")),) if several else ()
        table.add_row(*first, cell(row["drafter"]), row["setting"], *cells(row))
    return table


def _budget(known: dict[str, Any]) -> str:
    """What a drafter cost to make, as far as it is known."""
    if known.get("training_tokens") == 0:
        return "; no training"
    forms = (("training_tokens", "{:,} training tokens"), ("hours", "{:.2f} h of training"))
    parts = [form.format(known[key]) for key, form in forms if known.get(key) is not None]
    if known.get("bytes") is not None:
        parts.append(f"{known['bytes'] / 1e6:.1f} MB")
    return "; " + ", ".join(parts) if parts else ""
