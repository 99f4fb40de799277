"""The model card of an artifact: what it is for, how it was trained, and the acceptance that was measured."""

from pathlib import Path

from draftsmith.eval import table
from draftsmith.eval.records import Report
from draftsmith.models.drafter import DrafterConfig


def write(folder: Path, config: DrafterConfig, report: Report | None) -> None:
    """Write README.md; without a report it says that nothing was measured yet."""
    target = config.target or {}
    name = target.get("name", "")
    front = ["---", "library_name: draftsmith", "tags: [speculative-decoding, draftsmith, " + config.model_type + "]"]
    if "/" in name and not Path(name).exists():
        front.append(f"base_model: {name}")
    training = config.training or {}
    lines = [
        *front,
        "---",
        "",
        f"# {config.model_type} drafter for {name or 'a target'}",
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
