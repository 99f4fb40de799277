"""Models written into folders for others to load."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from draftsmith.inference.durable import give_usual_mode

__all__ = ["save_model", "save_student"]


def save_model(model: Any, folder: Path, **options: Any) -> None:
    """`model.save_pretrained(folder, **options)`, its weights readable as other files are."""
    model.save_pretrained(folder, **options)
    for file in Path(folder).glob("*.safetensors"):
        give_usual_mode(file)


def save_student(model: PreTrainedModel, folder: Path, entry: dict[str, Any], depth: int) -> None:
    """Write a student as a bf16 checkpoint, with which transformers' assisted generation drafts as here.

    Args:
        model: is in bf16 afterwards.
        folder: where to.
        entry: for the key `draftsmith` of its config: target, tree, confidence, training.
        depth: tokens of a draft.
    """
    model.config.draftsmith = entry
    generation: Any = model.generation_config
    generation.num_assistant_tokens = depth
    generation.num_assistant_tokens_schedule = "constant"
    generation.assistant_confidence_threshold = entry["confidence"]  # else transformers stops a draft at 0.4
    save_model(model.to(torch.bfloat16), folder)  # pyright: ignore[reportArgumentType, reportCallIssue]
