"""The model card of an artifact: what it is for, how it was trained, and the acceptance that was measured."""

from pathlib import Path
from typing import Any

from draftsmith.eval import table
from draftsmith.eval.records import Report
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
    """Write README.md: a drafter of `method` for `target`, a `TargetIdentity` as a dict, and what its config notes of its training
    (steps, tokens, positions). Without a report it says that nothing was measured yet. A draft model is one for transformers too."""
    target, training, alone = target or {}, training or {}, method == DraftModel.method
    name = target.get("name", "")
    library, tag = ("transformers", "draft-model") if alone else ("draftsmith", method)
    front = ["---", f"library_name: {library}", f"tags: [speculative-decoding, draftsmith, {tag}]"]
    if "/" in name and not Path(name).exists():
        front.append(f"base_model: {name}")
    lines = [
        *front,
        "---",
        "",
        f"# {'Draft model' if alone else f'{method} drafter'} for {name or 'a target'}",
        "",
        f"Drafts tokens for `{name}` (revision `{target.get('revision') or 'local'}`, {target.get('dtype')}); the target verifies them, so that the",
        "output is the target's own. Made with Draftsmith; `recipe.yaml` and `run.json` beside this file say how.",
        "",
        f"Trained for {training.get('steps', '?')} steps, {training.get('tokens', 0):,} tokens, on sequences of up to {training.get('positions', '?')} positions.",
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
    if alone:
        lines += ["", SNIPPET.format(f"models/{SHIPPED[name].name}" if name in SHIPPED else name)]
    (folder / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _measured(report: Report) -> list[str]:
    settings = report.settings
    return [
        f"{settings['prompts']} held-out prompts, {settings['max_new_tokens']} new tokens each, {settings['dtype']}, {table.size(report)}. "
        "τ counts the tokens that a round commits, the bonus token in. Intervals are over prompts.",
        "",
        table.markdown(report),
        "",
        *(f"- {line}" for line in table.speed(report)),
        f"- {table.lossless(report)}.",
        f"- Distinct 8-grams in the answers at T={next(iter(report.overall))}: {report.distinct:.0%}.",
        "",
        "![survival by depth](survival.png)",
    ]
