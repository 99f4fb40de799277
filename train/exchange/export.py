"""Write a trained drafter into the folder that an engine loads, checked by a second reading before it is there.

draftsmith export runs/eagle3/artifact --to vllm --output served/llama-drafter
draftsmith export runs/student/artifact --to gguf --output served/student
draftsmith export runs/eagle3/artifact --to vllm --output served/llama-drafter-int8 --quantise int8
draftsmith export runs/medusa/artifact --to tgi --output served/heads --dtype float32

The table of drafters and engines, and which of them were run: models/FORMATS.md.
"""

import argparse
import math
import os
import warnings
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.eval import options

if TYPE_CHECKING:  # --help imports no model library
    import torch

    from draftsmith.models.formats.export import Source
    from draftsmith.models.target import Target

ENGINES = ("vllm", "sglang", "tgi", "tensorrt-llm", "speculators", "eagle", "transformers", "gguf")
NAMES = ("checkpoint", "hydra")
QUANTISED = ("int8", "fp8")
DTYPES = ("auto", "float32", "bfloat16", "float16")
# The target is in float32 here, whatever the drafter was trained with: its weights alone are read.
PRECISION = ".*acceptance may differ a little"


def parser() -> argparse.ArgumentParser:
    parser = options.new_parser("export", __doc__)
    parser.add_argument("artifact", help="folder or Hub id of a trained drafter or draft model")
    parser.add_argument(
        "--to",
        required=True,
        choices=(*ENGINES, *NAMES),
        help="the engine; eagle is the code of EAGLE's authors; checkpoint: an MTP layer as its target's checkpoint names it; hydra: as the authors of Hydra do",
    )
    parser.add_argument("--output", required=True, help="the folder: new, empty, or an earlier export, which is replaced")
    parser.add_argument("--target", help="folder or Hub id of the target (default: the one that the drafter was trained for)")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the weights (default auto: the target's)")
    parser.add_argument("--quantise", choices=QUANTISED, default="", help="linear layers in 8 bits, for vllm; int8 for gguf too")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the models' own code from the Hub")
    return parser


def main(arguments: list[str]) -> None:
    chosen = parser().parse_args(arguments)

    from draftsmith.models.formats.export import check_output, export, export_names

    output = Path(os.path.expanduser(chosen.output))
    check_output(output.absolute())
    source, stored = open_source(chosen.artifact, chosen.target, chosen.trust_remote_code)
    if chosen.to in NAMES:
        if chosen.quantise:
            raise ValueError(f"--quantise {chosen.quantise} is for engines; leave it out")
        file = export_names(source, chosen.to, output, dtype_of(chosen.dtype, stored))
        use = "put its tensors in the place of the checkpoint's of the same names"
        print(
            f"{file}: written, and checked by reading it; {use if chosen.to == 'checkpoint' else 'README.md has the command for the code of its authors'}"
        )
        return
    exported = export(source, chosen.to, output, dtype_of(chosen.dtype, stored), chosen.quantise)
    print(f"{exported.folder}: written for {chosen.to}, and checked: a second reading of it gives the drafter's logits")
    for note in exported.notes:
        print(f"note: {note}")
    print(f"serve: {exported.serve}")


def dtype_of(name: str, stored: "torch.dtype") -> "torch.dtype":
    """The dtype that --dtype names; auto is `stored`, the target's."""
    from draftsmith.eval.loading import DTYPES

    return stored if name == "auto" else DTYPES[name]


def open_target(name: str, revision: str | None = None, trust_remote_code: bool = False) -> tuple["Target", "torch.dtype"]:
    """A target in float32 without its decoder layers, and the dtype that its checkpoint has. Raises as `Target.load`."""
    import torch

    from draftsmith.models.artifact import raw_config
    from draftsmith.models.target import Target

    weights: Counter[str] = Counter()  # by dtype

    def note(headers: dict[str, Any]) -> torch.dtype:
        for header in headers.values():
            weights[header.dtype] += math.prod(header.shape)
        return torch.float32

    target = Target.load(name, dtype=note, layers=False, revision=revision, trust_remote_code=trust_remote_code)
    dtypes = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    if known := [name for name, _ in weights.most_common() if name in dtypes]:  # of a quantised target, the weights that are not quantised
        return target, dtypes[known[0]]
    raw, _ = raw_config(name, revision or "main")  # of the Hub not all headers are at hand, and the loaded config says float32
    said = [scope.get(key) for scope in (raw, raw.get("text_config") or {}) for key in ("dtype", "torch_dtype")]
    return target, next((dtype for dtype in (torch.bfloat16, torch.float16) if str(dtype).removeprefix("torch.") in said), torch.float32)


def open_source(path: str, target: str | None, trust_remote_code: bool = False) -> "tuple[Source, torch.dtype]":
    """An artifact with its target, and the dtype of the target's checkpoint.

    Raises:
        FileNotFoundError, ValueError: no artifact, another target than it was made for, an adapted target, or a draft model with other tokens.
    """
    from draftsmith.models.artifact import student_entry
    from draftsmith.models.artifact_files import TERMS
    from draftsmith.models.drafter import default_paths, is_drafter, load_config, load_drafter
    from draftsmith.models.formats.export import KEPT, Source
    from draftsmith.models.formats.published import folder_of, format_of, read_published, target_of
    from draftsmith.models.identity import recorded_revision
    from draftsmith.models.target import Target, TargetIdentity, check_same
    from draftsmith.models.tokenizer_check import check_pair

    published = bool(format_of(path))
    trained = not published and is_drafter(path)
    entry = {} if published or trained else student_entry(path) or {}
    if entry.get("parallel"):
        raise ValueError(
            f"{path!r} is a parallel draft model; vLLM reads its folder as it is: --speculative-config with method draft_model and "
            "parallel_drafting true; give it that folder"
        )
    recorded = (target_of(path) if published else load_config(path).target if trained else entry.get("target")) or {}
    name = target or recorded.get("name")
    if not name:
        raise ValueError(f"{path!r} does not say which target it was made for; give --target")
    if recorded.get("adapter_hash"):
        raise ValueError(
            f"{path!r} drafts for {name!r} with the adapters in its folder `adapter`, and no engine's format has a place for them; it runs with "
            "`draftsmith generate`"
        )
    local = folder_of(path) if published else folder_of(path, ["config.json", "README.md", *TERMS, *KEPT])
    revision = recorded_revision(name, recorded)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=PRECISION)
        loaded, stored = open_target(name, revision, trust_remote_code)
        if published or trained:
            import torch

            drafter: Any = read_published(path, loaded, torch.float32) if published else load_drafter(path, loaded, dtype="float32")
            from draftsmith.models.formats.engines import served_depth

            config = drafter.config
            return Source(
                drafter, loaded, local, config.target, config.tree, served_depth(config), drafter.depth_limit, config.training
            ), stored
        check_pair(name, path, revision=revision, trust_remote_code=trust_remote_code)
        if recorded and (warning := check_same(TargetIdentity.from_dict(recorded), loaded.identity)):
            warnings.warn(warning, stacklevel=2)
        import torch

        model = Target.load(path, dtype=torch.float32, trust_remote_code=trust_remote_code).model
    tree = default_paths(3, 7) if entry.get("tree") is None else entry["tree"]
    from draftsmith.models.formats.engines import chain_depth

    depth = chain_depth(tree)
    made_for = recorded or loaded.identity.to_dict()
    source = Source(model, loaded, local, made_for, tree, depth, depth, entry.get("training"), entry.get("confidence", 0.0))
    return source, stored
