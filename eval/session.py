"""The target and the drafter that a command works with, and a person's prompt as token ids."""

import shutil
import sys
from pathlib import Path

import torch

from draftsmith.data.prompts import Prompt
from draftsmith.inference import machine
from draftsmith.models.drafter import DrafterModel, load_config, load_drafter
from draftsmith.models.target import Target

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_of(name: str) -> torch.dtype:
    """The dtype that a recipe or an option names; "auto" is float32 on a CPU and bfloat16 on a GPU."""
    if name == "auto":
        return torch.bfloat16 if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else torch.float32
    return DTYPES[name]


def command() -> str:
    """How the `draftsmith` command is called here: by name where it is on the PATH, else by its path beside this Python."""
    if shutil.which("draftsmith"):
        return "draftsmith"
    beside = Path(sys.executable).with_name("draftsmith")
    return str(beside.relative_to(Path.cwd()) if beside.is_relative_to(Path.cwd()) else beside)


def open_pair(target: str | None, drafter: str | None, dtype: str, trust_remote_code: bool = False) -> tuple[Target, DrafterModel | None]:
    """Load a target and a drafter (None: plain). Without a target's name, it is the one that the drafter was made for.

    Raises ValueError for a drafter of another target, naming both, and for a target without a tokenizer.
    """
    if drafter and "/" not in drafter and not Path(drafter).is_dir():
        raise ValueError(f"drafter {drafter!r}: expected the folder of a trained drafter, or a Hub id such as name/drafter")
    made_for = (load_config(drafter).target or {}) if drafter else {}
    name = target or made_for.get("name") or "tiny"
    revision = made_for.get("revision") or None if name == made_for.get("name") and not Path(name).exists() and name != "tiny" else None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = Target.load(name, dtype=dtype_of(dtype), device=device, revision=revision, trust_remote_code=trust_remote_code)
    if loaded.tokenizer is None:
        raise ValueError(f"target {name!r} has no tokenizer beside its weights; copy tokenizer.json there")
    some = torch.arange(8, device=loaded.device)[None] % loaded.vocab_size
    machine.threads(lambda: loaded.forward(some))
    return loaded, load_drafter(drafter, loaded, dtype=loaded.dtype) if drafter else None


def encode(target: Target, prompt: Prompt) -> list[int]:
    """Token ids of a prompt; a conversation goes through the target's chat template, which writes its own special tokens."""
    tokenizer = target.tokenizer
    assert tokenizer is not None, "open_pair refuses a target without one"
    if prompt.messages and tokenizer.chat_template:
        text = tokenizer.apply_chat_template(list(prompt.messages), tokenize=False, add_generation_prompt=True)
        return tokenizer.encode(str(text), add_special_tokens=False)
    return tokenizer.encode(prompt.text)
