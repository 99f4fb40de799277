"""Make an artifact of a published drafter, a folder or on the Hub: EAGLE, P-EAGLE, DFlash, DSpark, Medusa, Hydra, an MLP speculator or an MTP layer.

draftsmith import yuhuili/EAGLE3-LLaMA3.1-Instruct-8B --target meta-llama/Llama-3.1-8B-Instruct --output runs/theirs
draftsmith eval runs/theirs

eval, compare and generate take such a folder or Hub id as it is; an artifact can be trained further and published. Only safetensors are read.
"""

import argparse
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

from draftsmith.eval import options


def parser() -> argparse.ArgumentParser:
    parser = options.new_parser("import", __doc__)
    parser.add_argument("drafter", help="folder or Hub id of the published drafter")
    parser.add_argument("--target", help="folder or Hub id of the target that it drafts for (default: the one that its files name)")
    parser.add_argument("--output", required=True, help="the artifact's folder: new or empty")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the target's own code from the Hub")
    return parser


def main(arguments: list[str]) -> None:
    chosen: Any = parser().parse_args(arguments)

    from draftsmith.eval import card
    from draftsmith.eval.loading import command
    from draftsmith.inference import durable
    from draftsmith.models.artifact_files import TERMS
    from draftsmith.models.formats.published import KINDS, check_files, folder_of, format_of, read_published, target_of
    from draftsmith.models.identity import recorded_revision
    from draftsmith.train.exchange.export import PRECISION, open_target

    output = Path(os.path.expanduser(chosen.output)).absolute()
    if output.is_symlink() or (output.exists() and (not output.is_dir() or os.listdir(output))):
        raise ValueError(f"--output {chosen.output}: expected a new or an empty folder; name another")
    local = Path(os.path.expanduser(chosen.drafter))
    if not format_of(chosen.drafter):
        if local.is_dir():
            check_files(local)
        raise ValueError(
            f"{chosen.drafter!r} is no published drafter in safetensors ({KINDS}); a draft model or an artifact of ours needs no import"
        )
    recorded = target_of(chosen.drafter)
    name = chosen.target or recorded.get("name")
    if not name:
        raise ValueError(f"{chosen.drafter!r} does not say which target it was made for; give --target")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=PRECISION)
        target, stored = open_target(name, recorded_revision(name, recorded), chosen.trust_remote_code)
        drafter = read_published(chosen.drafter, target)
    imported = local.name if local.is_dir() else chosen.drafter
    # The target was opened in float32; the drafter was made for its stored precision. A note of ours names that.
    if drafter.config.target == target.identity.to_dict():
        drafter.config.target = drafter.config.target | {"dtype": str(stored).removeprefix("torch.")}
    drafter.config.training = (drafter.config.training or {}) | {"imported": imported}

    def write(part: Path) -> None:
        drafter.save_pretrained(part)
        if target.tokenizer is not None:
            target.tokenizer.save_pretrained(part)
        source = folder_of(chosen.drafter)
        for file in (file for pattern in TERMS for file in source.glob(pattern) if file.is_file()):
            shutil.copy(file, part)
        card.write(part, drafter.method, drafter.config.target, drafter.config.training, card.licence_in(source / "README.md"))

    output.parent.mkdir(parents=True, exist_ok=True)
    durable.replace_folder(output, write)
    print(f"{output}: a {drafter.method} drafter; measure it with\n    {command()} eval {output}")
