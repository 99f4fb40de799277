"""What all sections of a recipe have in common, and the section of the loop."""

import os
import unicodedata
from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

T = TypeVar("T")
# A key that may differ between a checkpoint and the run that continues it: it changes no step already taken.
Changeable = Annotated[T, "changeable"]
Beta = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A section of a recipe. In a subclass, the docstring is the section's heading in --help and `description` the text of a key.

    Numbers are finite, and texts are neither blank nor hold control characters. A text that begins with ~ is a path below a home folder.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _text(cls, value: Any) -> Any:
        return value if isinstance(value, dict) else checked_text(value)  # a dictionary is a section, whose texts are its own

    def refuse_unread(self, name: str, keys: Iterable[str], reason: str) -> None:
        """Raises ValueError for a key of this section `name` that differs from its default. `reason` is the setting with which it does nothing."""
        for key in keys:
            value = getattr(self, key)
            default = type(self).model_fields[key].default
            if value != default:
                raise ValueError(
                    f"{name}.{key}={value} does nothing with {reason}; leave it out, or give back its default, {name}.{key}={default}"
                )


def checked_text(value: Any) -> Any:
    """The value with ~ expanded in its texts, those of lists and dictionaries included.

    Raises:
        ValueError: a text is blank, holds a control character, or names the home of a user that does not exist.
    """
    if isinstance(value, dict):
        return {key: checked_text(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(checked_text(item) for item in value)
    if not isinstance(value, str):
        return value
    if not value.strip():
        raise ValueError("the text is blank; give one, or leave the key out")
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in value):
        raise ValueError("the text holds a control character; leave it out")
    expanded = os.path.expanduser(value)
    if expanded.startswith("~"):
        raise ValueError(f"there is no user with the home folder {value.partition('/')[0]}; write ./ before it if it is a name")
    return expanded


class TrainSection(Section):
    """the training loop"""

    output: Changeable[str] = Field(description="folder for checkpoints, metrics and the trained drafter (`artifact`)")
    steps: Changeable[int] = Field(ge=1, le=10**9, description="optimizer steps of the run")
    batch_size: int = Field(ge=1, le=2**20, description="sequences of one optimizer step, over all ranks and accumulation")
    micro_batch_size: Changeable[int | None] = Field(
        default=None, ge=1, le=2**20, description="sequences of one forward on one rank; unset: all of the rank's share"
    )
    context_parallel: Changeable[int] = Field(
        default=1,
        ge=1,
        le=2**16,
        description="ranks that share each sequence by position (EAGLE only): divides the memory of the drafter's steps, not the target's",
    )
    optimizer: Literal["adamw", "muon"] = Field(
        default="adamw",
        description="muon: Muon for matrices, but for heads and embeddings, and AdamW for the rest, at the same learning rate",
    )
    lr: float = Field(gt=0, le=1, description="highest learning rate, reached after warmup_steps")
    head_lr: float | None = Field(
        default=None, gt=0, le=1, description="highest learning rate of matrices with a row for each token: heads, embeddings; unset: lr"
    )
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        default="cosine", description="learning rate after the warm-up, down to min_lr; wsd: constant, then linear over the last quarter"
    )
    warmup_steps: int = Field(default=0, ge=0, le=10**9, description="steps of linear warm-up")
    min_lr: float = Field(default=0.0, ge=0, le=1, description="the learning rate after the last step, as a fraction of lr")
    weight_decay: float = Field(default=0.0, ge=0, le=1000, description="weight decay, of matrices only")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), description="decay rates of the gradient's mean, Muon's too, and of its square")
    clip: float = Field(default=1.0, gt=0, le=1e6, description="norm to which gradients are clipped")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        default="auto", description="precision of the forward pass; auto: bf16 where it proves faster on this machine"
    )
    weights: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="number format of the trained weights and their gradients; bfloat16: updates are added by Kahan summation, which takes "
        "12 bytes a weight with AdamW where float32 takes 16; one process or DDP",
    )
    compile: Changeable[bool] = Field(
        default=False, description="compile the target's layers: a minute at the start, faster steps, most on a GPU"
    )
    kernels: Changeable[bool] = Field(
        default=False, description="compute losses with Triton kernels; needs a GPU (tested on an H100, not timed)"
    )
    seed: int = Field(default=0, ge=0, lt=2**31, description="seed of the initial weights, the order of examples and all random draws")
    eval_every: Changeable[int] = Field(
        default=0, ge=0, le=10**9, description="steps between evaluations on held-out data; 0: at the end only"
    )
    eval_batches: Changeable[int] = Field(
        default=8,
        ge=1,
        le=10**6,
        description="batches of an evaluation, of train.micro_batch_size sequences, or of train.batch_size where that is unset",
    )
    save_every: Changeable[int] = Field(
        default=0,
        ge=0,
        le=10**9,
        description="steps between checkpoints; 0: before each measurement of τ, at the end and on interruption only",
    )
    keep: Changeable[int] = Field(default=2, ge=1, le=10**6, description="how many of the newest checkpoints stay on disk")
    resume: Changeable[Literal["auto", "never"]] = Field(
        default="auto", description="auto: continue from the newest complete checkpoint in output; never: refuse a folder that has one"
    )
    watchdog_minutes: Changeable[float] = Field(
        default=60.0,
        ge=0,
        le=10**5,
        description="minutes without progress after which the run reports its threads and exits with 75; 0: never",
    )
    max_nonfinite_steps: Changeable[int] = Field(
        default=5, ge=1, le=10**6, description="stop after this many steps in a row were skipped because a loss or gradient was not finite"
    )
    log_every: Changeable[int] = Field(default=10, ge=1, le=10**9, description="steps between lines of metrics.jsonl")
    normalise: Literal["supervised", "all"] = Field(
        default="supervised", description="divide a step's loss by its supervised tokens, or by all its positions as EAGLE's code does"
    )
    tau_prompts: int = Field(
        default=0,
        ge=0,
        le=10**6,
        description="prompts of each domain that each evaluation decodes to measure τ, tokens per round. The weights with the best τ are "
        "published; LayerSkip and Medusa-2 change the target, and publish the last ones. 0: τ is not measured",
    )
    tau_file: str | None = Field(
        default=None,
        description="file with these prompts, or `chat`: those that ship by task; unset: `chat`, or Python source for a target without a chat template",
    )
    tau_tokens: int = Field(default=48, ge=1, le=2**20, description="new tokens decoded for each of these prompts")
    tau_temperature: float = Field(default=0.0, ge=0, le=100, description="sampling temperature while τ is measured")
    patience: Changeable[int] = Field(
        default=0, ge=0, le=10**6, description="end the run after this many evaluations without a better τ; 0: do not end it early"
    )
    trackers: Changeable[tuple[Literal["tensorboard", "wandb", "trackio"], ...]] = Field(
        default=(), description="also send metrics to these; wandb stays offline without a key, trackio stays on this machine"
    )
    profile: Changeable[str | None] = Field(
        default=None,
        description="`10:15` traces steps 10 to 15, both included and numbered as in metrics.jsonl, into output; unset: no trace",
    )

    @field_validator("profile", mode="before")
    @classmethod
    def _steps(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None:
            return value
        first, _, last = str(value).partition(":")
        if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
            raise ValueError("expected first:last, steps from 1, such as 10:15")
        if int(last) > info.data.get("steps", int(last)):
            raise ValueError(f"step {last} is past train.steps={info.data['steps']}")
        return value

    @model_validator(mode="after")
    def _patience(self) -> "TrainSection":
        if self.patience and not self.tau_prompts:
            raise ValueError(
                f"train.patience={self.patience} waits for a better τ, which train.tau_prompts=0 does not measure; give train.patience=0 too"
            )
        return self

    @model_validator(mode="after")
    def _decay(self) -> "TrainSection":
        if self.lr * self.weight_decay >= 1:
            raise ValueError(
                f"train.lr={self.lr} × train.weight_decay={self.weight_decay} takes away all of a weight in one step; "
                "make the product less than 1"
            )
        return self

    @model_validator(mode="after")
    def _half_precision(self) -> "TrainSection":
        if self.weights == "bfloat16" and self.precision == "fp32":
            raise ValueError("train.weights=bfloat16 has a forward pass in bf16, got train.precision=fp32; leave one of them out")
        if self.weights == "bfloat16" and self.betas[0] > 0.95:
            raise ValueError(
                f"train.weights=bfloat16 has the gradient's mean in bf16, which train.betas[0]={self.betas[0]} would change by less than its rounding; "
                "expected at most 0.95: lower it, or take train.weights=float32"
            )
        return self

    @property
    def held_out_sequences(self) -> int:
        """Sequences of an evaluation, on however many ranks."""
        return self.eval_batches * (self.micro_batch_size or self.batch_size)
