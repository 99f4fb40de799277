"""A conversation as token ids and a loss mask: the assistant's tokens, end of turn included, bear loss."""

from typing import Any

from transformers import PreTrainedTokenizerBase


def encode(messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[bool]]:
    """(ids, mask) of one conversation under the tokenizer's own chat template.

    The mask is derived by rendering prefixes: what turn i adds after the generation prompt is the assistant's.
    Raises ValueError when the tokenizer has no template, or when the template rewrites earlier turns, so that prefixes disagree.
    """
    if not tokenizer.chat_template:
        raise ValueError("the target's tokenizer has no chat template, so `messages` cannot be rendered; give rows with `text` instead")
    ids = _render(messages, tokenizer, False)
    mask = [False] * len(ids)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(messages[:turn], tokenizer, True)
        after = _render(messages[: turn + 1], tokenizer, False)
        if ids[: len(before)] != before or ids[: len(after)] != after:
            raise ValueError(f"the chat template changes earlier turns when turn {turn + 1} is added, so the loss mask cannot be derived")
        mask[len(before) : len(after)] = [True] * (len(after) - len(before))
    return ids, mask


def _render(messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, generation: bool) -> list[int]:
    # The template writes BOS itself where the model wants one: tokenising its text with special tokens would double it.
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation) if messages else ""
    return tokenizer.encode(str(text), add_special_tokens=False)
