"""The model card of an artifact, and the measurements beside it."""

import json
from pathlib import Path
from typing import Any

from draftsmith.eval import plot, table
from draftsmith.eval.records import PositionRecord, Report, RoundRecord, as_json, write_positions, write_rounds
from draftsmith.inference import durable
from draftsmith.inference.draft_model import DraftModel
from draftsmith.models.target import SHIPPED

SNIPPET = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer, target = AutoTokenizer.from_pretrained("{0}"), AutoModelForCausalLM.from_pretrained("{0}")
draft = AutoModelForCausalLM.from_pretrained("<this folder>")
prompt = tokenizer("def parse_", return_tensors="pt")
print(tokenizer.decode(target.generate(**prompt, assistant_model=draft, max_new_tokens=100)[0]))
```"""


def write(folder: Path, method: str, target: dict[str, Any] | None, training: dict[str, Any] | None, report: Report | None) -> None:
    """Write the model card, README.md.

    Args:
        folder: of the artifact.
        method: of the drafter. A draft model is a model of transformers too, and its card says how to use it there.
        target: a `TargetIdentity` as a dict.
        training: what the config says of the training: steps, tokens, positions.
        report: the measured acceptance; without one the card says that nothing is measured yet.
    """
    target, training, draft_model = target or {}, training or {}, method == DraftModel.method
    name = target.get("name", "")
    library, tag = ("transformers", "draft-model") if draft_model else ("draftsmith", method)
    front = ["---", f"library_name: {library}", f"tags: [speculative-decoding, draftsmith, {tag}]"]
    if "/" in name and not Path(name).exists():
        front.append(f"base_model: {name}")
    lines = [
        *front,
        "---",
        "",
        f"# {'Draft model' if draft_model else f'{method} drafter'} for {name or 'a target'}",
        "",
        f"This model drafts tokens for `{name}` (revision `{target.get('revision') or 'local'}`, {target.get('dtype')}), which verifies",
        "them: the output is the target's own. It was trained with Draftsmith; `recipe.yaml` and `run.json` beside this file say how.",
        "",
        f"Trained for {training.get('steps', '?')} steps, {training.get('tokens', 0):,} tokens, on sequences of up to "
        f"{training.get('positions', '?')} positions.",
        "",
        "## Acceptance",
        "",
        *(_measured(report) if report else ["Not measured yet: `draftsmith eval <this folder>` writes the table here."]),
        "",
        "## Use",
        "",
        "```",
        f'draftsmith generate --target {name} --drafter <this folder> "..."',
        "```",
    ]
    if draft_model:
        lines += ["", SNIPPET.format(f"models/{SHIPPED[name].name}" if name in SHIPPED else name)]
    durable.write_text(folder / "README.md", "\n".join(lines) + "\n")


def write_measurements(folder: Path, report: Report, rounds: list[RoundRecord], records: list[PositionRecord]) -> None:
    """Write the measured acceptance and the chosen tree into an artifact. The rest of its config stays as it is."""
    config = json.loads((folder / "config.json").read_text())
    entry = config.get("draftsmith", config)  # a distilled draft model has an entry in the config of its architecture
    entry["tree"] = report.tree
    durable.write_text(folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
    write_rounds(folder / "rounds.jsonl", rounds)
    write_positions(folder / "positions.jsonl", records)
    durable.write_text(folder / "acceptance.json", as_json(report) + "\n")
    plot.survival(report, folder / "survival.png")
    write(folder, report.method, entry.get("target"), entry.get("training"), report)


def _measured(report: Report) -> list[str]:
    settings = report.settings
    return [
        f"{settings['prompts']} held-out prompts, {settings['max_new_tokens']} new tokens each, {settings['dtype']}, {table.size(report)}. "
        "τ is the number of tokens that a round commits on average, the target's own token included. The intervals are over prompts.",
        "",
        table.markdown(report),
        "",
        *(f"- {line}" for line in table.speed(report)),
        f"- {table.lossless(report)}.",
        f"- Distinct 8-grams in the answers at T={report.first_temperature}: {report.distinct:.0%}.",
        "",
        "![survival by depth](survival.png)",
    ]
