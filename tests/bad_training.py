"""Bad inputs of training: recipes, folders of runs, checkpoints, sizes, streams."""

import fcntl
import hashlib
import json
import os
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bad_inputs import PLANTED, RECIPE, TEMPLATE, BadInput, both, changed, nothing, tensors, written

MEDUSA = RECIPE + "medusa.heads: 2\n"
HOLDER = ("*/.draftsmith.json",)  # a run writes its name there
STEP = "medusa/checkpoints/step-00000002"
ARTIFACT = ("medusa/.draftsmith.json", "medusa/recipe.yaml", "medusa/run.json", "medusa/metrics.jsonl", "medusa/curves.png")


def recipe(name: str, content: str | bytes, says: str) -> BadInput:
    """A recipe file with this content."""
    return BadInput(f"recipe file: {name}", written("bad.yaml", content), "train medusa bad.yaml", says)


def override(name: str, words: str, says: str, command: str = "train medusa medusa.yaml") -> BadInput:
    """Words on the command line."""
    return BadInput(name, nothing, [*command.split(), *words.split()], says)


def resealed(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """A damage: `change` alters the last checkpoint's state, and the checksums are those of what is there afterwards."""

    def damage(folder: Path) -> None:
        state = json.loads((folder / STEP / "state.json").read_text())
        del state["sha256"]
        change(state)
        sums = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in (folder / STEP).glob("*.safetensors")}
        sums["state"] = hashlib.sha256(json.dumps(state).encode()).hexdigest()
        (folder / STEP / "state.json").write_text(json.dumps(state | {"sha256": sums}))

    return damage


def resumed(name: str, says: str, *damages: Callable[[Path], object], state: dict[str, Any] | None = None) -> BadInput:
    """A run that goes on from a checkpoint whose checksums are right and whose content is not."""

    def change(content: dict[str, Any]) -> None:
        for key, value in (state or {}).items():
            content.pop(key, None) if value is ... else content.__setitem__(key, value)

    return BadInput(
        f"checkpoint: {name}",
        both(*damages, resealed(change)),
        "train medusa medusa.yaml train.output=medusa train.steps=3",
        says,
        writes=HOLDER,
    )


def state_of(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return tensors(f"{STEP}/optimizer.safetensors", change)


def first(prefix: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], object]:
    """Replaces the first tensor whose name begins so; None takes it out."""

    def replace(weights: dict[str, Any]) -> None:
        name = next(name for name in sorted(weights) if name.startswith(prefix))
        value = change(weights.pop(name))
        if value is not None:
            weights[name] = value.contiguous()

    return replace


def linked(name: str, to: str) -> Callable[[Path], object]:
    """A damage: `name` is moved to `to`, and a link that leads there stands in its place."""

    def damage(folder: Path) -> None:
        (folder / to).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).rename(folder / to)
        (folder / name).symlink_to((folder / to).absolute())

    return damage


def locked(name: str) -> Callable[[Path], object]:
    """A damage: this process claims the folder."""

    def damage(folder: Path) -> None:
        (folder / name).mkdir(parents=True, exist_ok=True)
        mark = folder / name / ".draftsmith.json"
        mark.write_text(json.dumps({"kind": "training run", "holder": "process 7 on elsewhere (draftsmith)"}))
        fcntl.flock(os.open(mark, os.O_RDWR), fcntl.LOCK_EX)

    return damage


def unmarked(name: str) -> Callable[[Path], object]:
    """A damage: the run is one of a version that left no marks."""
    return lambda folder: [mark.unlink() for mark in (folder / name).rglob(".draftsmith.json")]


def fifo(folder: Path) -> None:
    os.mkfifo(folder / "bad.yaml")


def home() -> None:
    os.environ["HOME"] = os.getcwd()


def little_memory() -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 30), size + (1 << 30)))


def ascii_stdout() -> None:
    sys.stdout.reconfigure(encoding="ascii", errors="strict")  # pyright: ignore[reportAttributeAccessIssue]
    sys.stderr.reconfigure(encoding="ascii", errors="strict")  # pyright: ignore[reportAttributeAccessIssue]


def full_stdout() -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    os.dup2(descriptor, 1)


def no_reader() -> None:
    read, write = os.pipe()
    os.close(read)
    os.dup2(write, 1)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # the object before was of a file, in which one can seek


LAUGHS = "a: &a [x, x]\n" + "".join(f"{chr(b + 1)}: &{chr(b + 1)} [*{chr(b)}, *{chr(b)}, *{chr(b)}, *{chr(b)}]\n" for b in range(97, 117))

FILES = [
    BadInput("recipe file: missing", nothing, "train medusa nowhere.yaml", "recipe .nowhere.yaml. not found"),
    BadInput("recipe file: a folder", nothing, "train medusa target", "recipe .target. is a folder"),
    BadInput("recipe file: a pipe", fifo, "train medusa bad.yaml", "recipe .bad.yaml. is no ordinary file"),
    BadInput("recipe file: a device", nothing, "train medusa /dev/zero", "recipe ./dev/zero. is no ordinary file"),
    BadInput("recipe file: a device, plan", nothing, "plan /dev/zero", "recipe ./dev/zero. is no ordinary file"),
    recipe("empty", "", "bad.yaml: expected `key: value` lines, got nothing"),
    recipe("a list", "- a\n- b\n", "bad.yaml: expected `key: value` lines, got a list"),
    recipe("a word", "hello\n", "bad.yaml: expected `key: value` lines, got text"),
    recipe("NUL", MEDUSA.encode() + b"tree.depth: \0\n", "bad.yaml: not a YAML recipe: .*#x0000"),
    recipe("an escape sequence", MEDUSA.encode() + b"tree.depth: \x1b[2J\n", "bad.yaml: not a YAML recipe: .*#x001b"),
    recipe("not UTF-8", MEDUSA.encode() + b"data.template: \xff\n", "bad.yaml: not a YAML recipe: .*utf-8"),
    recipe("UTF-16", MEDUSA.encode("utf-16"), "bad.yaml: not a YAML recipe: .*utf-8"),
    recipe("huge", MEDUSA + "# filler\n" * 2_000_000, "bad.yaml: 18,.* bytes; expected a recipe of at most"),
    recipe("an alias", MEDUSA + "train.eval_every: &n 1\ntrain.save_every: *n\n", "bad.yaml: .* anchors and aliases"),
    recipe("an anchor", MEDUSA + "train.eval_every: &n 1\n", "bad.yaml: .* anchors and aliases"),
    recipe("a billion laughs", MEDUSA + LAUGHS, "bad.yaml: .* anchors and aliases"),
    recipe("merged mappings", "x: &x {a: 1}\ntrain: {<<: *x}\n" + MEDUSA, "bad.yaml: .* anchors and aliases"),
    recipe("lists in lists", MEDUSA + "train.betas: " + "[" * 50_000 + "]" * 50_000 + "\n", "bad.yaml: .* nested deeper than"),
    recipe("mappings in mappings", MEDUSA + "tree: " + "{a: " * 5_000 + "1" + "}" * 5_000 + "\n", "bad.yaml: .* nested deeper than"),
    recipe("a tag that runs code", MEDUSA + f"tree.depth: !!python/object/apply:builtins.exec [{PLANTED!r}]\n", "bad.yaml: .* the tag"),
    recipe("a tag of bytes", MEDUSA + "data.template: !!binary aGk=\n", "bad.yaml: .* the tag"),
    recipe("a tag of a set", MEDUSA + "tree: !!set {depth}\n", "bad.yaml: .* the tag"),
    recipe("two documents", MEDUSA + "---\n" + MEDUSA, "bad.yaml: .* more than one document"),
    recipe("a key twice", MEDUSA + "train.lr: 1.0\n", "bad.yaml: .*'train.lr' is given twice"),
    recipe("a key twice, dotted and nested", MEDUSA + "train: {lr: 1.0}\n", "bad.yaml: .*'train.lr' is given twice"),
    recipe("a list as key", MEDUSA + "[a, b]: 1\n", "bad.yaml: .* a key .* a word"),
    recipe("an endless integer", MEDUSA + f"tree.depth: {'9' * 5000}\n", "bad.yaml: not a YAML recipe: .*digits"),
    recipe("a section that is a word", MEDUSA + "tree: deep\n", "unknown recipe key 'tree'"),
    recipe("a mapping as value", MEDUSA + "tree: {depth: {n: 3}}\n", "unknown recipe key 'tree.depth.n'"),
    recipe("a number as key", MEDUSA + "3: 4\n", "unknown recipe key '3'"),
    recipe("a NUL in a value", MEDUSA.replace("runs/new", '"runs/\\0new"'), "recipe key 'train.output': .*control character"),
    recipe("an escape sequence in a value", MEDUSA + 'data.template: "\\e]0;x\\a"\n', "recipe key 'data.template': .*control character"),
    recipe("a surrogate in a value", MEDUSA + 'data.template: "\\ud800"\n', "bad.yaml: not a YAML recipe|control character"),
]

WORDS = [
    override("recipe word: a misspelt key", "train.stepz=3", "unknown recipe key 'train.stepz'; the nearest is 'train.steps'"),
    override("recipe word: a misspelt section", "trian.steps=3", "unknown recipe key 'trian.steps'; the nearest is 'train.steps'"),
    override("recipe word: another method's key", "eagle.steps=3", "unknown recipe key 'eagle.steps'"),
    override("recipe word: no value", "train.steps", "override 'train.steps' is not of the form key=value"),
    override("recipe word: no key", "=3", "unknown recipe key ''"),
    override("recipe word: an escape sequence", "train.\x1b[2J=3", r"unknown recipe key 'train.\\x1b\[2J'"),
    *(
        BadInput(f"recipe word: {name}, {command.split()[0]} {command.split()[1]}", nothing, [*command.split(), word], says)
        for command in ("data prepare medusa.yaml", "data capture eagle.yaml features.store=runs/s", "plan medusa.yaml --cpu")
        for name, word, says in (
            ("a misspelt section", "dta.train=x", "unknown recipe key 'dta.train'; the nearest is 'data.train'"),
            ("a misspelt key of a section", "data.trian=x", "unknown recipe key 'data.trian'; the nearest is 'data.train'"),
            ("a key that no method has", "medusa.headz=3", "unknown recipe key 'medusa.headz'; the nearest is 'medusa.heads'"),
        )
    ),
    *(
        BadInput(f"recipe word: a misspelt section in the file, {name}", written("bad.yaml", MEDUSA + "dat.train: x\n"), words, says)
        for name, words in (("prepare", "data prepare bad.yaml"), ("show", "data show bad.yaml"), ("plan", "plan bad.yaml"))
        for says in ("unknown recipe key 'dat.train'; the nearest is 'data.train'",)
    ),
    override("recipe word: deep lists in a word", "train.betas=" + "[" * 9000, "override train.betas=.*not a YAML value"),
    override("recipe word: an alias in a word", "train.betas=[&a,*a]", "override train.betas=.*not a YAML value"),
    override("recipe word: a tag in a word", "train.betas=!!python/name:os.system", "override train.betas=.*not a YAML value"),
    override("recipe word: an endless integer in a word", f"train.steps={'9' * 5000}", "override train.steps=.*not a YAML value"),
    BadInput(
        "recipe word: a later value counts", nothing, "train medusa medusa.yaml train.steps=x train.steps=1", "trained for 1 steps", 0
    ),
]

NUMBERS = [
    override(f"recipe number: {word}", word, f"recipe key '{word.partition('=')[0]}[^']*': .*{says}", command)
    for command, cases in (
        (
            "train medusa medusa.yaml",
            {
                "train.lr=.inf": "finite",
                "train.lr=.nan": "finite|greater than 0",
                "train.lr=0": "greater than 0",
                "train.lr=1e30": "less than or equal to 1",
                "train.lr=1e999": "less than or equal to 1|finite",
                "train.min_lr=2.0": "less than or equal to 1",
                "train.min_lr=.nan": "finite",
                "train.weight_decay=.inf": "finite",
                "train.weight_decay=1e30": "less than or equal to",
                "train.weight_decay=-0.1": "greater than or equal to 0",
                "train.betas=[0.9,1.0]": "less than 1",
                "train.betas=[-0.1,0.9]": "greater than or equal to 0",
                "train.betas=[.nan,0.9]": "finite",
                "train.betas=[0.9]": "field required|nothing|at least 2",
                "train.betas=[0.9,0.9,0.9]": "at most 2",
                "train.clip=.nan": "finite",
                "train.clip=-1": "greater than 0",
                "train.clip=.inf": "finite",
                "train.watchdog_minutes=.inf": "finite",
                "train.tau_temperature=.nan": "finite",
                "train.steps=1e18": "valid integer",
                "train.steps=1.5": "valid integer",
                "train.steps=true": "valid integer",
                "train.steps=1000000000000": "less than or equal to",
                "train.batch_size=1000000000": "less than or equal to",
                "train.micro_batch_size=1000000000": "less than or equal to",
                "train.warmup_steps=-1": "greater than or equal to 0",
                "train.seed=10000000000": "less than 2147483648",
                "train.keep=10000000000": "less than or equal to",
                "train.eval_batches=100000000000": "less than or equal to",
                "data.seq_len=1000000000": "less than or equal to",
                "data.seq_len=4": "greater than or equal to 8",
                "data.near_duplicate=.nan": "finite|greater than 0",
                "data.num_proc=1000000": "less than or equal to",
                "features.batch_tokens=1000000000000": "less than or equal to",
                "tree.depth=1000000": "less than or equal to",
                "tree.nodes=1000000000": "less than or equal to",
                "medusa.heads=1000000": "less than or equal to",
                "medusa.layers=1000000": "less than or equal to",
            },
        ),
        ("train eagle eagle.yaml", {"eagle.layers=1000000": "less than or equal to", "eagle.steps=1000000": "less than or equal to"}),
        (
            "train distill distill.yaml",
            {
                "student.layers=1000000": "less than or equal to",
                "student.layers=[1,-1]": "greater than or equal to 0",
                "student.hidden_size=1000000000": "less than or equal to",
                "student.lora=1000000": "less than or equal to",
                "distill.temperature=.inf": "finite",
                "distill.prompts=1000000000": "less than or equal to",
            },
        ),
    )
    for word, says in cases.items()
] + [
    override("recipe number: decay past the weights", "train.lr=1 train.weight_decay=5", "train.lr=1.0 × train.weight_decay=5.0"),
]

KINDS = [
    override("recipe value: a list for a number", "train.steps=[2]", "recipe key 'train.steps': .*valid integer"),
    override("recipe value: a list for text", "train.output=[a]", "recipe key 'train.output': .*valid string"),
    override("recipe value: a number for a switch", "data.pack=3", "recipe key 'data.pack': .*valid boolean"),
    override("recipe value: a word for numbers", "train.betas=x", "recipe key 'train.betas': expected a list"),
    BadInput(
        "recipe value: a key of a source",
        nothing,
        ["train", "medusa", "medusa.yaml", "data.train=[{pth: x}]"],
        r"recipe key 'data.train\.0\.\w+': ",
    ),
    override("recipe value: no steps", "train.steps=", "recipe key 'train.steps': .*got nothing"),
    override("recipe value: no output", "train.output=", "recipe key 'train.output': .*got nothing"),
    override("recipe value: no target", "target.path=", "recipe key 'target.path': .*got nothing"),
    BadInput("recipe value: a blank output", nothing, ["train", "medusa", "medusa.yaml", "train.output=  "], "'train.output': .*is blank"),
    BadInput(
        "recipe value: an empty output in the file",
        written("bad.yaml", MEDUSA.replace("runs/new", '""')),
        "train medusa bad.yaml",
        "is blank",
    ),
    override("recipe value: an unknown home", "train.output=~nobodyhere/x", "'train.output': .*no user"),
    BadInput(
        "recipe value: ~ in every path",
        both(
            lambda folder: written("again.jsonl", (folder / "chats.jsonl").read_text().replace("How many", "How few of them"))(folder),
            written("asked.jsonl", '{"prompt": "How"}\n'),
            written("t.jinja", TEMPLATE),
        ),
        [
            *("train", "medusa", "medusa.yaml", "target.path=~/target", "data.train=[{path: ~/chats.jsonl}]", "data.valid=~/again.jsonl"),
            *("data.cache=~/cache", "train.output=~/runs/new", "train.tau_file=~/asked.jsonl", "train.tau_prompts=1", "train.tau_tokens=2"),
            *("features.store=~/nothing", "data.template=~/t.jinja"),
        ],
        "trained for 2 steps",
        status=0,
        writes=(".cache/*",),
        inside=home,
    ),
    BadInput(
        "recipe value: ~ in the start of a student",
        nothing,
        "train distill distill.yaml student.start=~/student/artifact student.layers=",
        "trained for 2 steps",
        status=0,
        writes=(".cache/*",),
        inside=home,
    ),
    BadInput(
        "recipe value: ~ in the start of a drafter",
        nothing,
        "train eagle eagle.yaml eagle.start=~/eagle/artifact",
        "trained for 2 steps",
        status=0,
        writes=(".cache/*",),
        inside=home,
    ),
]

FOLDERS = [
    override("folder: another artifact", "train.output=medusa/artifact", "train.output=medusa/artifact holds .*recipe.yaml"),
    override("folder: the target", "train.output=target", "train.output=target holds config.json"),
    override("folder: a feature store", "train.output=store", "train.output=store holds"),
    override("folder: a file", "train.output=chats.jsonl", "train.output=chats.jsonl is a file"),
    override("folder: within a file", "train.output=chats.jsonl/run", "train.output=chats.jsonl/run .*Not a directory"),
    *(
        BadInput(
            f"folder: {what} of somebody else",
            written(f"mine/{file}", "precious"),
            f"{command} train.output=mine",
            rf"train.output=mine holds {what}.*give another folder",
        )
        for what, file, command in (
            ("start", "start/notes.txt", "train distill distill.yaml"),
            (r"\.start\.part", ".start.part/notes.txt", "train distill distill.yaml"),
            ("artifact", "artifact/notes.txt", "train medusa medusa.yaml"),
            ("checkpoints", "checkpoints/step-00000001", "train medusa medusa.yaml"),
            ("metrics.jsonl", "metrics.jsonl", "train eagle eagle.yaml"),
            ("run.json", "run.json", "train medusa medusa.yaml"),
            ("replay", "replay/step-00000000/notes.txt", "train distill distill.yaml"),
            ("tokenizer", "tokenizer/notes.txt", "train target target-tiny data.train=text.txt"),
        )
    ),
    *(
        BadInput(
            f"folder: {path} in a run",
            written(f"medusa/checkpoints/{path}", "precious"),
            "train medusa medusa.yaml train.output=medusa train.steps=3",
            f"medusa/checkpoints/{path.partition('/')[0]} is no checkpoint of Draftsmith",
        )
        for path in ("step-00000001/notes.txt", "step-00000009/model.safetensors", "step-00000007")
        if path != "step-00000001/notes.txt"
    ),
    *(
        BadInput(
            f"folder: {path} beside checkpoints stays",
            written(f"medusa/checkpoints/{path}", "precious"),
            "train medusa medusa.yaml train.output=medusa train.steps=3 train.keep=1",
            "trained for 3 steps",
            status=0,
            writes=(*ARTIFACT, "medusa/artifact/*", "medusa/checkpoints/latest", "medusa/checkpoints/step-0000000[123]/*"),
        )
        for path in ("step-final/notes.txt", "best-00000001.safetensors", ".tmp-notes", ".latest.old", ".step-mine/notes.txt", "notes.txt")
    ),
    BadInput(
        "folder: a start in a run that it did not make",
        written("medusa/start/notes.txt", "precious"),
        "train distill distill.yaml train.output=medusa",
        "medusa/start is no start of Draftsmith",
        writes=("medusa/.draftsmith.json",),
    ),
    *(
        BadInput(
            f"folder: {name} is a link",
            linked(f"medusa/{name}", f"elsewhere/{name}"),
            "train medusa medusa.yaml train.output=medusa train.steps=3",
            f"medusa/{name} is a link",
        )
        for name in ("artifact", "checkpoints", "metrics.jsonl", "recipe.yaml", "artifact/README.md", "checkpoints/step-00000002")
    ),
    BadInput(
        "folder: an artifact that Draftsmith did not write",
        lambda folder: (folder / "medusa/artifact/run.json").unlink(),
        "train medusa medusa.yaml train.output=medusa train.steps=3",
        "medusa/artifact was not written by a run of Draftsmith",
    ),
    BadInput(
        "folder: the mark of another kind",
        written("mine/.draftsmith.json", '{"kind": "feature store"}'),
        "train medusa medusa.yaml train.output=mine",
        "train.output=mine holds a feature store, not a training run",
    ),
    BadInput(
        "folder: a run of a version without marks goes on",
        unmarked("medusa"),
        "train medusa medusa.yaml train.output=medusa train.steps=3",
        "resuming from medusa/checkpoints/step-00000002",
        status=0,
        writes=("medusa/*",),
    ),
    BadInput(
        "folder: a student of a version without marks goes on",
        unmarked("student"),
        "train distill distill.yaml train.output=student train.steps=3",
        "resuming from student/checkpoints/step-00000002",
        status=0,
        writes=("student/.draftsmith.json", "student/[acmr]*"),
    ),
    BadInput(
        "folder: another process writes there",
        locked("mine"),
        "train medusa medusa.yaml train.output=mine",
        "train.output=mine: process 7 on elsewhere .* is writing there",
    ),
]


def zeros(*shape: int) -> Any:
    import torch

    return torch.zeros(shape)


CHECKPOINTS = [
    resumed("optimizer state of another shape", "optimizer.safetensors: `exp_avg.*shape", state_of(first("exp_avg.", lambda _: zeros(3)))),
    resumed("optimizer state of no shape", "optimizer.safetensors: `exp_avg.*shape", state_of(first("exp_avg.", lambda _: zeros()))),
    resumed("optimizer state missing", "optimizer.safetensors: `exp_avg_sq.*is missing", state_of(first("exp_avg_sq.", lambda _: None))),
    resumed(
        "optimizer state of another parameter",
        "optimizer.safetensors: `exp_avg.other` belongs to no",
        state_of(lambda w: w.update({"exp_avg.other": zeros(3)})),
    ),
    resumed("optimizer state of integers", "optimizer.safetensors: `exp_avg.*int64", state_of(first("exp_avg.", lambda t: t.long()))),
    resumed("optimizer state not finite", "optimizer.safetensors: .*not finite", state_of(first("exp_avg.", lambda t: t * float("nan")))),
    resumed("a step that is a table", "optimizer.safetensors: `step.*shape", state_of(first("step.", lambda _: zeros(2, 2)))),
    resumed("a negative step", "optimizer.safetensors: `step", state_of(first("step.", lambda t: t - 100))),
    resumed(
        "weights not finite", "its weights are not finite", tensors(f"{STEP}/model.safetensors", first("", lambda t: t * float("inf")))
    ),
    resumed("weights of integers", "its weights are of int64", tensors(f"{STEP}/model.safetensors", first("", lambda t: t.long()))),
    resumed("weights of another shape", "of another model", tensors(f"{STEP}/model.safetensors", first("", lambda _: zeros(3)))),
    resumed("weights missing", "of another model", tensors(f"{STEP}/model.safetensors", first("", lambda _: None))),
    resumed("no recipe", "state.json: `recipe` should be an object, got nothing", state={"recipe": ...}),
    resumed("a list as recipe", "state.json: `recipe` should be an object, got a list", state={"recipe": []}),
    resumed("text as fingerprint", "state.json: `fingerprint` should be an object", state={"fingerprint": "x"}),
    resumed("text as step", "state.json: `step` should be an integer", state={"step": "2"}),
    resumed("another step than its name", "state.json: `step` .*1.*step-00000002", state={"step": 1, "evaluated": 1}),
    resumed("a negative number of steps left out", "state.json: `left_out`", state={"left_out": -1}),
    resumed("text as threads", "state.json: `threads` should be an integer", state={"threads": "two"}),
    resumed("endless threads", "state.json: `threads`", state={"threads": 10**12}),
    resumed("another precision", "state.json: `precision`", state={"precision": "fp8"}),
    resumed("text as best", "state.json: `best` should be an object or null", state={"best": "x"}),
    resumed("a best without τ", "state.json: `best.tau` should be a number", state={"best": {"step": 1, "since": 0}}),
    resumed("a best of the future", "state.json: `best.step`", state={"best": {"tau": 1.0, "step": 9, "since": 0}}),
    resumed("best weights that are not there", "best-00000001.safetensors", state={"best": {"tau": 9.0, "step": 1, "since": 0}}),
    resumed("a target with other weights", "target's files=", tensors("target/model.safetensors", first("", lambda t: t + 1))),
    resumed("another format", "of another version of draftsmith", state={"format": 99}),
    resumed("text as format", "of another version of draftsmith", state={"format": "x"}),
    resumed("another recipe", "was made with data.seq_len=256, this run has 64", state={"recipe": {}}),
    resumed(
        "a key that is gone", "was made with data.gone=0.5, a key that this version does not have", state={"recipe": {"data.gone": 0.5}}
    ),
    *(
        BadInput(
            f"checkpoint: {file} cut off",
            both(
                lambda folder, file=file: os.truncate(folder / STEP / file, 40),
                lambda folder: shutil.rmtree(folder / "medusa/checkpoints/step-00000001"),
            ),
            "train medusa medusa.yaml train.output=medusa train.steps=3",
            "step-00000002 cannot be read .*to start again, or restore it",
            writes=HOLDER,
        )
        for file in ("model.safetensors", "optimizer.safetensors", "state.json")
    ),
    BadInput(
        "checkpoint: deep nesting",
        both(
            written(f"{STEP}/state.json", "[" * 100_000),
            lambda folder: shutil.rmtree(folder / "medusa/checkpoints/step-00000001"),
        ),
        "train medusa medusa.yaml train.output=medusa train.steps=3",
        "nested too deep",
        writes=HOLDER,
    ),
    BadInput(
        "checkpoint: a student's start without a record",
        written("student/start/made.json", "[1"),
        "train distill distill.yaml train.output=student train.steps=3",
        "student/start/made.json: not JSON",
        writes=HOLDER,
    ),
    BadInput(
        "checkpoint: a student's start with code",
        both(
            written("student/start/evil.py", PLANTED),
            changed("student/start/config.json", auto_map={"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"}),
        ),
        "train distill distill.yaml train.output=student train.steps=3",
        "trained for 3 steps",
        status=0,
        writes=("student/[acmr]*", "student/.draftsmith.json"),
    ),
    BadInput(
        "checkpoint: a student's start without weights",
        lambda folder: (folder / "student/start/model.safetensors").unlink(),
        "train distill distill.yaml train.output=student train.steps=3",
        "student/start, the student before training, (cannot be read|has missing)",
        writes=HOLDER,
    ),
    BadInput(
        "checkpoint: a student's start of another shape",
        tensors("student/start/model.safetensors", first("model.layers", lambda _: zeros(3))),
        "train distill distill.yaml train.output=student train.steps=3",
        "student/start, the student before training, (cannot be read|has missing)",
        writes=HOLDER,
    ),
    BadInput(
        "checkpoint: metrics that are no rows stay out of the way",
        written("medusa/metrics.jsonl", b'{"step": "x"}\n[]\nnull\n{"step": 1e999}\n\xff\n{"step": 1, "lr": 1}\n'),
        "train medusa medusa.yaml train.output=medusa train.steps=3",
        "trained for 3 steps",
        status=0,
        writes=("medusa/*",),
    ),
    *(
        BadInput(
            f"checkpoint: {what} as trackers.json",
            written("medusa/trackers.json", content),
            "train medusa medusa.yaml train.output=medusa train.steps=3 train.trackers=[tensorboard]",
            says,
            writes=ARTIFACT[:3],
        )
        for what, content, says in (
            ("a list", "[]", "medusa/trackers.json: expected an object, got a list"),
            ("half a file", '{"id"', "medusa/trackers.json: not JSON"),
            ("a number", '{"id": 3, "step": 0}', "medusa/trackers.json: `id` should be text"),
            ("a word", '{"id": "a", "step": "x"}', "medusa/trackers.json: `step` should be an integer"),
        )
    ),
]

SIZES = [
    override("size: a batch that cannot be cut", "train.batch_size=3 train.micro_batch_size=2", "train.batch_size=3 cannot be cut"),
    override("size: a sequence past the context", "data.seq_len=100000", "data.seq_len=100000 is longer than the target's context"),
    override(
        "size: a micro-batch past the memory",
        "train.batch_size=1000000 train.micro_batch_size=1000000",
        "train.micro_batch_size=1000000 .*memory",
    ),
    BadInput(
        "size: a micro-batch past what the system gives",
        nothing,
        "train medusa medusa.yaml train.batch_size=16384 train.steps=1",
        "out of memory|needs at least",
        inside=little_memory,
    ),
    override("size: heads past the sequence", "medusa.heads=64", "medusa.heads=64 look further ahead than data.seq_len=64"),
    override(
        "size: a drafter past the memory",
        "eagle.hidden_size=131072",
        "parameters .*memory",
        "train eagle eagle.yaml",
    ),
    override("size: a student past the memory", "student.hidden_size=65536 student.heads=4", "memory", "train distill distill.yaml"),
    override(
        "size: more layers than the target's", "student.start=pruned student.layers=900", "student.layers", "train distill distill.yaml"
    ),
    override(
        "size: heads of a student that do not divide", "student.hidden_size=30 student.heads=4", "student", "train distill distill.yaml"
    ),
    *(
        override(
            f"size: {name} of a target",
            "data.train=text.txt data.cache=cache data.seq_len=32 train.output=runs/new train.steps=1 train.batch_size=2 "
            "train.micro_batch_size=2 architecture.compile=false architecture.vocab_size=300 " + words,
            says,
            "train target target-tiny",
        )
        for name, words, says in (
            ("heads that do not divide", "architecture.hidden_size=30 architecture.num_heads=4", "architecture.hidden_size=30"),
            ("KV heads that do not divide", "architecture.num_heads=4 architecture.num_kv_heads=3", "architecture.num_kv_heads=3"),
            ("a key of drafters", "train.normalise=all", "train.normalise=all does nothing with `train target`"),
            ("sizes past the memory", "architecture.hidden_size=131072 architecture.num_layers=200", "memory"),
            ("layers without end", "architecture.num_layers=1000000", "less than or equal to"),
            ("a vocabulary without end", "architecture.vocab_size=1000000000", "less than or equal to"),
        )
    ),
    BadInput("size: no GPUs to plan for", nothing, "plan medusa.yaml --gpus 0", "--gpus 0: expected a number above 0"),
    BadInput(
        "size: endless memory to plan for", nothing, "plan medusa.yaml --gpu-memory inf", "--gpu-memory inf: expected a finite number"
    ),
    BadInput("size: GPUs without end to plan for", nothing, "plan medusa.yaml --gpus 1000000000000", "--gpus"),
]

STREAMS = [
    BadInput(f"stream: {name}", nothing, "train medusa medusa.yaml", "", status=0, inside=inside)
    for name, inside in (
        ("closed stdin", lambda: os.close(0)),
        ("closed stdout", lambda: os.close(1)),
        ("closed stderr", lambda: os.close(2)),
        ("closed, all of them", lambda: [os.close(descriptor) for descriptor in (0, 1, 2)]),
        ("stdout that is no object", lambda: setattr(sys, "stdout", None)),
        ("stderr that is no object", lambda: setattr(sys, "stderr", None)),
        ("ASCII alone", ascii_stdout),
        ("a full disk behind stdout", full_stdout),
        ("a reader that is gone", no_reader),
    )
]

CASES = [*FILES, *WORDS, *NUMBERS, *KINDS, *FOLDERS, *CHECKPOINTS, *SIZES, *STREAMS]
