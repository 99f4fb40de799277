"""Publish a trained drafter on the Hugging Face Hub, with the acceptance that was measured on its model card.

draftsmith publish runs/eagle3/artifact someone/llama-3.1-8b-eagle3 --dry-run
draftsmith publish runs/eagle3/artifact someone/llama-3.1-8b-eagle3 --formats vllm,sglang --private

The folder that is sent is written first (--output), and a dry run ends there: it asks no network. A run that was cut off goes on when the same
command is given again: what arrived is not sent twice. Texts of prompts and answers stay here unless --records sends them.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

from draftsmith.eval import options
from draftsmith.train.exchange.export import ENGINES

MARK = ".draftsmith-publish"  # in the folder that is sent; hidden files are not


class Prepared(NamedTuple):
    """The folder that is sent: its files, what of the artifact stays, and what to know of it."""

    folder: Path
    files: list[str]
    left: list[tuple[str, str]]
    notes: list[str]


def parser() -> argparse.ArgumentParser:
    parser = options.new_parser("publish", __doc__)
    parser.add_argument("artifact", help="folder of a trained drafter or draft model, measured by draftsmith eval")
    parser.add_argument("repository", metavar="USER/NAME", help="on the Hub; it is created where it is not there")
    parser.add_argument("--private", action="store_true", help="create it private")
    parser.add_argument("--dry-run", action="store_true", help="write the folder, print what would be sent, and ask no network")
    parser.add_argument("--output", help="the folder that is sent: new, empty, or an earlier one (default: beside the artifact)")
    parser.add_argument(
        "--formats", metavar="ENGINES", help=f"export for these too, into engines/: {', '.join(ENGINES)}; separated by commas"
    )
    parser.add_argument(
        "--records", action="store_true", help="send records.jsonl and report.html, which hold texts of prompts and answers"
    )
    parser.add_argument("--without-evaluation", action="store_true", help="publish a drafter that was not measured")
    return parser


def main(arguments: list[str]) -> None:
    chosen: Any = parser().parse_args(arguments)
    engines = _engines(chosen.formats)
    if chosen.dry_run:
        os.environ["HF_HUB_OFFLINE"] = "1"  # before the client of the Hub is imported

    from draftsmith.train.exchange import hub
    from draftsmith.train.exchange.contents import is_ours

    hub.check_name(chosen.repository)
    artifact = Path(os.path.expanduser(chosen.artifact)).absolute()
    output = Path(os.path.expanduser(chosen.output)).absolute() if chosen.output else artifact.with_name(f"{artifact.name}-published")
    prepared = prepare(artifact, output, chosen.repository, engines, chosen.records, chosen.without_evaluation)
    for line in table(prepared, f"{hub.address(chosen.repository)}{' (private)' if chosen.private else ''}"):
        print(line)
    if chosen.dry_run:
        print(f"a dry run: nothing was sent; {prepared.folder} is what would be")
        return
    sent = hub.send(
        prepared.folder, prepared.files, chosen.repository, chosen.private, is_ours, lambda line: print(line, file=sys.stderr, flush=True)
    )
    for path in sent.deleted:
        print(f"deleted there, being of an earlier publication: {path}")
    print(f"{sent.address}: {'published' if sent.changed else 'all of it was there already'}")


def _engines(text: str | None) -> list[str]:
    """The engines that --formats names. Raises ValueError for unknown ones."""
    engines = list(dict.fromkeys(word.strip() for word in (text or "").split(",") if word.strip()))
    if unknown := [word for word in engines if word not in ENGINES]:
        raise ValueError(f"--formats {unknown[0]}: no such engine; expected some of {', '.join(ENGINES)}, separated by commas")
    return engines


def prepare(artifact: Path, output: Path, repo: str, engines: list[str], texts: bool, without_evaluation: bool) -> Prepared:
    """Write the folder that is sent: files of the artifact, a complete model card, and exports.

    Args:
        artifact: its folder, which stays as it is.
        output: new, empty, or written by an earlier call.
        repo: USER/NAME, which stands in the card.
        engines: keys of `ENGINES` to export for.
        texts: send files with texts of prompts and answers.
        without_evaluation: accept an artifact that was not measured.

    Raises:
        FileNotFoundError, ValueError: no artifact, one without an evaluation of these weights, files that are missing or links out of it, a
            folder of somebody else at `output`, or an engine that does not serve the drafter.
        OSError: the disk.
    """
    from draftsmith.eval import card
    from draftsmith.inference import durable
    from draftsmith.inference.reading import read_json
    from draftsmith.models.artifact_files import without_texts
    from draftsmith.models.weights import check_folder
    from draftsmith.train.exchange.contents import contents_of, local_names, renamed

    _check_output(output, artifact)
    method, entry, depth = _drafter(artifact)
    contents = contents_of(artifact, texts)
    _check_evaluated(artifact, contents.files, without_evaluation)
    _check_loads(artifact, method, entry)
    readme = artifact / "README.md"
    if "README.md" not in contents.files or not card.is_marked(artifact):
        raise ValueError(f"{readme} is no model card with the line {card.BEGIN}; delete it, and run draftsmith eval, which writes another")

    def write(part: Path) -> None:
        for path in contents.files:
            (part / path).parent.mkdir(exist_ok=True)
            shutil.copyfile(artifact / path, part / path)
        for path in {"acceptance.json", "policy.json"} & set(contents.files):
            content = renamed(part / path, repo)
            content = without_texts(content) if path == "acceptance.json" and not texts else content
            durable.write_text(part / path, json.dumps(content) + "\n")
        check_folder(str(part))
        try:
            exports = _export(part, engines, repo)
        except ValueError as error:
            raise ValueError(str(error).replace(str(part), str(artifact))) from None
        serve = "\n\n".join((*exports, *_to_export(method, entry, depth, engines, repo)))
        report = read_json(part / "acceptance.json") if "acceptance.json" in contents.files else None
        text = card.published(
            readme.read_text(encoding="utf-8"), entry, method, report, repo, serve or "No engine serves it yet; Draftsmith does."
        )
        durable.write_text(part / "README.md", text)
        (part / MARK).write_text(f"{repo}\n", encoding="utf-8")

    output.parent.mkdir(parents=True, exist_ok=True)
    durable.replace_folder(output, write)
    files = sorted(file.relative_to(output).as_posix() for file in output.rglob("*") if file.is_file() and file.name != MARK)
    return Prepared(output, files, contents.left, _notes(output, local_names(output, artifact)))


def _check_output(output: Path, artifact: Path) -> None:
    """Raises ValueError for a folder that must not be replaced."""
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise ValueError(f"--output {output} is no folder; name one that is new, empty, or of an earlier publication")
    if output.is_dir() and os.listdir(output) and not (output / MARK).is_file():
        raise ValueError(f"--output {output} has content that draftsmith publish did not write; name another folder, or empty it")
    if output.is_relative_to(artifact) or artifact.is_relative_to(output):
        raise ValueError(f"--output {output} is within the artifact, or around it; name another folder")


def _drafter(artifact: Path) -> tuple[str, dict[str, Any], int]:
    """The method of an artifact, the entry of its config that has target and training, and the tokens that an engine drafts at a time.

    Raises:
        FileNotFoundError, ValueError: no folder, or no drafter of Draftsmith in it.
    """
    from draftsmith.inference.draft_model import DraftModel
    from draftsmith.models.artifact import student_entry
    from draftsmith.models.drafter import is_drafter, load_config
    from draftsmith.models.formats.engines import chain_depth, served_depth

    if not artifact.is_dir():
        raise FileNotFoundError(f"no folder {artifact}; give the folder `artifact` of a run")
    if is_drafter(str(artifact)):
        config = load_config(artifact)
        return config.model_type, config.to_dict(), served_depth(config)
    entry = student_entry(str(artifact))
    if entry is None:
        raise ValueError(f"{artifact} is no drafter of Draftsmith; train one, or take in another's with draftsmith import")
    return DraftModel.method, entry, chain_depth(entry["tree"])


def _check_loads(folder: Path, method: str, entry: dict[str, Any]) -> None:
    """Raises FileNotFoundError and ValueError for what nobody could load: weights that are missing, not finite, or of another config."""
    from draftsmith.inference.draft_model import DraftModel
    from draftsmith.models import adapter
    from draftsmith.models.drafter import load_drafter
    from draftsmith.models.target import Target

    if method == DraftModel.method:
        Target.load(str(folder))
    else:
        load_drafter(folder)
    if adapter_hash := (entry.get("target") or {}).get("adapter_hash"):
        adapter.check(folder, adapter_hash)


def _check_evaluated(artifact: Path, files: list[str], without_evaluation: bool) -> None:
    """Raises ValueError for an artifact that was not measured, unless that is wanted, or measured with other weights."""
    from draftsmith.inference.reading import field, read_json
    from draftsmith.models.weights import weights_hash

    file = artifact / "acceptance.json"
    if "acceptance.json" not in files:
        if not without_evaluation:
            raise ValueError(f"{artifact} has no evaluation; run `draftsmith eval {artifact}`, or give --without-evaluation")
        return
    drafter = field(read_json(file), "drafter", dict, file)
    if drafter.get("hash") != weights_hash(str(artifact)):
        raise ValueError(
            f"{file} was measured with other weights; run `draftsmith eval {artifact}` again, or delete what it measured before"
        )


def _export(part: Path, engines: list[str], repo: str) -> list[str]:
    """Export for engines into the folder `part`, each checked by a second reading. Returns for each what its users need to know."""
    if not engines:
        return []
    from draftsmith.models.formats.engines import ENGINES as NAMES
    from draftsmith.models.formats.export import export
    from draftsmith.train.exchange.export import open_source

    source, stored = open_source(str(part), None)
    texts = []
    for engine in engines:
        folder, name = f"engines/{engine}", repo.partition("/")[2]
        exported = export(source, engine, part / folder, stored, called=f"{name}/{folder}")
        lines = [f"{NAMES[engine]}: `{folder}` in this repository, checked by a second reading."]
        lines += [f"({note}.)" for note in exported.notes]
        texts.append("\n".join((*lines, "", "```", f'hf download {repo} --include "{folder}/*" --local-dir {name}', exported.serve, "```")))
    return texts


def _to_export(method: str, entry: dict[str, Any], depth: int, engines: list[str], repo: str) -> list[str]:
    """For each other engine that may serve such a drafter, the command that writes its folder, and the one that starts it."""
    from draftsmith.inference.draft_model import DraftModel
    from draftsmith.models.formats.engines import ENGINES as NAMES
    from draftsmith.models.formats.engines import PARD, ROWS, serving

    family = "student" if method == DraftModel.method else f"eagle{entry['version']}" if method == "eagle" else method
    of_target = entry.get("target") or {}
    if of_target.get("adapter_hash"):
        return []  # no export for an adapted target
    target, name = of_target.get("name", "TARGET"), repo.partition("/")[2]
    if entry.get("parallel"):
        start = serving(PARD, target, repo, depth)
        return [f"vLLM reads this folder as it is, by the source of its loader (not run):\n\n```\n{start}\n```"]
    texts = []
    for (own, engine), row in ROWS.items():
        if own == family and engine not in engines:
            folder = f"{name}-{engine}"
            command = f"draftsmith export {repo} --to {engine} --output {folder}"
            start = serving(row, target, folder, depth)
            texts.append(f"{NAMES[engine]}: export it first, which refuses what the engine cannot do.\n\n```\n{command}\n{start}\n```")
    return texts


def _notes(output: Path, local: list[str]) -> list[str]:
    """What a person should look at before it is public."""
    from draftsmith.eval import card

    fields, _ = card.split((output / "README.md").read_text(encoding="utf-8"))
    notes = [f"these name folders of this machine: {', '.join(local)}"] if local else []
    if not (fields or {}).get("license"):
        notes.append("no licence is known: write `license: …` between the --- of the artifact's README.md")
    if not (fields or {}).get("base_model"):
        notes.append("the target is no model of the Hub, so that the card links to none")
    return notes


def table(prepared: Prepared, address: str) -> list[str]:
    """Lines for people: where it goes, each file with its bytes, what stays, and notes."""
    from draftsmith.inference.terminal import printable

    sizes = [(path, (prepared.folder / path).stat().st_size) for path in prepared.files]
    lines = [f"to {address}, from {prepared.folder}:"]
    lines += [f"{size:>16,}  {path}" for path, size in sizes]
    lines.append(f"{sum(size for _, size in sizes):>16,}  bytes of {len(sizes)} files")
    lines += [f"        not sent  {path} ({why})" for path, why in prepared.left]
    lines += [f"note: {note}" for note in prepared.notes]
    return [printable(line, keep="") for line in lines]
