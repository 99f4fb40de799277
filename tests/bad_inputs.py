"""Inputs of careless users and of attackers: `make test-faults`, or `python tests/bad_inputs.py [GROUP] [PART OF A NAME]`.

Each case has a folder of its own with a copy of the same small models, data, run and store, damages some of them, and runs a command there.
The command must end with the expected status and one line that says what is wrong; all other files must be as they were, no code of the
input may have run, and 60 s and 4 GB must have been enough.
"""

import contextlib
import faulthandler
import hashlib
import importlib
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before torch, and not where a test imports a case: it would hide the GPU from all tests of its process
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DRAFTSMITH_CACHE": "cache"}

from fault_forks import Row

SECONDS, BYTES = 60, 4 << 30
EXECUTED = "executed"  # the file that planted code writes
PLANTED = f"open({EXECUTED!r}, 'w').close()\n"
GROUPS = ("data", "models", "training", "evaluation")  # tests/bad_<group>.py, each with CASES


class Payload:
    """Pickled, it writes the file EXECUTED when it is loaded."""

    def __reduce__(self):
        return exec, (PLANTED,)


@dataclass(frozen=True)
class BadInput:
    """A case.

    Attributes:
        name: what is wrong.
        damage: changes the folder that it is given, in which the command then runs.
        command: the words after `draftsmith`, blanks between them; or a list of words.
        says: regular expression that the error line must match; with status 0, the output.
        status: the expected exit status.
        writes: patterns of files that may be new or changed afterwards, besides those in `runs/` and `cache/`, which may be new.
        inside: is called in the process before the command, to close a stream, say.
    """

    name: str
    damage: Callable[[Path], object]
    command: str | list[str]
    says: str
    status: int = 2
    writes: tuple[str, ...] = ()
    inside: Callable[[], object] = field(default=lambda: None)


def nothing(folder: Path) -> None:
    """The damage of a case whose command line alone is wrong."""


def written(name: str, content: str | bytes) -> Callable[[Path], object]:
    """A damage: `name` has this content instead."""

    def damage(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return damage


def changed(name: str, **entries: Any) -> Callable[[Path], object]:
    """A damage: the JSON file `name` has these entries; an entry that is `...` is taken out. Dots in a key lead into inner objects."""

    def damage(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        for key, value in entries.items():
            *path, last = key.split(".")
            inner = content
            for part in path:
                inner = inner[part]
            inner.pop(last, None) if value is ... else inner.__setitem__(last, value)
        (folder / name).write_text(json.dumps(content))

    return damage


def tensors(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """A damage: `change` alters the dict of tensors of the safetensors file `name`."""

    def damage(folder: Path) -> None:
        from safetensors import safe_open
        from safetensors.torch import load_file, save_file

        with safe_open(folder / name, "pt") as file:
            metadata = file.metadata()
        weights = load_file(folder / name)
        change(weights)
        save_file(weights, folder / name, metadata)

    return damage


def both(*damages: Callable[[Path], object]) -> Callable[[Path], object]:
    """Several damages, one after the other."""
    return lambda folder: [damage(folder) for damage in damages]


TEMPLATE = """\
{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %}<|endoftext|>{% endif %}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
RECIPE = """\
target.path: target
data.train: chats.jsonl
data.seq_len: 64
data.cache: cache
train.output: runs/new
train.steps: 2
train.batch_size: 2
train.lr: 1.0e-3
train.precision: fp32
train.eval_batches: 1
"""


def make_assets(folder: Path) -> None:
    """What each case starts with, all of it tiny.

    target/ a Llama over bytes with a chat template · chats.jsonl, prompts.jsonl, text.txt · medusa.yaml, eagle.yaml, distill.yaml ·
    medusa/, eagle/ and student/ finished runs, with artifacts and checkpoints · store/ a feature store of chats.jsonl · cache/ the corpora.
    """
    from conftest import save_byte_target

    save_byte_target(folder / "target")
    (folder / "target" / "chat_template.jinja").write_text(TEMPLATE)
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"How many are {n} and {n * n}?"},
                {"role": "assistant", "content": f"{n + n * n}, I think."},
            ]
        }
        for n in range(60)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    prompts = [{"id": f"p{n}", "prompt": f"How many are {n} and {n}?", "domain": "sums"} for n in range(4)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    (folder / "text.txt").write_text("<|endoftext|>".join(f"for line in lines[{n}:]:\n    yield line\n" * 4 for n in range(40)))
    (folder / "medusa.yaml").write_text(RECIPE + "medusa.heads: 2\n")
    (folder / "eagle.yaml").write_text(RECIPE + "eagle.steps: 2\neagle.taps: [0, 1]\n")
    (folder / "distill.yaml").write_text(RECIPE + "student.start: random\nstudent.layers: 1\n")
    for words in (
        "data capture eagle.yaml features.store=store features.precision=float32",
        "train medusa medusa.yaml train.output=medusa train.save_every=1",
        "train eagle eagle.yaml train.output=eagle",
        "train distill distill.yaml train.output=student",
    ):
        status, _, error = run(words.split(), folder, 120.0)
        assert status == 0, f"{words}: {error}"


def run(words: list[str], folder: Path, seconds: float = SECONDS, inside: Callable[[], object] = lambda: None) -> tuple[int, str, str]:
    """`draftsmith WORDS` in a forked process, in `folder`: its exit status (−n: signal n), stdout and stderr."""
    with tempfile.TemporaryDirectory() as logs:
        out, err = Path(logs) / "out", Path(logs) / "err"
        process = os.fork()
        if not process:
            _child(words, folder, out, err, inside)
        until = time.monotonic() + seconds
        while (ended := os.waitpid(process, os.WNOHANG))[0] == 0 and time.monotonic() < until:
            time.sleep(0.005)
        if ended[0] == 0:
            os.kill(process, signal.SIGUSR2)
            time.sleep(0.3)
            os.kill(process, signal.SIGKILL)
            ended = os.waitpid(process, 0)
        return os.waitstatus_to_exitcode(ended[1]), out.read_text(errors="replace"), err.read_text(errors="replace")


def _child(words: list[str], folder: Path, out: Path, err: Path, inside: Callable[[], object]) -> None:
    """Never returns. Its address space may become larger by BYTES."""
    status = 99
    try:
        for descriptor, log in ((1, out), (2, err)):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdin = open(0, closefd=False)  # a worker of a pool has another one
        sys.stdout, sys.stderr = (open(descriptor, "w", buffering=1, closefd=False) for descriptor in (1, 2))
        faulthandler.register(signal.SIGUSR2)
        size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (size + BYTES, size + BYTES))
        os.chdir(folder)
        sys.argv = ["draftsmith", *words]
        inside()
        from draftsmith.train import cli

        cli.main()
        status = 0
    except SystemExit as exit:
        if isinstance(exit.code, str):
            print(exit.code, file=sys.stderr)
        status = exit.code if isinstance(exit.code, int) else 0 if exit.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
        status = 1
    finally:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()
        os._exit(status)


def state(folder: Path) -> dict[str, str]:
    """A hash of every file in the folder, links by where they lead."""
    hashes = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            hashes[str(path.relative_to(folder))] = f"-> {os.readlink(path)}"
        elif path.is_file():
            hashes[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return hashes


def trial(case: BadInput, assets: Path, folder: Path) -> dict[str, bool]:
    """Run a case; what should hold, and whether it does."""
    shutil.copytree(assets, folder, symlinks=True)
    case.damage(folder)
    before = state(folder)
    words = case.command.split() if isinstance(case.command, str) else case.command
    began = time.monotonic()
    status, out, err = run(words, folder, inside=case.inside)
    seconds = time.monotonic() - began
    after = state(folder)
    new = [name for name in after if name not in before and not any(fnmatch(name, p) for p in (*case.writes, "runs/*", "cache/*"))]
    lost = [name for name in before if after.get(name) != before[name] and not any(fnmatch(name, pattern) for pattern in case.writes)]
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    said = (len(lines) == 1 and re.search(case.says, lines[0])) if case.status else re.search(case.says, out + err)
    checks = {
        f"status {case.status} (but {status})": status == case.status,
        f"a line that says {case.says!r} (but {' | '.join(lines or err.splitlines()[-1:])!r})": bool(said),
        "without a traceback": "Traceback" not in out + err,
        f"all files as they were ({lost[:3]})": not lost,
        f"no files left about ({new[:3]})": not new,
        "nothing executed": not any(path.name == EXECUTED for path in folder.rglob("*")),
        f"within {SECONDS} s": seconds < SECONDS,
    }
    shutil.rmtree(folder)
    return checks


def refused(group: str, folder: Path, part: str = "") -> Iterator[Row]:
    """The cases of a group, a row for each class: the words of a name before its colon."""
    cases = [case for case in importlib.import_module(f"bad_{group}").CASES if part in case.name]
    assert len({case.name for case in cases}) == len(cases), "two cases have the same name"
    (folder / "assets").mkdir(parents=True)
    make_assets(folder / "assets")
    rows: dict[str, Row] = {}
    for number, case in enumerate(cases):
        row = rows.setdefault(case.name.partition(":")[0], Row(f"bad {group}, {case.name.partition(':')[0]}"))
        row.trial(case.name, **trial(case, folder / "assets", folder / str(number)))
    yield from rows.values()


def imported() -> None:
    """Import what commands import, so that a forked process need not; compute nothing, so that torch has no threads to lose."""
    import torch

    from draftsmith.inference.errors import quiet_libraries

    torch.set_num_threads(1)
    quiet_libraries()
    for name in ("acceptance", "generate", "compare", "evaluation", "loading"):
        importlib.import_module(f"draftsmith.eval.{name}")
    for name in ("cli", "data_cli", "loop", "setup", "publish"):
        importlib.import_module(f"draftsmith.train.{name}")
    import datasets  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401


def main(words: list[str]) -> bool:
    imported()
    survived = True
    with tempfile.TemporaryDirectory() as folder:
        for group in words[:1] or GROUPS:
            for row in refused(group, Path(folder) / group, *words[1:2]):
                print(f"{row.trials:6} {row.trials - len(row.failures):8}  {row.fault}", flush=True)
                for failure in row.failures:
                    print(f"{'':17}{failure}", flush=True)
                survived &= not row.failures
    return survived


if __name__ == "__main__":
    raise SystemExit(0 if main(sys.argv[1:]) else 1)
