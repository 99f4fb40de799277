"""Which target a drafter or a feature store was made for: names for people, hashes of config and tokenizer for the check."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.configuration_utils import PretrainedConfig

# Keys of a config that may change without the model becoming another one.
_VOLATILE = frozenset(
    "_name_or_path _commit_hash transformers_version dtype torch_dtype _attn_implementation attn_implementation "
    "_attn_implementation_internal _attn_implementation_autoset _experts_implementation experts_implementation "
    "use_cache return_dict output_hidden_states output_attentions pad_token_id id2label label2id draftsmith quantization_config".split()
)


@dataclass(frozen=True, slots=True)
class TargetIdentity:
    """Which target a drafter or a feature store belongs to. The hashes decide; the rest is for people.

    Attributes:
        name: folder or Hub id.
        revision: commit on the Hub; "" for a folder.
        dtype: of its features, and how its weights are quantised: bfloat16, bfloat16+ao-int8.
        config_hash: of its config (`config_hash`).
        tokenizer_hash: of its tokenizer (`tokenizer_hash`); "" without one.
        weights_hash: of its files (`weights.weights_hash`); "" for one in memory or on the Hub, and in older records.
        adapter_hash: of the adapters that are in its weights (models/adapter.py); "" without any.
    """

    name: str
    revision: str
    dtype: str
    config_hash: str
    tokenizer_hash: str
    weights_hash: str = ""
    adapter_hash: str = ""

    def to_dict(self) -> dict[str, str]:
        """Its fields; the adapter's hash only where there is an adapter."""
        return {name: value for name, value in asdict(self).items() if value or name != "adapter_hash"}

    @classmethod
    def from_dict(cls, fields: dict[str, str]) -> "TargetIdentity":
        return cls(**{key: str(fields.get(key, "")) for key in cls.__dataclass_fields__})


def recorded_revision(name: str, recorded: dict[str, Any]) -> str | None:
    """The commit of the target `name` that a drafter was made for, by the entry `target` of its config; None for another target and for a folder."""
    return (recorded.get("revision") or None) if name == recorded.get("name") and not Path(name).exists() else None


def check_same(expected: TargetIdentity, actual: TargetIdentity, weights: bool = False) -> str:
    """Compare the target that a drafter or a store was made for with the one given.

    Args:
        expected: the target it was made for.
        actual: the one given.
        weights: other weights, or another commit of models on the Hub, are an error, as for stored features. A drafter may serve a fine-tuned target: for it they are a warning; so
            they are where one of the two is quantised, since a model quantised on loading and its saved copy have different files.

    Returns:
        A warning if only the precision or the weights differ, else "".

    Raises:
        ValueError: the config differs, or both tokenizers are known and differ, or the weights or revisions, or one is adapted and the other not so; the
            message names both targets.
    """
    parts = []
    if expected.config_hash != actual.config_hash:
        parts.append(f"config ({expected.config_hash[:12]} / {actual.config_hash[:12]})")
    if expected.tokenizer_hash and actual.tokenizer_hash and expected.tokenizer_hash != actual.tokenizer_hash:
        parts.append(f"tokenizer ({expected.tokenizer_hash[:12]} / {actual.tokenizer_hash[:12]})")
    if expected.weights_hash and actual.weights_hash:
        kind, before, now, quantised = "weights", expected.weights_hash, actual.weights_hash, "+" in expected.dtype + actual.dtype
    else:  # models on the Hub: whether a commit changed the weights is not known here
        kind, before, now, quantised = "revision", expected.revision, actual.revision, False
    other_weights = bool(before and now) and before != now
    if weights and other_weights and not quantised:
        parts.append(f"{kind} ({before[:12]} / {now[:12]})")
    if parts:
        raise ValueError(
            f"the target differs in its {' and its '.join(parts)}: made for {expected.name!r}, got {actual.name!r}; "
            f"load {expected.name!r}, or train for {actual.name!r}"
        )
    if expected.adapter_hash != actual.adapter_hash:
        raise ValueError(
            f"made for {expected.name!r} {_adapted(expected)}, got {actual.name!r} {_adapted(actual)}: drafts are lossless with respect to the "
            "model that verifies them only; `draftsmith eval` and `generate` load a drafter of Medusa-2 with its adapters, in Python models.adapter.adapt "
            "does"
        )
    if expected.dtype != actual.dtype:
        return f"target {actual.name!r} is in {actual.dtype}, this was made with it in {expected.dtype}: acceptance may differ a little"
    if other_weights:
        return f"target {actual.name!r} has other weights than {expected.name!r}, for which this was made: acceptance may be lower"
    return ""


def _adapted(identity: TargetIdentity) -> str:
    return f"with adapters ({identity.adapter_hash[:12]})" if identity.adapter_hash else "without adapters"


def config_hash(config: PretrainedConfig) -> str:
    """SHA-256 of the config as canonical JSON, without nulls and without keys that do not change the model (`_VOLATILE`)."""
    return _sha256(_canonical(config.to_diff_dict()))


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase | None) -> str:
    """SHA-256 of the vocabulary and, of a fast tokenizer, of its serialisation; "" without a tokenizer."""
    if tokenizer is None:
        return ""
    parts: dict[str, Any] = {"vocab": sorted(tokenizer.get_vocab().items())}
    if tokenizer.is_fast:
        backend = json.loads(cast(PreTrainedTokenizerFast, tokenizer).backend_tokenizer.to_str())
        # Padding and truncation are state that every padded call leaves behind.
        parts["backend"] = {key: value for key, value in backend.items() if key not in ("padding", "truncation")}
    return _sha256(parts)


def _canonical(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _canonical(item) for key, item in value.items() if key not in _VOLATILE and item is not None}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    return value


def _sha256(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
