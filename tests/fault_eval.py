"""Evaluations that are killed at random and given again: the same records as of one that nothing stopped."""

import json
import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from conftest import save_byte_target
from fault_forks import Row, Run

from draftsmith.eval import acceptance

WORDS = "ngram --target target --prompts prompts.jsonl --max-new-tokens 16 --timed 1 --dtype float32 --probe 0 --out"


def evaluation(folder: Path, out: str, rank: int) -> None:
    target, prompts = folder / "target", folder / "prompts.jsonl"
    words = [str({"target": target, "prompts.jsonl": prompts}.get(word, word)) for word in WORDS.split()]
    acceptance.main([*words, str(folder / out)])


def untimed(out: Path) -> list[dict]:
    """The lines of the records without seconds."""
    lines = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    for line in lines:
        for name in ("seconds", "prefill_s", "plain_verify_s", "plain_other_s", "forward", "drafting"):
            line.pop(name, None)
        if line["kind"] == "request":
            line["rounds"] = [each[:3] for each in line["rounds"]]
    return lines


def killed_at_random(folder: Path, trials: int = 20) -> Iterator[Row]:
    """kill -9 at a time drawn uniformly over an evaluation, up to three times in a row."""
    draw = random.Random(3)
    row = Row("kill -9 at random, an evaluation")
    save_byte_target(folder / "target")
    rows = [{"prompt": f"{domain} {n} and {domain} {n} and", "domain": domain, "id": f"{domain}{n}"} for domain in "abc" for n in range(40)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    undisturbed = Run(partial(evaluation, folder, "undisturbed"), folder / "run").end()
    assert undisturbed.codes == [0], undisturbed.err
    expected = untimed(folder / "undisturbed")
    assert sum(line["kind"] == "request" for line in expected) == 2 * len(rows)
    for number in range(trials):
        waits, out = [draw.uniform(0, undisturbed.seconds) for _ in range(draw.randint(1, 3))], f"out-{number}"
        recorded = []
        for wait in waits:
            going = Run(partial(evaluation, folder, out), folder / "run")
            time.sleep(wait)
            going.kill(0)
            going.end()
            part = folder / out / "records.part.jsonl"
            recorded.append(part.read_bytes().count(b'"kind": "request"') if part.is_file() else 0)
        again = Run(partial(evaluation, folder, out), folder / "run").end()
        row.trial(
            f"killed after {', '.join(f'{wait:.2f} s' for wait in waits)}",
            gone_on=again.codes == [0],
            nothing_lost=recorded == sorted(recorded) or (folder / out / "records.jsonl").is_file(),
            the_same_records=again.codes == [0] and untimed(folder / out) == expected,
        )
    yield row
