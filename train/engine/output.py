"""The folder of a run, train.output: whose it is, and what stands in it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from draftsmith.inference import durable
from draftsmith.inference.claim import MARK, check_own, claim
from draftsmith.inference.reading import read_json
from draftsmith.train.engine import checkpoint, processes
from draftsmith.train.recipe import Recipe

KIND = "training run"
# What a run replaces in its folder. config.json and model.safetensors it does not write there: they are signs of somebody else's model.
NAMES = (
    "artifact",
    ".artifact.part",
    "checkpoints",
    "start",
    ".start.part",
    "start.part",
    "tokenizer",
    ".tokenizer.part",
    "replay",
    "recipe.yaml",
    "run.json",
    "metrics.jsonl",
    "curves.png",
    "trackers.json",
    "tensorboard",
    "config.json",
    "model.safetensors",
    "index.json",
)


@contextmanager
def claimed(recipe: Recipe) -> Iterator[None]:
    """Within it train.output belongs to this run alone. The main process claims it for all; the others wait. All ranks enter it.

    Raises:
        ValueError: another run writes there, or the folder is somebody else's; see `check`.
        OSError: it cannot be written.
    """
    folder = Path(recipe.train.output)

    def enter() -> None:
        check(recipe)
        try:
            if _is_unmarked_run(folder):
                durable.write_text(folder / MARK, f'{{"kind": "{KIND}"}}\n')
            stack.enter_context(claim(folder, KIND, NAMES, "train.output"))
        except OSError as error:
            raise OSError(f"train.output={folder} cannot be written ({error.strerror or error}); give another folder") from None

    with ExitStack() as stack:
        processes.on_main(enter)
        yield


def check(recipe: Recipe) -> None:
    """Check that train.output is a new folder or one of an earlier run, and that nothing in it is a link or somebody else's. Writes nothing.

    Raises:
        ValueError: it is not; the message names what is there.
    """
    folder = Path(recipe.train.output)
    if not _is_unmarked_run(folder):
        check_own(folder, KIND, NAMES, "train.output")
    artifact, checkpoints = folder / "artifact", folder / "checkpoints"
    within = [path for inner in (artifact, checkpoints) if not inner.is_symlink() and inner.is_dir() for path in inner.iterdir()]
    for path in (*(folder / name for name in NAMES), *within):
        if path.is_symlink():
            raise ValueError(f"{path} is a link, and a run writes through none; move it away, or give another train.output")
    if artifact.exists() and not _is_artifact(artifact):
        raise ValueError(f"{artifact} was not written by a run of Draftsmith; move it away, or give another train.output")
    for path in checkpoint.foreign(checkpoints):
        raise ValueError(f"{path} is no checkpoint of Draftsmith; move it away, or give another train.output")


def _is_unmarked_run(folder: Path) -> bool:
    """Whether this is the folder of a run from before there were marks. An artifact has a run.json too, and a config.json beside it."""
    return not (folder / MARK).exists() and not (folder / "config.json").exists() and _is_of_draftsmith(folder / "run.json")


def _is_artifact(folder: Path) -> bool:
    """Whether a run wrote this artifact. A folder without files is what a kill may leave."""
    return folder.is_dir() and (_is_of_draftsmith(folder / "run.json") or not any(folder.iterdir()))


def _is_of_draftsmith(file: Path) -> bool:
    """Whether a run.json names the version of Draftsmith that wrote it."""
    try:
        versions = read_json(file).get("versions")
    except (OSError, ValueError):
        return False
    return isinstance(versions, dict) and "draftsmith" in versions
