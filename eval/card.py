"""The model card of an artifact. What an evaluation writes into it is between two marks; the rest may be edited by hand."""

from pathlib import Path
from typing import Any

from draftsmith.eval import drift, table
from draftsmith.eval.answers import skipped_line
from draftsmith.eval.report import Report
from draftsmith.inference import durable
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.reading import read_json
from draftsmith.inference.terminal import printable
from draftsmith.models.target import SHIPPED

BEGIN, END = "<!-- draftsmith eval: begin -->", "<!-- draftsmith eval: end -->"
SNIPPET = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer, target = AutoTokenizer.from_pretrained("{0}"), AutoModelForCausalLM.from_pretrained("{0}")
draft = AutoModelForCausalLM.from_pretrained("<this folder>")
prompt = tokenizer("def parse_", return_tensors="pt")
print(tokenizer.decode(target.generate(**prompt, assistant_model=draft, max_new_tokens=100)[0]))
```"""

ADAPTED_SNIPPET = """```python
from peft import PeftModel
from transformers import AutoModelForCausalLM
target = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{0}"), "<this folder>", subfolder="adapter")
```"""
_OWN = "them: the output is the target's own."
_ADAPTED = f"""them with the LoRA adapters in the folder `adapter`, which were trained along with these heads. The output is that of the adapted model:
{drift.ADAPTED}. An evaluation measures how far that is from `{{name}}` itself."""


def write(folder: Path, method: str, target: dict[str, Any] | None, training: dict[str, Any] | None, measured: str = "") -> None:
    """Write the model card, README.md.

    Args:
        folder: of the artifact.
        method: of the drafter. A draft model is a model of transformers too, and its card says how to use it there.
        target: a `TargetIdentity` as a dict.
        training: what the config says of the training: steps, tokens, positions.
        measured: the text of `measured`; without one the card says that nothing is measured yet.
    """
    target, training, draft_model = target or {}, training or {}, method == DraftModel.method
    adapted = bool(target.get("adapter_hash"))
    name = printable(str(target.get("name", "")), keep="")
    steps, tokens, positions = (training.get(key) for key in ("steps", "tokens", "positions"))
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
        f"{_ADAPTED.format(name=name) if adapted else _OWN} It was trained with Draftsmith; `recipe.yaml` and `run.json` beside this file say how.",
        "",
        f"Trained for {steps or '?'} steps, {f'{tokens:,}' if isinstance(tokens, int) else '?'} tokens, on sequences of up to "
        f"{positions or '?'} positions.",
        "",
        "## Acceptance",
        "",
        BEGIN,
        measured or "Not measured yet: `draftsmith eval <this folder>` writes the table here.",
        END,
        "",
        "## Use",
        "",
        "```",
        f'draftsmith generate --target {name} --drafter <this folder> "..."',
        "```",
    ]
    path = f"models/{SHIPPED[name].name}" if name in SHIPPED else name
    if adapted:
        lines += ["", "The adapted target in transformers, by itself:", "", ADAPTED_SNIPPET.format(path)]
    if draft_model:
        lines += ["", SNIPPET.format(path)]
    durable.write_text(folder / "README.md", "\n".join(lines) + "\n")


def is_marked(folder: Path) -> bool:
    """Whether an evaluation may write into the folder's model card: it has the marks, or there is none yet."""
    card = folder / "README.md"
    return not card.exists() or _parts(card) is not None


def write_acceptance(folder: Path, method: str, measured: str) -> None:
    """Write the text of `measured` between the marks of the model card; a card without marks stays as it is, a missing one is written.

    Raises:
        ValueError: config.json is no JSON object.
        OSError: the card cannot be written.
    """
    card = folder / "README.md"
    if not card.exists():
        config = read_json(folder / "config.json")
        entry = config.get("draftsmith", config)
        write(folder, method, entry.get("target"), entry.get("training"), measured)
    elif parts := _parts(card):
        durable.write_text(card, f"\n{BEGIN}\n".join((parts[0], measured)) + f"\n{END}\n{parts[1]}")


def _parts(card: Path) -> tuple[str, str] | None:
    """The texts before and after the marks; None without them."""
    try:
        text = card.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
    before, begin, rest = text.partition(f"\n{BEGIN}\n")
    _, end, after = rest.partition(f"\n{END}\n")
    return (before, after) if begin and end else None


def measured(report: Report, details: str) -> str:
    """The measured acceptance of a card. details: more tables, see `page.markdown`."""
    settings = report.settings
    lines = [
        f"{settings['prompts']} held-out prompts, {settings['max_new_tokens']} new tokens each, {settings['dtype']}, {table.size(report)}. "
        "τ is the number of tokens that a round commits on average, the target's own token included. The intervals are over prompts.",
        "",
        table.markdown(report),
        "",
        *((table.speed_markdown(report), "") if report.speedups else ()),
        *(f"- {line}" for line in table.speed(report)),
        f"- {table.precision(report)}.",
        f"- {table.lossless(report)}.",
        *(f"- {line}." for line in drift.lines(report.drift)),
        *(f"- {printable(warning, keep='')}." for warning in report.warnings),
        *([f"- {skipped_line(report.skipped, settings['positions'])}."] if report.skipped else []),
        f"- Distinct 8-grams in the answers at T={report.first_setting}: {report.distinct:.0%}.",
        "",
        "![survival by depth](survival.png)",
        "",
        details.strip(),
    ]
    return "\n".join(lines)
