"""Calls of commands in tests: the one line of an error, and the metrics that a run wrote."""

import json
from pathlib import Path

import pytest

from draftsmith.inference.errors import exit_on_error


def failing(capsys, main, words):
    """Run `main`, which must exit with 2 and one line on stderr; that line."""
    with pytest.raises(SystemExit) as exit:
        exit_on_error(main, [str(word) for word in words])
    assert exit.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    return lines[0]


ROOT = Path(__file__).resolve().parents[1]


def short(target: Path | str, folder: Path, output: Path, *more: str) -> list[str]:
    """The command line of a short run of Medusa; its data are in `folder`."""
    text, prompts = folder / "text.txt", folder / "prompts.jsonl"
    if not text.exists():
        text.write_text("<|endoftext|>".join("for line in lines:\n    yield line.strip()\n" * 4 for _ in range(40)))
        prompts.write_text(json.dumps({"prompt": "for line in", "domain": "d"}) + "\n")
    data = [
        f"target.path={target}",
        "target.dtype=float32",
        f"data.train={text}",
        f"data.cache={folder}",
        "data.near_duplicate=1.0",
        "data.seq_len=32",
    ]
    train = [
        "train.steps=3",
        "train.batch_size=4",
        "train.eval_batches=3",
        "train.log_every=1",
        "train.precision=fp32",
        "train.warmup_steps=1",
    ]
    return [str(ROOT / "recipes" / "medusa-tiny.yaml"), *data, *train, f"train.output={output}", f"train.tau_file={prompts}", *more]


def metrics(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
