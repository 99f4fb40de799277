"""The model card of an artifact: front matter that the Hub reads, and sections for people.

What an evaluation writes into it is between two marks and in the front matter; the rest may be edited by hand, and stays.
"""

import re
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData

from draftsmith.eval import drift, load_report, quality, table
from draftsmith.eval.answers import skipped_line
from draftsmith.eval.output import literal
from draftsmith.eval.report import Report
from draftsmith.inference import durable
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.reading import read_json
from draftsmith.inference.terminal import printable
from draftsmith.models.formats.note import without_serve
from draftsmith.models.model_files import folder_at_hand, path_for_engines

BEGIN, END = "<!-- draftsmith eval: begin -->", "<!-- draftsmith eval: end -->"
FOLDER = "<this folder>"  # stands for the artifact in commands, until it is published
NOT_MEASURED = f"Not measured yet: `draftsmith eval {FOLDER}` writes the table here."
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
LICENCE = ("license", "license_name", "license_link")  # of a front matter
METRIC = "tokens_per_round"
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
_LIMITS = """- It drafts for the target above. Another config or tokenizer is an error; a fine-tune of the same target works with a warning, and fewer
  drafts are accepted.
- Acceptance depends on the prompts: text unlike the training data is drafted worse. Speed-ups hold for the device, the engine and the load
  that they were measured or predicted for; at large batches drafting may not pay.
- What the target says wrongly is said wrongly with drafts too, only sooner."""
_LIMIT_OF_HEADS = "- It generates nothing without its target."
_LIMIT_OF_MODELS = "- It is small, and trained to agree with its target: its own text, without one, is not meant to be read."


def write(
    folder: Path,
    method: str,
    target: dict[str, Any] | None,
    training: dict[str, Any] | None,
    licence: dict[str, str] | None = None,
) -> None:
    """Write the model card, README.md.

    Args:
        folder: of the artifact.
        method: of the drafter. A draft model is a model of transformers too, and its card says how to use it there.
        target: a `TargetIdentity` as a dict.
        training: what the config says of the training: steps, tokens, positions, data; or where an imported drafter came from.
        licence: fields of its front matter, of an imported drafter.
    """
    target, training, draft_model = target or {}, training or {}, method == DraftModel.method
    name = _name(target)
    lines = [f"# {'Draft model' if draft_model else f'{method} drafter'} for {name or 'a target'}"]
    for heading, text in sections(method, target, training).items():
        lines += ["", f"## {heading}", "", text] if heading else ["", text]
    durable.write_text(
        folder / "README.md", _joined(front_matter(method, target, training) | (licence or {}), "\n" + "\n".join(lines) + "\n")
    )


def front_matter(method: str, target: dict[str, Any], training: dict[str, Any]) -> dict[str, Any]:
    """What the Hub reads: library, tags, task, target, data sets of the Hub, and the target's licence where a copy of its card is at hand and
    the drafter was trained here.

    A head is of use with its target alone, which of the Hub's relations is `adapter`; a draft model has none of them to its target, and
    without any the Hub would call a head a fine-tune.
    """
    name, draft_model = _name(target), method == DraftModel.method
    base = name if HUB_ID.fullmatch(name) and not Path(name).exists() else None
    data = [source["path"] for source in training.get("data") or () if source.get("hub")]
    fields = ModelCardData(
        base_model=base,
        library_name="transformers" if draft_model else "draftsmith",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "draftsmith", "draft-model" if draft_model else method],
        datasets=data or None,
    ).to_dict()
    if base and not draft_model:
        fields["base_model_relation"] = "adapter"
    return fields if training.get("imported") else fields | licence_of_target(name)


def licence_of_target(name: str) -> dict[str, str]:
    """The licence that a target's own card states: of a folder, or of a card in the Hub's cache; {} where none is at hand. Asks no network."""
    folder = folder_at_hand(name)
    return licence_in(folder / "README.md") if folder else {}


def licence_in(card: Path) -> dict[str, str]:
    """The licence that a card states; {} where there is no card, or no licence in it."""
    if not card.is_file():
        return {}
    fields, _ = split(card.read_text(encoding="utf-8", errors="replace"))
    return {key: str(fields[key]) for key in LICENCE if fields and fields.get(key)}


def sections(method: str, target: dict[str, Any], training: dict[str, Any]) -> dict[str, str]:
    """The text of each section by its heading, in order; "" is the heading of the first. Arguments as in `write`."""
    name, adapted, draft_model = _name(target), bool(target.get("adapter_hash")), method == DraftModel.method
    first = (
        f"This model drafts tokens for `{name}` (revision `{target.get('revision') or 'local'}`, {target.get('dtype')}), which verifies\n"
        f"{_ADAPTED.format(name=name) if adapted else _OWN} {_origin(training)}"
    )
    use = ["```", f'draftsmith generate --target {name} --drafter {FOLDER} "..."', "```"]
    path = path_for_engines(name)
    if adapted:
        use += ["", "The adapted target in transformers, by itself:", "", ADAPTED_SNIPPET.format(path)]
    if draft_model:
        use += ["", SNIPPET.format(path)]
    return {
        "": first,
        "Target": _target_table(target),
        "Training": _training(training),
        "Acceptance": "\n".join((BEGIN, NOT_MEASURED, END)),
        "Limits": "\n".join((_LIMITS, _LIMIT_OF_MODELS if draft_model else _LIMIT_OF_HEADS)),
        "Use": "\n".join(use),
    }


def _origin(training: dict[str, Any]) -> str:
    if imported := training.get("imported"):
        return f"Its authors trained it; Draftsmith took it in from `{printable(str(imported), keep='')}`."
    return "It was trained with Draftsmith; `recipe.yaml` and `run.json` beside this file say how."


def _target_table(target: dict[str, Any]) -> str:
    """The identity of the target, by which a drafter knows it again."""
    names = {"name": "name", "revision": "revision", "dtype": "dtype"}
    names |= {f"{part}_hash": f"SHA-256 of its {part}" for part in ("config", "tokenizer", "weights", "adapter")}
    rows = [f"| {title} | `{printable(str(target[key]), keep='')}` |" for key, title in names.items() if target.get(key)]
    return "\n".join(("| | |", "|---|---|", *rows)) if rows else "Not recorded."


def _training(training: dict[str, Any]) -> str:
    steps, tokens, positions = (training.get(key) for key in ("steps", "tokens", "positions"))
    if training.get("imported") and not steps:
        return "Not recorded here: see its authors' card."
    lines = [
        f"Trained for {steps or '?'} steps, {f'{tokens:,}' if isinstance(tokens, int) else '?'} tokens, on sequences of up to "
        f"{positions or '?'} positions."
    ]
    if sources := training.get("data"):
        lines += ["", "| data | SHA-256 | licence |", "|---|---|---|"]
        for source in sources:
            cells = (
                f"`{source.get('path')}`",
                f"`{source['sha256']}`" if source.get("sha256") else "–",
                source.get("licence") or "not recorded",
            )
            lines.append("| " + " | ".join(printable(cell, keep="").replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _name(target: dict[str, Any]) -> str:
    return printable(str(target.get("name", "")), keep="")


def split(text: str) -> tuple[dict[str, Any] | None, str]:
    """The front matter of a card and the text after it. {} without a front matter; None where it is no YAML object, with the complete text."""
    match = re.match(r"---[ \t]*\r?\n(?:(.*?)\r?\n)?---[ \t]*(?:\r?\n|\Z)", text, re.S)
    if match is None:
        return {}, text
    try:
        fields = yaml.safe_load(match[1] or "") or {}
    except (yaml.YAMLError, ValueError, RecursionError):
        return None, text
    return (fields, text[match.end() :]) if isinstance(fields, dict) else (None, text)


def _joined(fields: dict[str, Any], text: str) -> str:
    return f"---\n{yaml.safe_dump(fields, sort_keys=False, allow_unicode=True, width=1000)}---\n{text}"


def is_marked(folder: Path) -> bool:
    """Whether an evaluation may write into the folder's model card: it has the marks, or there is none yet."""
    card = folder / "README.md"
    return not card.exists() or _parts(card) is not None


def write_acceptance(folder: Path, method: str, measured: str, results: dict[str, Any] | None = None) -> None:
    """Write the text of `measured` between the marks of the model card, and `results` into its front matter.

    A card without marks stays as it is, a missing one is written.

    Raises:
        ValueError: config.json is no JSON object.
        OSError: the card cannot be written.
    """
    card = folder / "README.md"
    if not card.exists():
        config = read_json(folder / "config.json")
        entry = config.get("draftsmith", config)
        write(folder, method, entry.get("target"), entry.get("training"))
    if parts := _parts(card):
        fields, before = split(parts[0])
        before = _joined(fields | results, before) if fields and results else parts[0]
        durable.write_text(card, f"\n{BEGIN}\n".join((before, measured)) + f"\n{END}\n{parts[1]}")


def _parts(card: Path) -> tuple[str, str] | None:
    """The texts before and after the marks; None without them."""
    try:
        text = card.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
    before, begin, rest = text.partition(f"\n{BEGIN}\n")
    _, end, after = rest.partition(f"\n{END}\n")
    return (before, after) if begin and end else None


def results(content: dict[str, Any]) -> dict[str, Any]:
    """The entry `model-index` of a front matter: τ by domain and setting, and the measured speedup; {} where nothing was measured.

    Args:
        content: of a report, as acceptance.json has it.
    """
    rows = []
    lossy, machine = content.get("lossy") or {}, (content.get("machine") or {}).get("device") or "an unknown device"
    for setting, domains in (content.get("domains") or {}).items():
        for domain, row in (domains | {"all": content["overall"][setting]}).items():
            name = f"τ, tokens per round, at T={setting}{' LOSSY' if setting in lossy else ''}"
            bounds = {key: round(row[key], 4) for key in ("low", "high") if row.get(key) is not None}
            more = {**bounds, "prompts": row["prompts"], "rounds": row["rounds"]} | _cost((content.get("quality") or {}).get(setting))
            rows.append(_result(domain, METRIC, name, round(row["tau"], 4), more))
    speed = content.get("speed") or {}
    if speed.get("speedup") is not None:
        name = f"measured speedup over plain decoding on {machine}, batch {content['settings']['slots']}"
        rows.append(_result("all", "speedup", printable(name, keep=""), round(speed["speedup"], 4), {}))
    if not rows:
        return {}
    name = f"{content['method']} for {_name(content['target'])}"
    return {"model-index": ModelCardData(model_name=name, eval_results=rows).to_dict()["model-index"]}


def _cost(quality: dict[str, Any] | None) -> dict[str, float]:
    """What stands beside τ of a lossy rule: over all prompts, whatever the domain."""
    accuracy = (quality or {}).get("accuracy") or {}
    values = {key: (quality or {}).get(key) for key in ("kl", "log_prob", "plain_log_prob")}
    values |= {"accuracy": accuracy.get("drafted"), "plain_accuracy": accuracy.get("plain")}
    return {key: round(value, 4) for key, value in values.items() if value is not None}


def _result(domain: str, kind: str, name: str, value: float, more: dict[str, Any]) -> EvalResult:
    return EvalResult(
        task_type="text-generation",
        dataset_type="held-out-prompts",
        dataset_name=f"held-out prompts, {printable(domain, keep='')}",
        dataset_config=printable(domain, keep=""),
        metric_type=kind,
        metric_name=name,
        metric_value=value,
        metric_args=more or None,
    )


def published(text: str, config: dict[str, Any], method: str, content: dict[str, Any] | None, repo: str, serve: str) -> str:
    """The card as it is published: complete, and with the name of its repository.

    What a person wrote into the front matter or into a section stays; what an earlier version of Draftsmith left out is added.

    Args:
        text: of the artifact's card.
        config: the entry of config.json that has `target` and `training`.
        method: of the drafter.
        content: of acceptance.json, None without one.
        repo: USER/NAME.
        serve: the text of the section on serving engines.

    Raises:
        ValueError: a front matter that is no YAML object.
    """
    fields, body = split(text)
    if fields is None:
        raise ValueError("README.md: the lines between --- are no YAML object; correct them")
    target, training = config.get("target") or {}, config.get("training") or {}
    own = front_matter(method, target, training)
    tags = list(dict.fromkeys([*(fields.get("tags") or ()), *own["tags"]]))
    fields = own | fields | {"tags": tags} | (results(content) if content else {})
    if not content:  # what stands there is of an evaluation that is gone
        fields.pop("model-index", None)
        body = re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", f"{BEGIN}\n{NOT_MEASURED}\n{END}", body, flags=re.S)
    for heading, section in sections(method, target, training).items():
        if heading and f"\n## {heading}\n" not in body:
            body = f"{body.rstrip()}\n\n## {heading}\n\n{section}\n"
    return _joined(fields, f"{without_serve(body).rstrip()}\n\n## Serve\n\n{serve}\n".replace(FOLDER, repo))


def measured(report: Report, details: str) -> str:
    """The measured acceptance of a card. details: more tables, see `page.markdown`."""
    settings = report.settings
    device = str(report.machine.get("device") or "")
    predictions = [*load_report.lines(report.load), *load_report.estimate_lines(report.estimates)]
    lines = [
        f"{report.overall[report.first_setting].prompts} held-out prompts, {settings['max_new_tokens']} new tokens each, {settings['dtype']}, {table.size(report)}. "
        "τ is the number of tokens that a round commits on average, the target's own token included. The intervals are over prompts.",
        "",
        table.markdown(report),
        "",
        *((table.speed_markdown(report), "") if report.speedups else ()),
        *([f"- Measured on {literal(device)}; predictions are for it too, where they name no other device."] if device else []),
        *(f"- {line}" for line in (*table.speed(report), *predictions)),
        f"- {table.precision(report)}.",
        f"- {table.lossless(report)}.",
        *(f"- {line}." for line in quality.lines(report.quality, report.lossy)),
        *(f"- {line}." for line in drift.lines(report.drift)),
        *(f"- {literal(warning)}." for warning in report.warnings),
        *([f"- {literal(skipped_line(report.skipped, settings['positions']))}."] if report.skipped else []),
        f"- Distinct 8-grams in the answers at T={report.first_setting}: {report.distinct:.0%}.",
        "",
        "![survival by depth](survival.png)",
        "",
        details.strip(),
    ]
    return "\n".join(lines)
