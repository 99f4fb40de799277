"""A drafter's folder in vLLM itself, beside the same folder here: proposals position by position, τ by one count, and the target's hidden states.

Equal text never shows that a drafter was loaded wrongly, since verification hides it. Proposals and features do.

Letters: P prompts · S positions · T taps · H hidden size of the target · K tokens of a chain.
"""

import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.eval.intervals import Interval, of_ratio
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.drafter import RoundContext
from draftsmith.inference.prefix_cache import common_prefix
from draftsmith.inference.tree import DraftTree, StaticTree
from draftsmith.models.target import Target

SCRIPT = Path(__file__).with_name("vllm_rounds.py")
# Of equal proposals: where two tokens are equally likely, sums in another order choose the other one.
LEAST_EQUAL = 0.99

Proposals = dict[int, list[int]]  # of each round, by the position of the last committed token


class NotServed(Exception):
    """vLLM did not answer; the message has the last line of what it said."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A round in which other tokens were proposed: the prompt's number, the position of the last committed token, and both proposals."""

    prompt: int
    position: int
    theirs: list[int]
    ours: list[int]


@dataclass(frozen=True, slots=True)
class FeatureError:
    """How far the engine's hidden states of a layer are from ours: norms of the differences over norms of ours, [S] over all prompts.

    Attributes:
        layer: the tap, or −1 for the last hidden state.
        mean, largest: over the positions.
    """

    layer: int
    mean: float
    largest: float


@dataclass(frozen=True, slots=True)
class LocalRun:
    """What our decoder did: proposals and answers of each prompt, and the seconds of all."""

    proposals: list[Proposals]
    answers: list[list[int]]
    seconds: float


@dataclass(frozen=True, slots=True)
class Served:
    """What the engine did.

    Attributes:
        version: of the engine.
        prompts: P.
        texts: how many answers are those of plain greedy decoding here.
        rounds: rounds at whose position both proposed something for the same text.
        differences: those of them that differ.
        tau, tau_here: tokens after the first one of each answer, over the rounds that they took.
        counted: 1 + accepted / drafts by the engine's own counters, which go on past the ends of answers.
        features: by layer; none where the engine gives the drafter no features.
        speedup, speedup_here: over plain decoding, of all prompts, one at a time; None where plain decoding was not timed.
    """

    version: str
    prompts: int
    texts: int
    rounds: int
    differences: list[Difference]
    tau: Interval
    tau_here: Interval
    counted: float
    features: list[FeatureError]
    speedup: float | None = None
    speedup_here: float | None = None

    @property
    def same(self) -> bool:
        """Whether the proposals are those made here, but for the share that near ties may change."""
        return self.rounds > 0 and len(self.differences) <= (1 - LEAST_EQUAL) * self.rounds


def run_vllm(python: str, request: dict[str, Any], folder: Path) -> tuple[dict[str, Any], dict[int, Tensor]]:
    """Run a request (see vllm_rounds.py) in another environment.

    Args:
        python: its interpreter.
        request: what to run.
        folder: for the files that go to and fro.

    Returns:
        The reply, and by prompt the hidden states [S,T·H] or [1,H] that the drafter was given.

    Raises:
        NotServed: vLLM is not there, or stopped.
    """
    request_file, reply_file = folder / "request.json", folder / "reply.json"
    request_file.write_text(json.dumps(request), encoding="utf-8")
    reply_file.unlink(missing_ok=True)
    try:
        done = subprocess.run([python, str(SCRIPT), str(request_file), str(reply_file)], capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise NotServed(f"{python} could not be started ({error.strerror}); expected a Python with vLLM") from None
    if done.returncode or not reply_file.is_file():
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no word"]
        wrong = next((line for line in reversed(lines) if "Error" in line), lines[-1])
        raise NotServed(f"vLLM stopped with {done.returncode}: {wrong.strip()[:300]}")
    with np.load(reply_file.with_suffix(".features.npz")) as features:
        return json.loads(reply_file.read_text(encoding="utf-8")), {int(name): torch.from_numpy(features[name]) for name in features.files}


def serve(
    target: Target, drafter: Any, prompts: list[list[int]], new_tokens: int, depth: int, python: str, request: dict[str, Any], timed: bool
) -> Served:
    """Run a folder in vLLM and here, and compare.

    Args:
        target: in the dtype of the request.
        drafter: read from the folder that `request` names.
        prompts: token ids.
        new_tokens: of each answer; stop tokens do not end one.
        depth: K, of both.
        python: of the environment of vLLM.
        request: what vllm_rounds.py reads, without prompts and max_new_tokens.
        timed: run plain decoding too, in vLLM and here, for the speedups.

    Raises:
        NotServed: as `run_vllm`.
    """
    request = {**request, "prompts": prompts, "max_new_tokens": new_tokens}
    with tempfile.TemporaryDirectory() as folder:
        reply, features = run_vllm(python, request, Path(folder))
        plain_reply = run_vllm(python, {**request, "speculative": None}, Path(folder))[0] if timed else None
    plain, plain_s = decode_plainly(target, prompts, new_tokens)
    answers = [answer["tokens"] for answer in reply["answers"]]
    theirs = [by_position(len(prompt), each["tokens"], each["proposals"]) for prompt, each in zip(prompts, reply["answers"], strict=True)]
    local = draft_after(target, drafter, prompts, answers, depth)
    rounds, differences = 0, []
    for number, prompt in enumerate(prompts):
        same = len(prompt) + common_prefix(answers[number], local.answers[number])
        for position in sorted(theirs[number].keys() & local.proposals[number].keys()):
            left, right = theirs[number][position], local.proposals[number][position]
            length = min(len(left), len(right))
            if position < same:
                rounds += 1
                if left[:length] != right[:length]:
                    differences.append(Difference(number, position, left, right))
    counters = reply["counters"]
    drafts, accepted = (counters.get(f"vllm:spec_decode_num_{name}", 0.0) for name in ("drafts", "accepted_tokens"))
    return Served(
        reply["version"],
        len(prompts),
        sum(left == right for left, right in zip(answers, plain, strict=True)),
        rounds,
        differences,
        tau_of(answers, rounds_of(prompts, answers, theirs)),
        tau_of(local.answers, rounds_of(prompts, local.answers, local.proposals)),
        1 + accepted / drafts if drafts else 1.0,
        _feature_errors(target, drafter.taps, prompts, features),
        plain_reply["seconds"] / reply["seconds"] if plain_reply else None,
        plain_s / local.seconds if timed else None,
    )


def by_position(start: int, tokens: list[int], proposals: list[list[int]]) -> Proposals:
    """An engine's proposals by the position of the last committed token, from their order alone.

    Args:
        start: tokens of the prompt. The first token of the answer is committed without drafts.
        tokens: of the answer.
        proposals: of the rounds; those past the end of the answer do not count.
    """
    placed: Proposals = {}
    at = 0
    for proposal in proposals:
        if at + 1 >= len(tokens):
            break
        placed[start + at] = proposal
        at += 1 + common_prefix(proposal, tokens[at + 1 :])
    return placed


def decode_plainly(target: Target, prompts: list[list[int]], new_tokens: int) -> tuple[list[list[int]], float]:
    """Greedy answers [new_tokens] of the target alone, past stop tokens, one prompt at a time, and their seconds."""
    began = time.perf_counter()
    answers = [answer.tokens for prompt in prompts for answer in Decoder(target).generate([prompt], max_new_tokens=new_tokens, stop_ids=())]
    return answers, time.perf_counter() - began


def draft_after(target: Target, drafter: Any, prompts: list[list[int]], answers: list[list[int]], depth: int) -> LocalRun:
    """Decode here as engines do: the first token of each answer comes from the prompt's forward, without drafts.

    Args:
        target, drafter: the drafter attached; it drafts chains of `depth` from here on.
        prompts, answers: token ids; of an answer its first token and its length are taken.
        depth: K.
    """
    drafter.tree_spec = StaticTree.chain(depth)
    if getattr(drafter, "stop", None) is not None:
        drafter.stop = None  # engines draft all of a chain
    proposals, texts = [], []
    began = time.perf_counter()
    with _watched(drafter) as seen:
        for prompt, answer in zip(prompts, answers, strict=True):
            seen.clear()
            first, rest = answer[:1], len(answer) - 1
            decoded = Decoder(target, drafter).generate([prompt + first], max_new_tokens=rest, stop_ids=()) if rest else []
            proposals.append(dict(seen))
            texts.append(first + (decoded[0].tokens if decoded else []))
    return LocalRun(proposals, texts, time.perf_counter() - began)


@contextmanager
def _watched(drafter: Any) -> Iterator[Proposals]:
    """The chains that a drafter proposes for one slot, as they come."""
    seen: Proposals = {}
    propose = drafter.propose

    def watched(context: RoundContext) -> DraftTree:
        tree = propose(context)
        seen[int(context.positions[0])] = tree.tokens[0, 1:].tolist()
        return tree

    drafter.propose = watched
    try:
        yield seen
    finally:
        del drafter.propose


def rounds_of(prompts: list[list[int]], answers: list[list[int]], proposals: list[Proposals]) -> list[int]:
    """The rounds that each answer took after its first token. A round without a proposal commits one token."""
    rounds = []
    for prompt, answer, placed in zip(prompts, answers, proposals, strict=True):
        at, count = 0, 0
        while at + 1 < len(answer):
            at += 1 + common_prefix(placed.get(len(prompt) + at, []), answer[at + 1 :])
            count += 1
        rounds.append(count)
    return rounds


def tau_of(answers: list[list[int]], rounds: list[int]) -> Interval:
    """τ of answers after their first tokens, which took these rounds."""
    return of_ratio(torch.tensor([len(answer) - 1 for answer in answers]), torch.tensor(rounds))


def _feature_errors(target: Target, taps: tuple[int, ...], prompts: list[list[int]], theirs: dict[int, Tensor]) -> list[FeatureError]:
    errors: dict[int, list[Tensor]] = {}
    for number, rows in theirs.items():
        ids = torch.tensor(prompts[number], device=target.device)
        with torch.inference_mode():
            output = target.forward(ids[None], taps=taps)
        states = (output.hidden if output.taps is None else output.taps.flatten(2))[0].float().cpu()  # [S,T·H]
        states = states[-1:] if len(rows) == 1 else states
        if rows.shape != states.shape:
            continue
        for layer, ours, got in zip(taps or (-1,), *(each.split(target.hidden_size, -1) for each in (states, rows)), strict=True):
            errors.setdefault(layer, []).append((got - ours).norm(dim=-1) / ours.norm(dim=-1))
    return [FeatureError(layer, float(torch.cat(parts).mean()), float(torch.cat(parts).max())) for layer, parts in errors.items()]
