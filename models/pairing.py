"""May this checkpoint draft for that target? Answered from configs and tokenizers, before any weights are read."""

import os
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from draftsmith.inference.support import check_supported
from draftsmith.models.target import TOKENIZER_FILES, check_folder, resolve_path

__all__ = ["check_pair", "check_tokens"]


def check_pair(target: str, draft: str, *, revision: str | None = None, trust_remote_code: bool = False) -> None:
    """`target` and `draft` are folders or Hub ids; `revision` is the target's.

    Raises:
        FileNotFoundError: no such folder, or not a whole model in it.
        ValueError: an architecture that cannot be tree-verified, other tokens, or a larger vocabulary than the target's.
    """
    vocabularies, tokenizers = [], []
    for path, commit in ((target, revision), (draft, None)):
        source = resolve_path(path)
        local = os.path.isdir(source)
        if local:
            check_folder(source)
            if not any(os.path.exists(os.path.join(source, name)) for name in TOKENIZER_FILES):
                raise ValueError(
                    f"{path!r} has no tokenizer beside its weights, so that its tokens cannot be compared; copy tokenizer.json there"
                )
        common: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": local, "revision": commit or "main"}
        config = AutoConfig.from_pretrained(source, **common)
        check_supported(config)
        vocabularies.append(config.get_text_config().vocab_size)
        tokenizers.append(AutoTokenizer.from_pretrained(source, **common))
    check_tokens(target, tokenizers[0], draft, tokenizers[1])
    if vocabularies[1] > vocabularies[0]:
        raise ValueError(
            f"draft model {draft!r} has a vocabulary of {vocabularies[1]}, target {target!r} one of {vocabularies[0]}; "
            "expected no more than the target's; give a draft model made for this target"
        )


def check_tokens(target: str, theirs: PreTrainedTokenizerBase, draft: str, ours: PreTrainedTokenizerBase) -> None:
    """Whether ids mean the same tokens to both. A draft model may lack added (special) tokens: it never proposes them.

    Raises:
        ValueError: naming the first token that differs.
    """
    wanted, got = ({index: token for token, index in tokenizer.get_vocab().items()} for tokenizer in (theirs, ours))
    for index in sorted(wanted.keys() | got.keys()):
        there, here = wanted.get(index), got.get(index)
        if there == here or (here is None and index in theirs.added_tokens_decoder):
            continue
        says = [f"has {token!r}" if token is not None else "has none" for token in (there, here)]
        raise ValueError(
            f"draft model {draft!r} has another tokenizer than target {target!r}: at token {index} the target {says[0]}, the draft model "
            f"{says[1]}; verification compares ids, so the tokens must be the same; give a draft model made for this target"
        )
