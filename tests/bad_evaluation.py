"""Bad inputs of eval, compare, bench and generate: artifacts with links, prompts files, numbers, streams, and text that goes to a terminal."""

import errno
import gzip
import json
import os
import re
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bad_inputs import BadInput, both, changed, nothing, written

SHORT = "--prompts prompts.jsonl --max-new-tokens 4 --temperature 0"
EVAL, SUFFIX = f"eval medusa/artifact {SHORT} --probe 0", f"eval suffix --target target {SHORT} --probe 0"
COMPARE = f"compare suffix ngram --target target {SHORT}"
BENCH = "bench --target target --drafter suffix --prompts prompts.jsonl --max-new-tokens 4 --repeats 1 --limit 1"
GENERATE = ["generate", "--target", "target", "--max-new-tokens", "4"]
ARTIFACT = "medusa/artifact"
MEASURED = ("acceptance.json", "records.jsonl", "report.html", "survival.png")
WRITTEN = tuple(f"{ARTIFACT}/{name}" for name in (*MEASURED, "README.md", "config.json"))
SETTINGS = '{"max_new_tokens": 4, "dtype": "float32", "slots": 1, "timed": null}'
HEADER = (
    '{"kind": "header", "format": 1, "lines": 1, "target": {"name": "t"}, "drafter": {"method": "m"}, "settings": '
    + SETTINGS
    + ', "skipped": {}}\n'
)
CLEAN = r"(?s)\A(?!.*[\x00-\x08\x0b-\x1f\x7f-\x9f])"  # no control character but newline and tab is anywhere in the output


def prompts(**entries: Any) -> Callable[[Path], object]:
    """A damage: the first two prompts have these entries instead; `...` takes an entry out."""

    def damage(folder: Path) -> None:
        rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
        for row in rows[:2]:
            row.update(entries)
            row.update({} if "id" in entries else {"id": f"{row['id']}x"})
        lines = [json.dumps({key: value for key, value in row.items() if value is not ...}) for row in rows]
        (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")

    return damage


def line(text: str | bytes) -> Callable[[Path], object]:
    """A damage: prompts.jsonl has this as its third line."""
    content = text.encode() if isinstance(text, str) else text

    def damage(folder: Path) -> None:
        rows = (folder / "prompts.jsonl").read_bytes().splitlines()
        (folder / "prompts.jsonl").write_bytes(b"\n".join([*rows[:2], content, *rows[2:]]) + b"\n")

    return damage


def linked(*names: str) -> Callable[[Path], object]:
    """A damage: these files of the artifact are links to files elsewhere, which exist."""

    def damage(folder: Path) -> None:
        (folder / "blobs").mkdir()
        for name in names or [file.name for file in (folder / ARTIFACT).iterdir()]:
            file, blob = folder / ARTIFACT / name, folder / "blobs" / name
            shutil.move(file, blob) if file.exists() else blob.write_text("somebody's")
            file.symlink_to(blob)

    return damage


def moved(name: str, new: str, link: bool = False) -> Callable[[Path], object]:
    """A damage: `name` is at `new` instead, with a link to it in its old place if `link`."""

    def damage(folder: Path) -> None:
        (folder / new).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(folder / name, folder / new)
        if link:
            (folder / name).symlink_to(folder / new)

    return damage


def stdin(name: str) -> Callable[[], object]:
    """Standard input is this file."""
    return lambda: os.dup2(os.open(name, os.O_RDONLY), 0)


def stream(number: int, path: str = "/dev/full") -> Callable[[], object]:
    """stdout (1) or stderr (2) is a device that takes nothing."""
    return lambda: os.dup2(os.open(path, os.O_WRONLY), number)


def without(name: str) -> Callable[[], object]:
    """sys.stdin, sys.stdout or sys.stderr is None, as Python leaves it where the stream was closed before it started."""

    def damage() -> None:
        number = ("stdin", "stdout", "stderr").index(name)
        os.close(number)
        setattr(sys, name, None)

    return damage


def encoded(encoding: str) -> Callable[[], object]:
    """stdout writes this encoding."""
    return lambda: sys.stdout.reconfigure(encoding=encoding, errors="strict")


def short_files(size: int) -> Callable[[], object]:
    """No file may become larger than `size` bytes."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    return limit


def no_space(name: str) -> Callable[[], object]:
    """The disk is full when a file of this name is written."""

    def limit() -> None:
        from draftsmith.inference import durable

        replace = durable.replace

        def failing(path: Path, write: Callable[[Path], object]) -> None:
            if path.name == name:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            replace(path, write)

        durable.replace = failing

    return limit


def at_home() -> None:
    """The home folder is the case's own."""
    os.environ["HOME"] = os.getcwd()


def refused(name: str, damage: Callable[[Path], object], says: str, command: str | list[str] = SUFFIX, **more: Any) -> BadInput:
    return BadInput(name, damage, command, says, **more)


def done(name: str, damage: Callable[[Path], object], says: str, command: str | list[str] = SUFFIX, **more: Any) -> BadInput:
    return BadInput(name, damage, command, says, status=0, **more)


LINKS = [
    refused(
        "links: all files of the artifact", linked(), "model.safetensors in 'medusa/artifact' is a link to .* outside the folder", EVAL
    ),
    *(
        done(f"links: {name} of the artifact", linked(name), f"nothing is written into .*{name} is a link.*--out", EVAL)
        for name in ("config.json", "README.md", *MEASURED)
    ),
    done(
        "links: survival.png leads to a file that does not exist",
        lambda folder: (folder / ARTIFACT / "survival.png").symlink_to(folder / "planted.png"),
        "survival.png is a link",
        EVAL,
    ),
    done("links: the artifact's folder", moved(ARTIFACT, "elsewhere", link=True), "nothing is written into .*is a link", EVAL),
    done(
        "links: a file of the student's artifact",
        lambda folder: moved("student/artifact/config.json", "blobs/config.json", link=True)(folder),
        "config.json is a link",
        f"eval student/artifact {SHORT} --probe 0",
    ),
    refused(
        "links: acceptance.json of --out",
        lambda folder: ((folder / "out").mkdir(), (folder / "out/acceptance.json").symlink_to(folder / "text.txt")),
        "--out out: acceptance.json is a link",
        f"{SUFFIX} --out out",
    ),
    refused(
        "links: --out is a link",
        lambda folder: ((folder / "kept").mkdir(), (folder / "out").symlink_to(folder / "kept")),
        "--out out.* is a link",
        f"{SUFFIX} --out out",
    ),
    refused(
        "links: --out of bench is a link",
        lambda folder: (folder / "speed.json").symlink_to(folder / "text.txt"),
        "--out speed.json.*is a link",
        f"{BENCH} --out speed.json",
    ),
]
FOREIGN = [
    done(
        "foreign files: a model card by hand",
        written(f"{ARTIFACT}/README.md", "# My notes\n"),
        "README.md .*left as it is",
        EVAL,
        writes=tuple(name for name in WRITTEN if "README" not in name),
    ),
    *(
        done(
            f"foreign files: {name} of somebody else",
            written(f"{ARTIFACT}/{name}", '{"tau": 3}\n'),
            f"nothing is written into .*{name}.*--out",
            EVAL,
        )
        for name in MEASURED
    ),
    done(
        "foreign files: a folder named records.jsonl", lambda folder: (folder / ARTIFACT / "records.jsonl").mkdir(), "records.jsonl", EVAL
    ),
    done(
        "foreign files: records.part.jsonl of somebody else",
        written(f"{ARTIFACT}/records.part.jsonl", "1\n"),
        "nothing is written into .*records.part.jsonl",
        EVAL,
    ),
    done("foreign files: an empty acceptance.json", written(f"{ARTIFACT}/acceptance.json", ""), "Written to", EVAL, writes=WRITTEN),
    done("foreign files: acceptance.json nested too deep", written(f"{ARTIFACT}/acceptance.json", "[" * 200_000), "acceptance.json", EVAL),
    refused(
        "foreign files: records.jsonl of somebody else in --out",
        written("out/records.jsonl", "1\n"),
        "--out out: records.jsonl",
        f"{SUFFIX} --out out",
    ),
    refused("foreign files: --out is a file", nothing, "--out text.txt is a file", f"{SUFFIX} --out text.txt"),
    refused("foreign files: --out of bench is a file of somebody else", nothing, "--out text.txt", f"{BENCH} --out text.txt"),
    refused("foreign files: --out of bench is the prompts", nothing, "--out prompts.jsonl", f"{BENCH} --out prompts.jsonl"),
    refused("foreign files: --out of bench is a folder", nothing, "--out medusa: expected a file", f"{BENCH} --out medusa"),
    refused("foreign files: --out of bench in no folder", nothing, "--out no/speed.json: expected", f"{BENCH} --out no/speed.json"),
]
TERMINAL = [
    done("terminal: a domain that is a closing tag", prompts(domain="[/]"), CLEAN + r".*│ \[/\]", EVAL, writes=WRITTEN),
    done("terminal: a domain that is a tag", prompts(domain="[bold]x"), r"\[bold\]x"),
    done("terminal: a domain that is a link", prompts(domain="[link=http://x]y[/link]"), r"\[link=http"),
    done("terminal: a domain that is an emoji code", prompts(domain=":smile:"), ":smile:"),
    done("terminal: a domain that sets the title", prompts(domain="\x1b]0;gone\x07"), CLEAN + r".*x1b\]0;gone", EVAL, writes=WRITTEN),
    done("terminal: a domain of a C1 control", prompts(domain="\x9b31mred"), CLEAN + r".*x9b31mred"),
    done("terminal: a domain that overwrites its line", prompts(domain="a\rb\x08c"), CLEAN + r".*a\\rb\\x08c"),
    done("terminal: a domain of two lines", prompts(domain="first\nsecond"), r"first\\nsecond", EVAL, writes=WRITTEN),
    done("terminal: a domain that turns the text round", prompts(domain="a\u202eb"), r"(?s)\A(?!.*\u202e).*a\\u202eb"),
    done("terminal: a domain that is a formula", prompts(domain=r"$\frac{"), r"\$\\frac", EVAL, writes=WRITTEN),
    done("terminal: a domain that begins with an underscore", prompts(domain="_a"), "_a", EVAL, writes=WRITTEN),
    done("terminal: a domain that ends a cell", prompts(domain="a | b <script>"), r"a \| b <script>", EVAL, writes=WRITTEN),
    done("terminal: a domain of 10,000 letters", prompts(domain="d" * 10_000), "ddd", EVAL, writes=WRITTEN),
    refused(
        "terminal: an id in an error",
        both(prompts(id="\x1b[2J"), line(json.dumps({"id": "\x1b[2J", "prompt": "y"}))),
        r"^(?!.*\x1b).*x1b\[2J",
    ),
    refused("terminal: a drafter's path in an error", nothing, r"^(?!.*\x1b).*x1b\[31m", ["eval", "./\x1b[31mno", *SHORT.split()]),
    refused(
        "terminal: a prompts file's name in an error",
        nothing,
        r"^(?!.*\x1b).*x1b\[31m",
        ["eval", "suffix", "--target", "target", "--prompts", "\x1b[31m"],
    ),
    refused("terminal: an option in an error", nothing, r"^(?!.*\x1b).*x1b\[31m", [*SUFFIX.split(), "--\x1b[31m"]),
    refused("terminal: a choice in an error", nothing, r"^(?!.*\x1b).*x1b\[31m", [*SUFFIX.split(), "--tree", "\x1b[31m"]),
    done(
        "terminal: an artifact's path in the report",
        moved(ARTIFACT, "medusa/\x1b[31mred"),
        CLEAN + r".*Written to .*x1b\[31mred",
        ["eval", "medusa/\x1b[31mred", *SHORT.split(), "--probe", "0"],
        writes=("medusa/\x1b[[]31mred/*",),
    ),
    done(
        "terminal: names of compared drafters",
        moved("student/artifact", "student/[/bold]\x1b[31m"),
        CLEAN + r".*x1b\[31m",
        ["compare", "suffix", "student/[/bold]\x1b[31m", *SHORT.split()],
    ),
    done(
        "terminal: the target's name in a comparison",
        moved("target", "[bold]\x1b[31m"),
        CLEAN + r".*\[bold\]\\x1b\[31m",
        ["compare", "suffix", "ngram", "--target", "[bold]\x1b[31m/", *SHORT.split()],
    ),
    done(
        "terminal: the target's name in a benchmark",
        moved("target", "[bold]\x1b[31m"),
        CLEAN + r".*\[bold\]\\x1b\[31m",
        [word if word != "target" else "[bold]\x1b[31m/" for word in BENCH.split()],
    ),
    done(
        "terminal: generated text",
        nothing,
        CLEAN + r".*\\x",
        ["generate", "--target", "target", "--temperature", "9", "--max-new-tokens", "99", "x"],
    ),
    done(
        "terminal: generated text with colours",
        nothing,
        r"(?s)\A(?!.*[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]).*\\x",
        ["generate", "--target", "target", "--drafter", "ngram", "--show-accepted", "--temperature", "9", "--max-new-tokens", "99", "x"],
    ),
]
OUTPUT = [
    done("output: ASCII alone", nothing, "acceptance.json", EVAL, writes=WRITTEN, inside=encoded("ascii")),
    done("output: ASCII alone, compare", nothing, "intervals", COMPARE, inside=encoded("ascii")),
    done("output: ASCII alone, bench", nothing, "prompts", BENCH, inside=encoded("ascii")),
    done(
        "output: ASCII alone, generate",
        nothing,
        r"\\x",
        ["generate", "--target", "target", "--temperature", "9", "--max-new-tokens", "99", "x"],
        inside=encoded("ascii"),
    ),
    done("output: ASCII alone, help", nothing, "compare drafters", "--help", inside=encoded("ascii")),
    done("output: Latin-1, help of eval", nothing, "usage", "compare --help", inside=encoded("latin-1")),
    refused("output: a full disk under stdout", nothing, "stdout: No space left", EVAL, writes=WRITTEN, inside=stream(1)),
    refused("output: a full disk under stdout, JSON", nothing, "stdout: No space left", f"{EVAL} --json", writes=WRITTEN, inside=stream(1)),
    refused("output: a full disk under stdout, without an artifact", nothing, "stdout: No space left", SUFFIX, inside=stream(1)),
    refused("output: a full disk under stdout, compare", nothing, "stdout: No space left", COMPARE, inside=stream(1)),
    refused("output: a full disk under stdout, bench", nothing, "stdout: No space left", BENCH, inside=stream(1)),
    refused("output: a full disk under stdout, generate", nothing, "stdout: No space left", [*GENERATE, "x"], inside=stream(1)),
    refused("output: a full disk under stdout, help", nothing, "stdout: No space left", "--help", inside=stream(1)),
    refused("output: stdout closed", nothing, "stdout: Bad file descriptor", EVAL, writes=WRITTEN, inside=lambda: os.close(1)),
    refused("output: stdout closed before", nothing, "stdout: Bad file descriptor", EVAL, writes=WRITTEN, inside=without("stdout")),
    refused("output: stdout closed before, generate", nothing, "stdout: Bad file descriptor", [*GENERATE, "x"], inside=without("stdout")),
    done("output: a full disk under stderr", nothing, "Written to medusa/artifact", EVAL, writes=WRITTEN, inside=stream(2)),
    done("output: stderr closed", nothing, "Written to medusa/artifact", EVAL, writes=WRITTEN, inside=lambda: os.close(2)),
    done("output: stderr closed before", nothing, "Written to medusa/artifact", EVAL, writes=WRITTEN, inside=without("stderr")),
    done("output: stderr closed before, JSON", nothing, r"\A\{.*\}\n\Z", f"{SUFFIX} --json", inside=without("stderr")),
    refused(
        "output: no space for the picture", nothing, "survival.png.*No space left", EVAL, writes=WRITTEN, inside=no_space("survival.png")
    ),
    refused(
        "output: no space for the records",
        nothing,
        r"records.part.jsonl: File too large; what was recorded before is complete; .* give the same command again",
        EVAL,
        writes=(f"{ARTIFACT}/records.part.jsonl",),
        inside=short_files(3_000),
    ),
    refused(
        "output: no space for the file of bench",
        nothing,
        "speed.json.*No space left",
        f"{BENCH} --out speed.json",
        inside=no_space("speed.json"),
    ),
]
PROMPTS_FILE = [
    refused("prompts file: missing", nothing, "'no.jsonl' not found", "eval suffix --target target --prompts no.jsonl"),
    refused("prompts file: a folder", nothing, "'medusa' is a folder", "eval suffix --target target --prompts medusa"),
    refused(
        "prompts file: a FIFO",
        lambda folder: os.mkfifo(folder / "pipe"),
        "'pipe' is a FIFO, expected a file",
        "eval suffix --target target --prompts pipe",
    ),
    refused(
        "prompts file: /dev/zero", nothing, "'/dev/zero' is a device, expected a file", "eval suffix --target target --prompts /dev/zero"
    ),
    refused("prompts file: no name", nothing, "prompt file '' not found", ["eval", "suffix", "--target", "target", "--prompts", ""]),
    refused("prompts file: empty", written("prompts.jsonl", ""), "no prompts in it"),
    refused("prompts file: blank lines alone", written("prompts.jsonl", "\n \n"), "no prompts in it"),
    refused("prompts file: not UTF-8", line(b'{"prompt": "caf\xe9"}'), r"prompts.jsonl:3: byte 16 of the line, 0xe9, is not UTF-8"),
    refused(
        "prompts file: UTF-16",
        lambda folder: (folder / "prompts.jsonl").write_bytes('{"prompt": "x"}\n'.encode("utf-16")),
        "prompts.jsonl:1: byte 1 of the line, 0xff, is not UTF-8",
    ),
    done(
        "prompts file: a byte order mark",
        lambda folder: (folder / "prompts.jsonl").write_bytes(b"\xef\xbb\xbf" + (folder / "prompts.jsonl").read_bytes()),
        "sums",
    ),
    refused("prompts file: not JSON", line("{prompt: x}"), "prompts.jsonl:3: not JSON"),
    refused("prompts file: a list", line('["x"]'), "prompts.jsonl:3: expected an object"),
    refused("prompts file: a number", line("5"), "prompts.jsonl:3: expected an object"),
    refused("prompts file: nested too deep", line("[" * 100_000), "prompts.jsonl:3: JSON of more than 100 levels"),
    refused(
        "prompts file: nested too deep inside",
        line('{"prompt": "x", "more": ' + "[" * 100_000),
        "prompts.jsonl:3: JSON of more than 100 levels",
    ),
    refused("prompts file: a number of 5,000 digits", line('{"prompt": "x", "id": ' + "9" * 5_000 + "}"), "prompts.jsonl:3: .*digits"),
    refused("prompts file: half a surrogate pair", line('{"prompt": "x \\ud800"}'), r"prompts.jsonl:3: `prompt` .*surrogate"),
    refused(
        "prompts file: half a surrogate pair in the domain",
        line('{"prompt": "x", "domain": "\\ud800"}'),
        r"prompts.jsonl:3: `domain` .*surrogate",
    ),
    *(
        refused(f"prompts file: prompt is {value}", line(f'{{"prompt": {value}}}'), "prompts.jsonl:3: `prompt` should be text")
        for value in ("5", '["x"]', "true", "null", "[]", '{"text": "x"}')
    ),
    refused("prompts file: prompt is empty", line('{"prompt": ""}'), "prompts.jsonl:3: `prompt` is empty"),
    refused("prompts file: no prompt", line('{"question": "x"}'), "prompts.jsonl:3: expected `prompt`, `turns` or `messages`"),
    *(
        refused(
            f"prompts file: id is {value}", line(f'{{"prompt": "x", "id": {value}}}'), "prompts.jsonl:3: `id` should be text or an integer"
        )
        for value in ("true", "1.5", "[1]", "NaN")
    ),
    refused("prompts file: domain is a fraction", line('{"prompt": "x", "domain": 1.5}'), "prompts.jsonl:3: `domain` should be text"),
    refused("prompts file: category is a list", line('{"prompt": "x", "category": []}'), "prompts.jsonl:3: `category` should be text"),
    refused("prompts file: turns is text", line('{"turns": "x"}'), "prompts.jsonl:3: `turns` should be a list"),
    refused("prompts file: turns of numbers", line('{"turns": [5]}'), "prompts.jsonl:3: `turns` 0 should be text"),
    refused("prompts file: no turns", line('{"turns": []}'), "prompts.jsonl:3: `turns` is empty"),
    refused("prompts file: messages is text", line('{"messages": "x"}'), "prompts.jsonl:3: `messages` should be a list"),
    refused("prompts file: no messages", line('{"messages": []}'), "prompts.jsonl:3: `messages` is empty"),
    refused("prompts file: a message that is text", line('{"messages": ["x"]}'), "prompts.jsonl:3: `messages` 0 should be an object"),
    refused(
        "prompts file: a message without content",
        line('{"messages": [{"role": "user"}]}'),
        "prompts.jsonl:3: `messages` 0: `content` should be text",
    ),
    refused(
        "prompts file: a message without role",
        line('{"messages": [{"content": "x"}]}'),
        "prompts.jsonl:3: `messages` 0: `role` should be text",
    ),
    refused(
        "prompts file: role is a number",
        line('{"messages": [{"role": 5, "content": "x"}]}'),
        "prompts.jsonl:3: `messages` 0: `role` should be text",
    ),
    refused("prompts file: the same id twice", prompts(id="same"), "prompts.jsonl:2: `id` 'same' is that of line 1"),
    refused(
        "prompts file: the same id twice, by number",
        both(line('{"prompt": "x"}'), line('{"prompt": "x", "id": 4}')),
        "prompts.jsonl:4: `id` '4' is that of line 3",
    ),
    done("prompts file: longer than the context", prompts(prompt="x" * 500), "skipped, since .* 128 positions: sums 2"),
    refused(
        "prompts file: all longer than the context",
        written("prompts.jsonl", "".join(json.dumps({"prompt": "x" * size}) + "\n" for size in (500, 125))),
        "prompt '1' has 500 tokens.*none of 2 prompts does",
    ),
    done(
        "prompts file: a second turn longer than the context",
        line(json.dumps({"turns": ["x", "y" * 120, "z"], "domain": "chat"})),
        "positions: chat 2",
    ),
    refused("prompts file: a second turn that is a number", line('{"turns": ["x", 5]}'), "prompts.jsonl:3: `turns` 1 should be text"),
    refused(
        "prompts file: an id that a second turn has",
        both(line('{"id": "a#2", "prompt": "x"}'), line('{"id": "a", "turns": ["x", "y"]}')),
        "prompts.jsonl:4: `id` 'a#2' is that of line 3",
    ),
    refused(
        "prompts file: completion_prompt is a number",
        line('{"prompt": "x", "completion_prompt": 5}'),
        "prompts.jsonl:3: `completion_prompt` should be text",
    ),
    refused("prompts file: longer than any context", prompts(prompt="x" * 9_000_000), "prompts.jsonl:1: `prompt` .*characters"),
    refused(
        "prompts file: one of each domain",
        written("prompts.jsonl", '{"prompt": "x", "domain": "a"}\n{"prompt": "y", "domain": "b"}\n'),
        "one prompt of a domain is too few",
        EVAL,
    ),
    refused(
        "prompts file: gzip that is none",
        lambda folder: (folder / "p.jsonl.gz").write_text("x"),
        "p.jsonl.gz:[0-9]+: the gzip stream is cut off or damaged",
        "eval suffix --target target --prompts p.jsonl.gz",
    ),
    refused(
        "prompts file: gzip cut off",
        lambda folder: (folder / "p.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "x"}\n' * 999)[:-20]),
        "p.jsonl.gz:[0-9]+: the gzip stream is cut off or damaged",
        "eval suffix --target target --prompts p.jsonl.gz",
    ),
    refused(
        "prompts file: gzip with a changed byte",
        lambda folder: (folder / "p.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "x"}\n' * 999)[:11] + b"\xff" * 40),
        "p.jsonl.gz:[0-9]+: the gzip stream is cut off or damaged",
        "eval suffix --target target --prompts p.jsonl.gz",
    ),
    refused(
        "prompts file: gzip of 400 MB",
        lambda folder: (folder / "p.jsonl.gz").write_bytes(gzip.compress(bytes(100_000_000)) * 4),
        "p.jsonl.gz: expands to more than 200 times its size",
        "eval suffix --target target --prompts p.jsonl.gz",
    ),
    refused("prompts file: compare", prompts(id="same"), "prompts.jsonl:2: `id` 'same'", COMPARE),
    refused("prompts file: bench", prompts(id="same"), "prompts.jsonl:2: `id` 'same'", BENCH),
]
PROMPT = [
    refused("prompt: none", nothing, "prompt", GENERATE),
    refused("prompt: empty", nothing, "got no tokens", [*GENERATE, ""]),
    refused("prompt: not UTF-8", nothing, "prompt is not UTF-8", [*GENERATE, "caf\udce9"]),
    refused("prompt: longer than the context", nothing, "128", [*GENERATE, "x" * 500]),
    refused(
        "prompt: stdin is not UTF-8",
        written("p.txt", b"first\ncaf\xe9\n"),
        "stdin: not UTF-8.*line 2",
        [*GENERATE, "-"],
        inside=stdin("p.txt"),
    ),
    refused(
        "prompt: stdin is UTF-16",
        written("p.txt", "x".encode("utf-16")),
        "stdin: not UTF-8.*line 1",
        [*GENERATE, "-"],
        inside=stdin("p.txt"),
    ),
    refused("prompt: stdin is empty", nothing, "got no tokens", [*GENERATE, "-"]),
    refused("prompt: stdin has no end", nothing, "stdin: .*at most", [*GENERATE, "-"], inside=stdin("/dev/zero")),
    refused("prompt: stdin is a folder", nothing, "stdin: Is a directory", [*GENERATE, "-"], inside=stdin("medusa")),
    refused("prompt: stdin is closed", nothing, "stdin", [*GENERATE, "-"], inside=lambda: os.close(0)),
    refused("prompt: stdin was closed before", nothing, "stdin is closed", [*GENERATE, "-"], inside=without("stdin")),
    done(
        "prompt: a byte order mark on stdin",
        written("p.txt", b"\xef\xbb\xbfx"),
        r"(?s)\A(?!.*ufeff)",
        [*GENERATE, "-"],
        inside=stdin("p.txt"),
    ),
]
NUMBERS = [
    *(
        refused(f"numbers: {option} {value}", nothing, re.escape(f"{option} {value}"), f"{SUFFIX} {option}={value}")
        for option, value in (
            ("--temperature", "nan"),
            ("--temperature", "inf"),
            ("--temperature", "-1.0"),
            ("--temperature", "1e+308"),
            ("--temperature", "1e-308"),
            ("--max-new-tokens", "1000000000000"),
            ("--max-new-tokens", "-5"),
            ("--limit", "0"),
            ("--slots", "0"),
            ("--slots", "1000000000"),
            ("--depth", "0"),
            ("--depth", "65"),
            ("--nodes", "1000000000"),
            ("--width", "-1"),
        )
    ),
    *(
        refused(f"numbers: --stop confidence:{value}", nothing, f"--stop: got confidence {value}", f"{SUFFIX} --stop=confidence:{value}")
        for value in ("nan", "2")
    ),
    *(
        refused(f"numbers: generate {option} {value}", nothing, f"{option} {value}", [*GENERATE, f"{option}={value}", "x"])
        for option, value in (
            ("--temperature", "nan"),
            ("--temperature", "-inf"),
            ("--temperature", "1e-320"),
            ("--top-k", "-1"),
            ("--top-k", "1" + "0" * 30),
            ("--top-p", "0.0"),
            ("--top-p", "nan"),
            ("--top-p", "1.5"),
            ("--min-p", "-1.0"),
            ("--min-p", "nan"),
            ("--repetition-penalty", "0.0"),
            ("--repetition-penalty", "nan"),
            ("--repetition-penalty", "inf"),
            ("--seed", "-1"),
            ("--seed", str(2**64)),
            ("--max-new-tokens", "0"),
        )
    ),
    refused("numbers: --repeats 0", nothing, "--repeats 0", f"{BENCH} --repeats=0"),
    refused("numbers: words", nothing, "--limit.*'many'", f"{SUFFIX} --limit many"),
    refused("numbers: 5,000 digits", nothing, "--limit", [*SUFFIX.split(), "--limit", "9" * 5_000]),
    refused("numbers: an unknown option", nothing, "--limits", f"{SUFFIX} --limits 3"),
    refused("numbers: an option without its value", nothing, "--limit", f"{SUFFIX} --limit"),
    refused("numbers: no drafters to compare", nothing, "drafter", "compare"),
    done("numbers: temperatures that are printed the same", nothing, r"all +│ +0 ", f"{SUFFIX} --temperature=-0.0"),
]
TREES = [
    refused(
        f"trees: {name}",
        changed(f"{ARTIFACT}/config.json", tree=tree),
        f"medusa/artifact.*tree.*{says}",
        [*GENERATE, "--drafter", ARTIFACT, "x"],
    )
    for name, tree, says in (
        ("text", "chain", "should be a list or an object"),
        ("a number", 5, "should be a list or an object"),
        ("numbers", [0, 1], "rank path"),
        ("a path of text", [["0"]], "rank"),
        ("a path of fractions", [[0.5]], "rank"),
        ("a path of truth", [[True]], "rank"),
        ("an empty path", [[]], "non-empty"),
        ("a negative rank", [[-1]], "ranks >= 0"),
        ("a rank of a billion", [[10**9]], "rank"),
        ("a rank of 10 to the 30th", [[10**30]], "rank"),
        ("a path without its prefix", [[0, 0]], "prefix"),
        ("a path listed twice", [[0], [0]], "distinct"),
        ("5,000 nodes", [[rank] for rank in range(5_000)], "nodes"),
        ("4,000 deep", [[0] * depth for depth in range(1, 4_000)], "nodes|deep"),
        ("dynamic, other keys", {"depth": 2, "breadth": 2}, "depth, width and nodes"),
        ("dynamic, text", {"depth": "2", "width": 2, "nodes": 5}, "depth"),
        ("dynamic, a fraction", {"depth": 2, "width": 1.5, "nodes": 5}, "width"),
        ("dynamic, null", {"depth": 2, "width": 2, "nodes": None}, "nodes"),
        ("dynamic, a billion deep", {"depth": 10**9, "width": 2, "nodes": 5}, "depth"),
        ("dynamic, a billion wide", {"depth": 2, "width": 10**9, "nodes": 5}, "width"),
        ("dynamic, a billion nodes", {"depth": 2, "width": 2, "nodes": 10**9}, "nodes"),
        ("dynamic, below zero", {"depth": -2, "width": 2, "nodes": 5}, "depth"),
    )
]
STUDENT = [
    refused(
        f"student: {key} is {value!r:.40}",
        changed("student/artifact/config.json", **{key: value}),
        f"student/artifact.*{says}",
        [*GENERATE, "--drafter", "student/artifact", "x"],
    )
    for key, value, says in (
        ("draftsmith", "text", "`draftsmith` should be an object"),
        ("draftsmith", [], "`draftsmith` should be an object"),
        ("draftsmith.tree", "text", "tree"),
        ("draftsmith.tree", {"depth": 10**9, "width": 1, "nodes": 9}, "depth"),
        ("draftsmith.confidence", "high", "`draftsmith`: `confidence` should be a number"),
        ("draftsmith.confidence", 2, "`draftsmith`: `confidence` is 2; expected a probability"),
        ("draftsmith.confidence", float("nan"), "`confidence` is NaN; expected a number"),
        ("draftsmith.target", "target", "`draftsmith`: `target` should be an object"),
        ("draftsmith.target.name", 5, "`draftsmith`: `target`: `name` should be text"),
    )
]
SAMPLING = [
    refused(
        f"sampling: {key} {value!r} in generation_config.json",
        changed("target/generation_config.json", do_sample=True, **{key: value}),
        f"generation_config.*{key}",
        [*GENERATE, "x"],
    )
    for key, value in (
        ("temperature", "hot"),
        ("temperature", -1),
        ("top_k", "many"),
        ("top_p", [0.5]),
        ("repetition_penalty", {}),
        ("top_p", 7),
    )
]
DRAFTERS = [
    refused("drafter: none", nothing, "got no drafter", f"eval {SHORT}"),
    refused("drafter: an empty name", nothing, "drafter", ["eval", "", *SHORT.split()]),
    refused("drafter: an empty folder", lambda folder: (folder / "empty").mkdir(), "no config.json in 'empty'", f"eval empty {SHORT}"),
    refused("drafter: a file", nothing, "'text.txt' is a file", f"eval text.txt {SHORT}"),
    refused("drafter: the run instead of its artifact", nothing, "config.json", f"eval medusa {SHORT}"),
    refused("drafter: two of them", nothing, "two drafters", f"eval suffix --drafter ngram {SHORT}"),
    refused("drafter: compare with one", nothing, "one drafter", f"compare suffix --target target {SHORT}"),
    refused("drafter: of another target", changed("target/config.json", rms_norm_eps=1e-3), "target", EVAL),
    refused(
        "drafter: generate with one of another target",
        changed("target/config.json", rms_norm_eps=1e-3),
        "target",
        [*GENERATE, "--drafter", ARTIFACT, "x"],
    ),
    done("drafter: without a model card", lambda folder: (folder / ARTIFACT / "README.md").unlink(), "Written to", EVAL, writes=WRITTEN),
    refused(
        "drafter: a target without a tokenizer",
        lambda folder: [file.unlink() for file in (folder / "target").glob("tokenizer*")],
        "no tokenizer",
        SUFFIX,
    ),
]
MEASURED_BEFORE = [
    refused(
        "measured: a folder without measurements", nothing, "no records.jsonl in 'target'", "compare --measured target medusa/artifact"
    ),
    refused(
        "measured: an empty file",
        written("a/records.jsonl", ""),
        "a/records.jsonl is empty",
        "compare --measured a b",
    ),
    refused(
        "measured: an unfinished evaluation",
        written("a/records.part.jsonl", HEADER),
        "no records.jsonl in 'a'; its evaluation is unfinished",
        "compare --measured a b",
    ),
    refused(
        "measured: a header alone",
        written("a/records.jsonl", HEADER),
        "a/records.jsonl has no line of kind tree",
        "compare --measured a b",
    ),
    refused(
        "measured: a line that is no record",
        written("a/records.jsonl", HEADER + '{"committed": 2}\n'),
        "a/records.jsonl:2: not a line that draftsmith eval wrote",
        "compare --measured a b",
    ),
    refused(
        "measured: a file that is cut off",
        written("a/records.jsonl", HEADER.replace('"lines": 1', '"lines": 7')),
        "a/records.jsonl has 1 of 7 lines; it is cut off",
        "compare --measured a b",
    ),
    refused(
        "measured: a request without its rounds",
        written("a/records.jsonl", HEADER.replace('"lines": 1', '"lines": 2') + '{"kind": "request", "prompt": "p"}\n'),
        "a/records.jsonl:2: `rounds` should be a list",
        "compare --measured a b",
    ),
    refused(
        "measured: a target that is a list",
        written("a/records.jsonl", HEADER.replace('{"name": "t"}', "[]")),
        "`target` should be an object",
        "compare --measured a b",
    ),
    refused("measured: with --prompts", nothing, "--measured takes", "compare --measured a b --prompts prompts.jsonl"),
    refused("measured: --timed 0", nothing, "--timed 0: expected 1 to", f"{SUFFIX} --timed 0"),
]
HOME = [
    done(
        "home: --prompts",
        nothing,
        "sums",
        "eval suffix --target target --prompts ~/prompts.jsonl --max-new-tokens 4 --probe 0",
        inside=at_home,
    ),
    done("home: --target", nothing, "sums", f"eval suffix --target ~/target {SHORT} --probe 0", inside=at_home),
    done(
        "home: the drafter",
        nothing,
        "Written to ",
        f"eval ~/medusa/artifact {SHORT} --probe 0",
        writes=(*WRITTEN, ".cache/*"),
        inside=at_home,
    ),
    done("home: --drafter of generate", nothing, r"\w", [*GENERATE, "--drafter", "~/medusa/artifact", "x"], inside=at_home),
    done("home: --out", nothing, "Written to ", f"{SUFFIX} --out ~/out", writes=("out/*", ".cache/*"), inside=at_home),
    done("home: --out of bench", nothing, "prompts", f"{BENCH} --out ~/speed.json", writes=("speed.json",), inside=at_home),
    refused("home: of nobody", nothing, "~nobody-here/p.jsonl' not found", "eval suffix --target target --prompts ~nobody-here/p.jsonl"),
]
CASES = [
    *LINKS,
    *FOREIGN,
    *TERMINAL,
    *OUTPUT,
    *PROMPTS_FILE,
    *PROMPT,
    *NUMBERS,
    *TREES,
    *STUDENT,
    *SAMPLING,
    *DRAFTERS,
    *MEASURED_BEFORE,
    *HOME,
]
