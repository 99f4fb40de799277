"""Every drafter that an engine serves on a CPU, in that engine and here, as one table. Status 1 where they differ.

python tests/engines/run.py WORK --python .venv-engines/bin/python
python tests/engines/run.py WORK --python .venv-engines/bin/python --target FOLDER --drafter ARTIFACT --drafter ARTIFACT

Without --drafter the toy's drafters are trained in WORK first, each for a minute or so; another run takes those that are there. Every drafter
is exported in float32 to every engine that can run here, and drafts greedy chains. In one row: whose answers are plain decoding's here;
the rounds whose proposals are equal (for llama.cpp and transformers, which do not show proposals, our rounds less those that a prompt took more or
less); τ by one count, after the first token of an answer; the speedup over the engine's own plain decoding, and ours over ours.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from draftsmith.data import prompts as prompt_files
from draftsmith.eval import loading
from draftsmith.eval.answers import encode_prompts
from draftsmith.eval.intervals import Interval
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.errors import exit_on_error
from draftsmith.inference.tree import StaticTree
from draftsmith.models.formats.engines import PARALLEL, ROWS, VLLM_METHODS, family_of, limits_of
from draftsmith.models.formats.export import export
from draftsmith.models.target import Target, resolve_path
from draftsmith.train.exchange import serving
from draftsmith.train.exchange.export import open_source

HERE = Path(__file__).parent
RUN_HERE = ("vllm", "speculators", "gguf", "transformers")  # engines that a CPU runs
TIE = 1e-3  # between two logits in float32: llama.cpp rounds differently when it verifies several tokens at once
KINDS = {"student": "draft_simple", "eagle3": "eagle3"}  # of llama.cpp
# The toy's drafters: name, method, recipe and keys. (vLLM 0.32 refuses MLP speculators.)
TOYS = {
    "medusa": ("medusa", "medusa-tiny", ()),
    "eagle-one": ("eagle", "eagle1-tiny", ()),
    "eagle-three": (
        "eagle",
        "eagle3-tiny",
        ("eagle.fc_norm=false", "eagle.norm_output=false", "eagle.norm_before_residual=false"),
    ),
    "eagle-three.1": ("eagle", "eagle3-tiny", ("eagle.norm_before_residual=false",)),
    "eagle-three-norms": ("eagle", "eagle3-tiny", ("eagle.norm_before_fc=true",)),
    "peagle": ("peagle", "peagle-tiny", ()),
}
SHORT = ("train.steps=120", "train.warmup_steps=12", "train.eval_every=60", "train.save_every=60")


@dataclass(frozen=True, slots=True)
class Row:
    """A drafter in an engine; equal and compared are rounds. Of the answers `texts` are plain decoding's, and `ties` until a near tie."""

    drafter: str
    engine: str
    prompts: int
    texts: int
    equal: int
    compared: int
    tau: Interval
    tau_here: Interval
    speedup: float
    speedup_here: float
    ties: int = 0

    @property
    def agrees(self) -> bool:
        """Whether the engine drafts as we do, but for near ties."""
        within = self.tau_here.estimate if self.tau.low is None else min(max(self.tau_here.estimate, self.tau.low), self.tau.high or 0)
        least = serving.LEAST_EQUAL * self.compared
        return self.texts + self.ties == self.prompts and self.compared > 0 and self.equal >= least and within == self.tau_here.estimate


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder for drafters, exports and the table")
    parser.add_argument("--python", required=True, help="interpreter of an environment with vLLM, speculators and xllamacpp")
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--drafter", action="append", help="folder of an artifact; may be repeated (default: the toy's)")
    parser.add_argument("--prompts", help="as `eval` takes them")
    parser.add_argument("--limit", type=int, default=4, help="prompts of each domain (default 4)")
    parser.add_argument("--max-new-tokens", type=int, default=40)
    parser.add_argument("--depth", type=int, default=4, help="tokens of a chain (default 4)")
    parser.add_argument("--engine", action="append", choices=RUN_HERE)
    chosen = parser.parse_args(arguments)
    drafters = chosen.drafter or [*train_toys(chosen.work / "drafters"), "tiny-draft"]
    target = Target.load(chosen.target, dtype=torch.float32)
    prompts = complete_prompts(target, chosen.prompts, chosen.limit, chosen.max_new_tokens)
    rows: list[Row] = []
    for drafter in drafters:
        source, _ = open_source(drafter, chosen.target)
        family, refusing = family_of(source.drafter), {limit.engine for limit in limits_of(source.drafter, source.target) if limit.refused}
        depth = min(chosen.depth, source.steps)
        for engine, run in zip(RUN_HERE, (in_vllm, in_speculators, in_llamacpp, in_transformers), strict=True):
            if (family, engine) not in ROWS or loading_name(engine) in refusing or engine not in (chosen.engine or RUN_HERE):
                continue
            name = Path(drafter).parent.name if Path(drafter).name == "artifact" else Path(drafter).name
            folder = chosen.work / "exports" / engine / f"drafter{drafters.index(drafter)}"
            export(source, engine, folder, torch.float32)
            row = run(Job(name, family, drafter, folder, chosen.target, target, prompts, chosen.max_new_tokens, depth, chosen.python))
            rows.append(row)
            print(f"{row.drafter} in {row.engine}: {'agrees' if row.agrees else 'DIFFERS'}", flush=True)
    show(rows, chosen.work)
    if not rows or not all(row.agrees for row in rows):
        raise SystemExit(1)


@dataclass(frozen=True, slots=True)
class Job:
    """What to run: an artifact and its export, on these prompts."""

    name: str
    family: str
    artifact: str
    folder: Path
    target_name: str
    target: Target
    prompts: list[list[int]]
    new_tokens: int
    depth: int
    python: str


def loading_name(engine: str) -> str:
    """The engine as `limits_of` names it; vLLM loads what is written for speculators."""
    return {"vllm": "vLLM", "speculators": "vLLM", "gguf": "llama.cpp"}.get(engine, engine)


def train_toys(folder: Path) -> list[str]:
    """Train the toy's drafters, or take those that are there; the artifacts."""
    for name, (method, recipe, keys) in TOYS.items():
        words = [f"{recipe}.yaml", *keys, *SHORT, f"train.output={folder / name}"]
        subprocess.run([sys.executable, "-m", "draftsmith.train.cli", "train", method, *words], check=True)
    return [str(folder / name / "artifact") for name in TOYS]


def complete_prompts(target: Target, files: str | None, limit: int, new_tokens: int) -> list[list[int]]:
    """Prompts after which plain decoding meets no stop token: engines differ in what they do with one."""
    encoded, _ = encode_prompts(target, prompt_files.load(files, limit, distinct=True), new_tokens)
    prompts = [item.ids for item in encoded]
    answers, _ = serving.decode_plainly(target, prompts, new_tokens)
    complete = [prompt for prompt, answer in zip(prompts, answers, strict=True) if not target.stop_ids & set(answer)]
    print(f"{len(complete)} prompts; {len(prompts) - len(complete)} left out, since their answers end early", flush=True)
    return complete


def in_vllm(job: Job, folder: Path | None = None, engine: str = "vLLM") -> Row:
    """Serve a folder in vLLM: proposals are compared one by one."""
    folder = folder or job.folder
    target, (drafter,) = loading.open_models(job.target_name, [str(folder)], "float32")
    speculative = {"method": VLLM_METHODS[job.family], "model": str(folder), "num_speculative_tokens": job.depth}
    if job.family == "peagle":
        speculative |= PARALLEL
    request = {"target": resolve_path(job.target_name), "dtype": "float32", "speculative": speculative}
    served = serving.serve(target, drafter, job.prompts, job.new_tokens, job.depth, job.python, request, timed=True)
    equal = served.rounds - len(served.differences)
    assert served.speedup is not None and served.speedup_here is not None, "it was timed"
    return Row(
        job.name,
        f"{engine} {served.version}",
        served.prompts,
        served.texts,
        equal,
        served.rounds,
        served.tau,
        served.tau_here,
        served.speedup,
        served.speedup_here,
    )


def in_speculators(job: Job) -> Row:
    """Read and write the folder with speculators; what it wrote has the same tensors, and vLLM serves it."""
    copy = job.folder.with_name(f"{job.folder.name}-copy")
    subprocess.run([job.python, str(HERE / "speculators_copy.py"), str(job.folder), str(copy), resolve_path(job.target_name)], check=True)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (job.folder, copy))
    for name, tensor in theirs.items():
        if name in ours and not torch.equal(ours[name], tensor):
            raise ValueError(f"speculators changed {name} of {job.folder}")
    if missing := set(ours) - set(theirs) - {"embed_tokens.weight"}:
        raise ValueError(f"speculators lost {', '.join(sorted(missing))} of {job.folder}")
    return in_vllm(job, copy, "speculators, vLLM")


def in_llamacpp(job: Job) -> Row:
    """Serve the target and the drafter as GGUF in llama.cpp: it counts drafted and accepted tokens."""
    target_folder = job.folder.with_name("target")
    export(open_source(job.target_name, job.target_name)[0], "gguf", target_folder, torch.float32)
    request = {"target": str(target_folder / "model.gguf"), "prompts": job.prompts, "max_new_tokens": job.new_tokens, "draft": None}
    plain = run_script(job.python, "llamacpp_rounds.py", request)
    draft = {"draft": str(job.folder / "model.gguf"), "kind": KINDS[job.family], "depth": job.depth}
    drafted = run_script(job.python, "llamacpp_rounds.py", request | draft)
    answers = [answer["tokens"] for answer in drafted["answers"]]
    rounds = [len(answer["tokens"]) - 1 - answer["accepted"] for answer in drafted["answers"]]
    return counted(job, "llama.cpp", answers, rounds, plain["seconds"] / drafted["seconds"])


def counted(job: Job, engine: str, answers: list[list[int]], rounds: list[int], speedup: float) -> Row:
    """The row of an engine that only counts: its rounds of each prompt beside ours."""
    target, (drafter,) = loading.open_models(job.target_name, [job.artifact], "float32")
    plain, plain_s = serving.decode_plainly(target, job.prompts, job.new_tokens)
    here = serving.draft_after(target, drafter, job.prompts, answers, job.depth)
    ours = serving.rounds_of(job.prompts, here.answers, here.proposals)
    ties = sum(near_tie(target, *each) for each in zip(job.prompts, plain, answers, strict=True))
    return Row(
        job.name,
        engine,
        len(job.prompts),
        sum(left == right for left, right in zip(answers, plain, strict=True)),
        sum(ours) - sum(abs(left - right) for left, right in zip(rounds, ours, strict=True)),
        sum(ours),
        serving.tau_of(answers, rounds),
        serving.tau_of(here.answers, ours),
        speedup,
        plain_s / here.seconds,
        ties,
    )


def near_tie(target: Target, prompt: list[int], plain: list[int], answer: list[int]) -> bool:
    """Whether an answer first differs from plain decoding's where the target's logits of the two tokens differ by less than TIE."""
    first = next((index for index, (left, right) in enumerate(zip(plain, answer, strict=True)) if left != right), None)
    if first is None:
        return False
    logits = target.logits(target.forward(torch.tensor([prompt + plain[:first]])).hidden[0, -1:])[0]
    return bool((logits[plain[first]] - logits[answer[first]]).abs() < TIE)


def in_transformers(job: Job) -> Row:
    """The folder as the assistant of transformers' `generate`, which drafts for the first token too: so do we, in this row."""
    logging.set_verbosity_error()
    model: Any = job.target.model
    assistant: Any = AutoModelForCausalLM.from_pretrained(job.folder, dtype=torch.float32).eval()
    config = assistant.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule, config.assistant_confidence_threshold = job.depth, "constant", 0.0
    calls = [0]
    handle = model.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    options = {"do_sample": False, "max_new_tokens": job.new_tokens, "min_new_tokens": job.new_tokens}
    seconds, answers, rounds = {}, [], []
    for name, more in (("plain", {}), ("drafted", {"assistant_model": assistant})):
        answers, rounds, began = [], [], time.perf_counter()
        for prompt in job.prompts:
            calls[0] = 0
            output = model.generate(input_ids=torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **options, **more)
            answers.append(output[0, len(prompt) :].tolist())
            rounds.append(calls[0])
        seconds[name] = time.perf_counter() - began
    handle.remove()
    target, (drafter,) = loading.open_models(job.target_name, [job.artifact], "float32")
    plain, plain_s = serving.decode_plainly(target, job.prompts, job.new_tokens)
    drafter.tree_spec = StaticTree.chain(job.depth)
    began, here = time.perf_counter(), []
    for prompt in job.prompts:
        here += Decoder(target, drafter).generate([prompt], max_new_tokens=job.new_tokens, stop_ids=())
    here_s = time.perf_counter() - began
    ours = [len(answer.rounds) for answer in here]
    tokens = torch.full((len(ours),), job.new_tokens)
    return Row(
        job.name,
        "transformers",
        len(job.prompts),
        sum(left == right for left, right in zip(answers, plain, strict=True)),
        sum(ours) - sum(abs(left - right) for left, right in zip(rounds, ours, strict=True)),
        sum(ours),
        serving.of_ratio(tokens, torch.tensor(rounds)),
        serving.of_ratio(tokens, torch.tensor(ours)),
        seconds["plain"] / seconds["drafted"],
        plain_s / here_s,
    )


def run_script(python: str, script: str, request: dict[str, Any]) -> dict[str, Any]:
    """Run a script of this folder in the environment of the engines."""
    with tempfile.TemporaryDirectory() as folder:
        request_file, reply_file = Path(folder) / "request.json", Path(folder) / "reply.json"
        request_file.write_text(json.dumps(request), encoding="utf-8")
        subprocess.run([python, str(HERE / script), str(request_file), str(reply_file)], check=True, capture_output=True)
        return json.loads(reply_file.read_text(encoding="utf-8"))


def show(rows: list[Row], work: Path) -> None:
    """Print the table, and write it as Markdown."""
    names = ("drafter", "engine", "answers", "equal", "τ", "interval", "τ here", "speedup", "here")
    table = Table(*names)
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    for row in rows:
        interval = "too few" if row.tau.low is None else f"{row.tau.low:.2f} – {row.tau.high:.2f}"
        near = f", {row.ties} to a near tie" if row.ties else ""
        cells = [row.drafter, row.engine, f"{row.texts} of {row.prompts}{near}", f"{row.equal:,} of {row.compared:,} rounds"]
        cells += [f"{row.tau.estimate:.3f}", interval, f"{row.tau_here.estimate:.3f}", f"{row.speedup:.2f}", f"{row.speedup_here:.2f}"]
        table.add_row(*cells, style=None if row.agrees else "red")
        lines.append(f"| {' | '.join(cells)} |")
    Console(width=160).print(table)
    (work / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    exit_on_error(main, sys.argv[1:])
