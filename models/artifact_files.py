"""The files of an artifact by name, and which of them hold texts of prompts and answers."""

from typing import Any

TEXTS = ("records.jsonl", "report.html")  # of an evaluation: they hold texts of prompts and answers
WEIGHT_FILES = ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json")
_TERMS = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")
TERMS = (
    *_TERMS,
    *(f"target-{name}" for name in _TERMS),
)  # they stay right with other weights; those of the target go along, since a drafter may hold tensors of it
FILES = (
    *("config.json", "generation_config.json", *WEIGHT_FILES),
    *("README.md", "recipe.yaml", "run.json", "acceptance.json", "policy.json", "survival.png"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("vocab.txt", "merges.txt", "spiece.model", "chat_template.jinja", *TERMS),
    *("adapter/adapter_config.json", "adapter/adapter_model.safetensors", "adapter/README.md"),
)


def without_texts(report: dict[str, Any]) -> dict[str, Any]:
    """The content of acceptance.json without texts of prompts and answers: the shown answer, and examples of failures."""
    failures = report.get("failures") or {}
    kinds = [kind | {"examples": []} for kind in failures.get("kinds") or ()]
    return report | {"text": None, "failures": failures | {"kinds": kinds}}
