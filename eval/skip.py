"""Search the decoder layers that a target leaves out when it drafts for itself (Draft & Verify, https://arxiv.org/abs/2309.08168).

    draftsmith skip --prompts chat --limit 2 --target HuggingFaceTB/SmolLM2-135M-Instruct
    draftsmith skip --trials 200 --depth 3                                   # of `tiny`, on Python

A trial drafts chains from every position of the target's own greedy answers, which gives exactly the τ that decoding would have. What is
maximised is τ over the cost of a round, at the best depth: c(N) and the seconds of a layer are measured first. The paper's Bayesian
optimisation is replaced by a plain search: every early exit; the layers whose loss alone harms least, one more at a time; then random changes
of one to three layers of the best set. Every second conversation chooses; what is reported comes from the others, since the best of
many trials is partly luck.
"""

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draftsmith.eval import options

if TYPE_CHECKING:
    from draftsmith.eval.answers import TargetText
    from draftsmith.models.target import Target

Layers = frozenset[int]
PAIRS = 9  # of forwards with all layers and with half of them that are timed


@dataclass(frozen=True, slots=True)
class Trial:
    """A set of layers left out, and chains of the depth that is best with it.

    Attributes:
        skipped: the layers.
        depth: of the chain.
        tau: tokens a round.
        cost: of a round, in plain rounds.
    """

    skipped: Layers
    depth: int
    tau: float
    cost: float

    @property
    def speedup(self) -> float:
        """Predicted, of decoding."""
        return self.tau / self.cost


def parser() -> argparse.ArgumentParser:
    parser = options.new_parser("skip", __doc__)
    options.add_models(parser)
    options.add_prompts(parser, 6)
    parser.add_argument("--depth", type=int, default=4, help="longest chain that is tried (default 4)")
    parser.add_argument("--trials", type=int, default=150, help="sets of layers that are tried (default 150)")
    parser.add_argument("--seed", type=int, default=0, help="of the random changes (default 0)")
    options.add_json(parser)
    return parser


def main(arguments: list[str]) -> None:
    chosen = parser().parse_args(arguments)
    options.check_numbers(chosen)
    if not 1 <= chosen.trials <= 1 << 20:
        raise ValueError(f"--trials {chosen.trials}: expected 1 to {1 << 20}")

    from draftsmith.data import prompts as prompt_files
    from draftsmith.eval import loading, output
    from draftsmith.eval.answers import encode_prompts, target_texts
    from draftsmith.eval.report import to_json
    from draftsmith.inference.sampler import Sampling
    from draftsmith.inference.self_speculation import SelfSpeculation

    if chosen.depth > SelfSpeculation.depth_limit:
        raise ValueError(f"--depth {chosen.depth}: expected 1 to {SelfSpeculation.depth_limit}")
    given = prompt_files.load(chosen.prompts, chosen.limit, distinct=True)
    target, _ = loading.open_models(chosen.target, [], chosen.dtype, chosen.trust_remote_code)
    if target.num_layers < 2:
        raise ValueError(f"target {target.name!r} has one decoder layer, and none can be left out; give another target")
    prompts = given or loading.shipped_prompts(target, chosen.limit)
    encoded, skipped = encode_prompts(target, prompts, chosen.max_new_tokens)
    texts = target_texts(target, [prompt.ids for prompt in encoded], Sampling(), chosen.max_new_tokens)
    conversations = list(dict.fromkeys(prompt.conversation for prompt in encoded))
    if len(conversations) < 2:
        raise ValueError("got one prompt; expected two at least: half of them choose the layers, the others are reported")
    choosing = set(conversations[::2])
    halves = [
        [text for prompt, text in zip(encoded, texts, strict=True) if (prompt.conversation in choosing) is half] for half in (True, False)
    ]
    report = report_of(target, halves, chosen.depth, chosen.trials, chosen.seed) | {"skipped": skipped, "positions": target.max_positions}
    output.deliver(lambda: print(to_json(report) if chosen.json else "\n".join(lines_of(report))))


def report_of(target: "Target", halves: "list[list[TargetText]]", depth: int, trials: int, seed: int) -> dict[str, Any]:
    """Search by the first half of the texts; the best set and the best early exit, by it and by the other half."""
    costs = measure_costs(target, halves[0], depth)
    chosen, reported = (scorer(target, texts, *costs) for texts in halves)
    done = search(target.num_layers, trials, chosen, seed)
    exits = [trial for trial in done if trial.skipped == frozenset(range(min(trial.skipped), target.num_layers))]
    entries = {}
    for name, best in (("layers", max(done, key=lambda trial: trial.speedup)), ("early exit", max(exits, key=lambda trial: trial.speedup))):
        held_out = reported(best.skipped, best.depth)
        entries[name] = {
            "drafter": word(best.skipped, target.num_layers if name == "early exit" else 0),
            "depth": best.depth,
            "cost": best.cost,
            **{
                f"{half}_{field}": getattr(trial, field)
                for half, trial in (("choosing", best), ("held_out", held_out))
                for field in ("tau", "speedup")
            },
        }
    return {"trials": len(done), "texts": [len(texts) for texts in halves], "layers": target.num_layers, "best": entries}


def word(skipped: Layers, layers: int = 0) -> str:
    """What --drafter takes; of an early exit where the number of the target's layers is given."""
    return f"early-exit:{layers - len(skipped)}" if layers else f"skip:{','.join(map(str, sorted(skipped)))}"


def lines_of(report: dict[str, Any]) -> list[str]:
    """The report for people."""
    from draftsmith.eval.answers import skipped_line

    lines = [
        f"{report['trials']} sets of the {report['layers']} layers tried on {report['texts'][0]} answers, reported on {report['texts'][1]} others"
    ]
    for entry in report["best"].values():
        lines += [
            f"--drafter {entry['drafter']} --tree chain --depth {entry['depth']}",
            f"    held out: τ {entry['held_out_tau']:.2f}, predicted speedup {entry['held_out_speedup']:.2f} (where it was chosen: "
            f"{entry['choosing_tau']:.2f}, {entry['choosing_speedup']:.2f}); a round costs {entry['cost']:.2f} plain rounds",
        ]
    if max(entry["held_out_speedup"] for entry in report["best"].values()) <= 1:
        lines.append("Neither pays on this machine: plain decoding is as fast or faster.")
    return [*lines, *filter(None, [skipped_line(report["skipped"], report["positions"])])]


def search(layers: int, trials: int, score: Callable[[Layers], Trial], seed: int) -> list[Trial]:
    """Score at most `trials` sets of layers: early exits, sets of the least harmful layers, random changes of the best.

    Args:
        layers: of the target.
        trials: sets that are scored.
        score: of a set, not empty and not all layers.
        seed: of the random changes.

    Returns:
        Each set that was scored, once, in that order.
    """
    done: dict[Layers, Trial] = {}

    def attempt(skipped: Layers) -> None:
        if 0 < len(skipped) < layers and skipped not in done and len(done) < trials:
            done[skipped] = score(skipped)

    for count in range(1, layers):
        attempt(frozenset(range(layers - count, layers)))
    singles = [frozenset([layer]) for layer in range(layers)]
    for single in singles:
        attempt(single)
    harmless = sorted((done[single] for single in singles if single in done), key=lambda trial: trial.speedup, reverse=True)
    for count in range(2, len(harmless) + 1):
        attempt(frozenset().union(*(trial.skipped for trial in harmless[:count])))
    generator = random.Random(seed)
    for _ in range(20 * trials):  # most changes of a small model have been tried before
        if len(done) == trials:
            break
        best = max(done.values(), key=lambda trial: trial.speedup).skipped
        attempt(best ^ frozenset(generator.sample(range(layers), min(layers, generator.randint(1, 3)))))
    return list(done.values())


def measure_costs(target: "Target", texts: "Sequence[TargetText]", depth: int) -> tuple[list[float], float]:
    """Relative costs: c(2) … c(depth + 1) of verifying a chain, and of a decoder layer in a draft forward of one token."""
    from draftsmith.eval.cost import measure_forward, relative_forward

    context = max(len(text.prompt) + len(text.tokens) // 2 for text in texts)
    c, half = relative_forward(measure_forward(target, context, depth + 1)), max(1, target.num_layers // 2)
    remaining = []
    for _ in range(PAIRS):  # in turn: a busy machine is slower at one time than at another
        complete = measure_forward(target, context, 1, repeats=4)[1]
        with target.without(range(half)):
            remaining.append(measure_forward(target, context, 1, repeats=4)[1] / complete)
    return [c(nodes) for nodes in range(2, depth + 2)], max(0.0, 1 - statistics.median(remaining)) / half


def scorer(target: "Target", texts: "Sequence[TargetText]", verifying: Sequence[float], layer: float) -> Callable[..., Trial]:
    """A function (layers left out, depth or None for the best) -> its Trial on these texts."""
    import torch

    from draftsmith.inference.self_speculation import SelfSpeculation

    deepest = len(verifying)
    prefixes, roots = [], []
    for text in texts:
        ids = torch.tensor(text.prompt + text.tokens, device=target.device)
        with torch.inference_mode():
            prefixes.append(SelfSpeculation(target, [0], "skip").position_features(ids, None))  # pyright: ignore[reportArgumentType]
        roots.append(torch.arange(max(0, len(text.prompt) - 1), len(ids) - 1, device=target.device))

    def score(skipped: Layers, depth: int | None = None) -> Trial:
        drafter = SelfSpeculation(target, skipped, word(skipped))
        accepted = [accepted_lengths(drafter, prefix, root, deepest) for prefix, root in zip(prefixes, roots, strict=True)]
        tried = []
        for each in range(1, deepest + 1) if depth is None else (depth,):
            cost = verifying[each - 1] + each * (1 - layer * len(skipped))
            tau = sum(map(len, accepted)) / sum(rounds(lengths, each) for lengths in accepted)
            tried.append(Trial(skipped, each, tau, cost))
        return max(tried, key=lambda trial: trial.speedup)

    return score


def accepted_lengths(drafter: Any, prefix: Any, roots: Any, depth: int) -> list[int]:
    """How many tokens of a chain of `depth` are the text's own, from each of the consecutive positions `roots`."""
    from draftsmith.inference.sampler import best_token

    best = best_token(drafter.position_logits(prefix, roots, depth)).tolist()  # [R,depth]
    text = prefix.ids.tolist()
    lengths = []
    for root, chain in zip(roots.tolist(), best, strict=True):
        following = text[root + 1 : root + 1 + depth]
        hits = [drafted == token for drafted, token in zip(chain, following, strict=False)]
        lengths.append((hits + [False]).index(False))
    return lengths


def rounds(lengths: Sequence[int], depth: int) -> int:
    """Rounds that chains of `depth` take for a text, where `lengths[i]` tokens are accepted of a chain from its i-th position."""
    at = count = 0
    while at < len(lengths):
        at, count = at + min(lengths[at], depth) + 1, count + 1
    return count
