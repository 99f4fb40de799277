"""Compare drafters: the same target, prompts and texts for all, and differences of τ paired by prompt.

    draftsmith compare tiny-draft runs/student/artifact                          # decoded with their own trees, at T = 0 and 1
    draftsmith compare runs/medusa-tiny/artifact runs/eagle3-tiny/artifact suffix --tree chain --depth 3
    draftsmith compare tiny-draft runs/student/artifact --expected               # draft models as chains, without decoding a draft

Differences are to the first drafter. --expected takes the target's own texts and computes the τ that a chain has on them: exactly for
greedy decoding, as an expectation under rejection sampling at T > 0 (draftsmith/eval/expected.py). Random draws then add no noise, and a
text costs one forward of each model.
"""

import argparse
import json

<<<<<<< HEAD
from draftsmith.eval import options
from draftsmith.inference.rule_names import RULES
=======
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from draftsmith.data import prompts as prompt_files
from draftsmith.eval import interleaved, loading, ranks
from draftsmith.eval.benchmarks import transformers as bench
from draftsmith.eval.expected import accepted, rounds
from draftsmith.eval.summary import RESAMPLES
from draftsmith.inference.decoder import Completion, Decoder
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.expand import tree_config
from draftsmith.inference.progress import Bar
from draftsmith.inference.sampler import RULES, Sampling
from draftsmith.models.target import Target

__all__ = ["Text", "bootstrap", "decoded", "expected_rounds", "paired", "texts"]

AT_ONCE = 64  # positions whose laws are held at a time, [64,V] for each model
HEADER = ("drafter", "T", "τ", "Δτ", "rounds")


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and what the target itself says to it, as token ids."""

    prompt: list[int]
    tokens: list[int]


def texts(target: Target, prompts: Sequence[list[int]], sampling: Sampling, max_new_tokens: int, rows: int = 8) -> list[Text]:
    """The target's own answers, plainly decoded, `rows` at a time; a prompt's place is its noise key.

    Raises:
        ValueError: a prompt that the decoder refuses.
    """
    answers = _answers("the target's own answers", Decoder(target, slots=rows), prompts, sampling, max_new_tokens)
    return [Text(prompt, answer.tokens) for prompt, answer in zip(prompts, answers, strict=True)]


def expected_rounds(
    target: Target, drafters: Sequence[DraftModel], texts: Sequence[Text], depth: int, sampling: Sampling
) -> tuple[Tensor, Tensor]:
    """Tokens [P] of the texts and the rounds [D,P] float64 that each draft model as a chain of `depth` takes for them: exactly at
    T = 0, the expectation under rejection sampling else (`expected.rounds`). Each model runs once along each text.

    Raises:
        ValueError: a draft model of fewer positions than a text has.
    """
    found = torch.zeros(len(drafters), len(texts), dtype=torch.float64)
    for drafter in drafters:
        drafter.check(max(len(text.prompt) + len(text.tokens) for text in texts))
    with Bar("the drafters along the texts", len(texts)) as bar, torch.inference_mode():
        for place, text in enumerate(texts):
            chances = _chances(target, drafters, text, sampling)
            found[:, place] = torch.tensor([rounds(one, depth) for one in chances], dtype=torch.float64)
            bar.update(place + 1)
    return torch.tensor([len(text.tokens) for text in texts], dtype=torch.float64), found


def _chances(target: Target, drafters: Sequence[DraftModel], text: Text, sampling: Sampling) -> Tensor:
    """[D,n]: a of each drafter, see `expected.accepted`."""
    ids = torch.tensor(text.prompt + text.tokens, device=target.device)
    out = target.forward(ids[None])
    laws = [drafter.position_features(ids, out) for drafter in drafters]  # [S,H] each
    parts = []
    for start in range(len(text.prompt), len(ids), AT_ONCE):
        here = ids[start : start + AT_ONCE]
        before = slice(start - 1, start - 1 + len(here))
        p_logits = target.logits(out.hidden[0, before])
        both = zip(drafters, laws, strict=True)
        parts.append([accepted(p_logits, drafter.model.logits(law[before]), here, sampling) for drafter, law in both])
    return torch.stack([torch.cat(one) for one in zip(*parts, strict=True)]).cpu()


def decoded(
    target: Target, drafter: Any, prompts: Sequence[list[int]], sampling: Sampling, max_new_tokens: int, rows: int
) -> list[Completion]:
    """Real answers with the drafter's own shape and rounds, `rows` prompts at a time; noise keys as in `texts`."""
    return _answers(drafter.method, Decoder(target, drafter, slots=rows), prompts, sampling, max_new_tokens)


def _answers(label: str, decoder: Decoder, prompts: Sequence[list[int]], sampling: Sampling, max_new_tokens: int) -> list[Completion]:
    done = [Completion() for _ in prompts]
    with Bar(f"{label} at T={sampling.temperature:g}", len(prompts)) as bar:
        for steps in decoder.stream(prompts, sampling, max_new_tokens):
            for step in steps:
                answer = done[step.prompt_index]
                answer.tokens += step.tokens
                answer.reason = step.reason
                answer.rounds.append(step.round)
            bar.update(sum(bool(answer.reason) for answer in done))
    return done


def bootstrap(tokens: Tensor, rounds: Tensor) -> Tensor:
    """tokens, rounds [...,P] -> [...,RESAMPLES] float64: Σ tokens / Σ rounds over P prompts drawn with replacement, the same for all."""
    count = rounds.shape[-1]
    drawn = torch.randint(count, (RESAMPLES, count), generator=torch.Generator().manual_seed(0))
    return tokens.double()[..., drawn].sum(-1) / rounds.double()[..., drawn].sum(-1)


def paired(tokens: Tensor, rounds_a: Tensor, rounds_b: Tensor) -> tuple[float, float, float]:
    """tokens [P] (or [2,P], where the answers differ in length), rounds [P] of two drafters -> τ_b − τ_a, and its 95 % bootstrap
    interval over prompts, drawn for both at once: what a prompt does to both does not count."""
    rounds = torch.stack((rounds_a, rounds_b)).double()
    tokens = tokens.double().expand(2, -1)
    tau, drawn = tokens.sum(1) / rounds.sum(1), bootstrap(tokens, rounds)
    low, high = _interval(drawn[1] - drawn[0])
    return float(tau[1] - tau[0]), low, high


def _interval(drawn: Tensor) -> tuple[float, float]:
    low, high = torch.quantile(drawn, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def summarise(names: Sequence[str], temperature: float, tokens: Tensor, rounds: Tensor) -> list[dict[str, Any]]:
    """tokens, rounds [D,P] of the named drafters at one temperature -> a row of the report for each; the first has no difference."""
    rows = []
    for place, name in enumerate(names):
        low, high = _interval(bootstrap(tokens[place], rounds[place]))
        row = {
            "drafter": name,
            "temperature": temperature,
            "tau": float(tokens[place].sum() / rounds[place].sum()),
            "low": low,
            "high": high,
        }
        row |= {"tokens": int(tokens[place].sum()), "rounds": float(rounds[place].sum())}
        if place:
            difference = paired(tokens[[0, place]], rounds[0], rounds[place])
            row |= dict(zip(("delta", "delta_low", "delta_high"), difference, strict=True))
        rows.append(row)
    return rows


def evaluate(
    target: Target,
    drafters: dict[str, Any],
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    temperatures: list[float],
    rule: str,
    rows: int,
    expected: bool,
) -> dict[str, Any]:
    """The report on drafters by name, as JSON has it, one row for each of them at each temperature. `same`, by temperature: how many
    prompts all drafters gave the same answer to, where they were decoded. expected: the drafters are draft models, with chains of one
    depth for shapes."""
    found, same = [], {}
    for temperature in temperatures:
        sampling = Sampling(temperature=temperature, rule=rule)
        if expected:
            models = list(drafters.values())
            own = texts(target, prompts, sampling, max_new_tokens)
            tokens, counts = expected_rounds(target, models, own, models[0].max_depth, sampling)
            tokens = tokens.expand_as(counts)
        else:
            answers = [decoded(target, drafter, prompts, sampling, max_new_tokens, rows) for drafter in drafters.values()]
            tokens = torch.tensor([[len(answer.tokens) for answer in some] for some in answers], dtype=torch.float64)
            counts = torch.tensor([[len(answer.rounds) for answer in some] for some in answers], dtype=torch.float64)
            same[f"{temperature:g}"] = sum(len({tuple(answer.tokens) for answer in some}) == 1 for some in zip(*answers, strict=True))
        found += summarise(list(drafters), temperature, tokens, counts)
    settings = {"prompts": len(prompts), "max_new_tokens": max_new_tokens, "dtype": str(target.dtype).removeprefix("torch.")}
    settings |= {"rule": rule, "rows": rows, "expected": expected}
    shapes = {
        name: {"tree": tree_config(drafter.tree_spec), "nodes": drafter.max_nodes, "depth": drafter.max_depth}
        for name, drafter in drafters.items()
    }
    return {"target": target.identity.to_dict(), "settings": settings, "shapes": shapes, "rows": found, "same": same}


def show(report: dict[str, Any]) -> None:
    """Print the report for a person."""
    settings, expected = report["settings"], report["settings"]["expected"]
    rule = f", rule {settings['rule']}" * any(row["temperature"] for row in report["rows"])
    title = f"{settings['prompts']} prompts, {settings['max_new_tokens']} new tokens, {'expected' if expected else 'decoded'}{rule}"
    table = Table(title=f"Drafters for {report['target']['name']}: {title}", box=box.SIMPLE_HEAD)
    for name in HEADER:
        table.add_column(name, justify="left" if name == "drafter" else "right", no_wrap=name != "drafter", overflow="fold")
    for row in report["rows"]:
        tau = f"{row['tau']:.2f} ({row['low']:.2f} – {row['high']:.2f})"
        delta = f"{row['delta']:+.2f} ({row['delta_low']:+.2f} – {row['delta_high']:+.2f})" if "delta" in row else ""
        table.add_row(row["drafter"], f"{row['temperature']:g}", tau, delta, f"{row['rounds']:.{1 * expected}f}")
    Console().print(table)
    print("In brackets: 95 % intervals over prompts; those of differences are paired.")
    for name, shape in report["shapes"].items():
        print(f"{name}: up to {shape['nodes']} nodes a round, {shape['depth']} deep")
    for temperature, same in report["same"].items():
        print(f"T = {temperature}: {same} of {settings['prompts']} answers are the same with every drafter")
>>>>>>> heads


def parser() -> argparse.ArgumentParser:
    parser = options.new_parser("compare", __doc__)
    parser.add_argument("drafters", nargs="+", metavar="drafter", help=f"{options.DRAFTER_HELP}; two at least")
    options.add_models(parser)
    options.add_prompts(parser)
    options.add_temperatures(parser)
    options.add_rule(parser, [name for name, rule in RULES.items() if rule.lossless], "target-sample; rejection with --expected")
    parser.add_argument("--expected", action="store_true", help="compute the τ of chains of draft models instead of decoding")
    options.add_tree(parser, ["saved", "chain", "dynamic"], "saved; chain with --expected")
    options.add_confidence(parser)
    options.add_slots(parser)
    options.add_json(parser)
    return parser


def main(arguments: list[str]) -> None:
    chosen = parser().parse_args(arguments)
    options.check_numbers(chosen)
    temperatures = options.temperatures(chosen.temperature)
    _check(chosen)

    from draftsmith.data import prompts as prompt_files
    from draftsmith.eval import loading, ranks
    from draftsmith.eval.answers import encode_prompts
    from draftsmith.eval.comparison import Settings, compare_drafters, print_comparison
    from draftsmith.inference.draft_model import DraftModel

    if ranks.count() > 1:
        raise ValueError(f"draftsmith compare in {ranks.count()} processes: expected one; run it alone")
    rule = chosen.rule or ("rejection" if chosen.expected else "target-sample")
    prompts = prompt_files.load(chosen.prompts, chosen.limit)
    target, drafters = loading.open_named(chosen.target, chosen.drafters, chosen.dtype, chosen.trust_remote_code)
    for name, drafter in drafters.items():
        if chosen.expected and not isinstance(drafter, DraftModel):
            raise ValueError(f"--expected: {name} is no draft model; expected one; leave --expected out to decode with it")
<<<<<<< HEAD
        loading.set_confidence(drafter, chosen.confidence)
        tree = chosen.tree or ("chain" if chosen.expected else "saved")
        drafter.tree_spec = loading.tree_spec_from_options(tree, drafter, chosen.depth, chosen.width, chosen.nodes)
=======
        loading.set_confidence(drafter, options.confidence)
        tree = options.tree or ("chain" if options.expected else "saved")
        drafter.tree_spec = loading.tree_spec_from_options(tree, drafter, options.depth, options.width, options.nodes)
>>>>>>> heads
        loading.check_rule(rule, drafter)
    encoded = encode_prompts(target, prompts, chosen.max_new_tokens)
    settings = Settings(chosen.max_new_tokens, temperatures, rule, chosen.slots, chosen.expected)
    report = compare_drafters(target, drafters, [prompt.ids for prompt in encoded], settings)
    if chosen.json:
        print(json.dumps(report, allow_nan=False), flush=True)
    else:
        print_comparison(report)


def _check(chosen: argparse.Namespace) -> None:
    """Raises ValueError for options that contradict each other."""
    if len(chosen.drafters) < 2:
        raise ValueError(f"got one drafter, {chosen.drafters[0]!r}; expected two at least; draftsmith eval measures one")
    if chosen.expected and (chosen.rule or "rejection") != "rejection":
        raise ValueError(f"--expected with --rule {chosen.rule}: what can be computed is rule rejection; leave --rule out")
    if chosen.expected and ((chosen.tree or "chain") != "chain" or chosen.confidence is not None):
        raise ValueError("--expected is of complete chains, got another --tree or a --confidence; leave it out, or leave --expected out")
