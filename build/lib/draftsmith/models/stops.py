"""The tokens at which a model's answer ends."""

from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["stop_ids"]


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """What the generation config and the tokenizer name as the end, and the token that ends a turn in the chat template."""
    generation = model.generation_config
    ids: Any = generation.eos_token_id if generation is not None else None
    stops: set[Any] = set(ids) if isinstance(ids, (list, tuple)) else {ids}
    if tokenizer is not None:
        stops.update((tokenizer.eos_token_id, _end_of_turn(tokenizer)))
    return frozenset(int(stop) for stop in stops if stop is not None)


def _end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that the chat template writes after the assistant's words, if it writes one."""
    if not tokenizer.chat_template:
        return None
    words = "Answer"
    try:
        text = str(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": "RoundContext"}, {"role": "assistant", "content": words}], tokenize=False
            )
        )
    except TemplateError:
        return None
    after = tokenizer(text[text.rindex(words) + len(words) :].lstrip(), add_special_tokens=False)["input_ids"] if words in text else []
    return after[0] if after and after[0] in tokenizer.added_tokens_decoder else None
