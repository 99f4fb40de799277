"""Whether a checkpoint may draft for a target, by their configs and tokenizers: no weights are read.

Vocabularies may differ in padding, logits that stand for no token (151,936 and 152,064 with the same tokenizer, say).
"""

import os

from transformers import PreTrainedTokenizerBase

from draftsmith.models.model_files import read_config, read_tokenizer, resolve_path
from draftsmith.models.target import KEY, Target
from draftsmith.models.weights import check_folder

__all__ = ["check_draft", "check_pair", "check_tokens", "have_same_tokens"]


def check_pair(target: str, draft: str, *, revision: str | None = None, trust_remote_code: bool = False) -> None:
    """Whether `draft` may draft for `target`; both are folders or Hub ids, and `revision` is the target's.

    Raises:
        FileNotFoundError: no such folder, or no complete model in it.
        ValueError: an architecture that cannot be tree-verified, other tokens, or tokens that the target has no logits for.
    """
    vocab_size, theirs = _read(target, revision, trust_remote_code, KEY)
    _, ours = _read(draft, None, trust_remote_code, "--drafter")
    _check(target, theirs, vocab_size, draft, ours)


def have_same_tokens(target: str, draft: str, *, revision: str | None = None, trust_remote_code: bool = False) -> bool:
    """Whether `draft` has the target's tokens, so that it may draft for it as `check_pair` says; else it needs another way to.

    Raises:
        FileNotFoundError, ValueError: as `check_pair`, other tokens apart.
    """
    vocab_size, theirs = _read(target, revision, trust_remote_code, KEY)
    _, ours = _read(draft, None, trust_remote_code, "--drafter")
    if _difference(theirs, ours):
        return False
    _check(target, theirs, vocab_size, draft, ours)
    return True


def check_draft(target: Target, draft: str, *, revision: str | None = None, trust_remote_code: bool = False) -> None:
    """As `check_pair` for a loaded target; `revision` is the draft model's.

    Raises:
        FileNotFoundError, ValueError: as `check_pair`, and for a target without a tokenizer.
    """
    if target.tokenizer is None:
        raise ValueError(
            f"target {target.name!r} has no tokenizer, so that tokens cannot be compared; copy tokenizer.json beside its weights"
        )
    _, ours = _read(draft, revision, trust_remote_code, "student.start")
    _check(target.name, target.tokenizer, target.vocab_size, draft, ours)


def check_tokens(target: str, theirs: PreTrainedTokenizerBase, draft: str, ours: PreTrainedTokenizerBase) -> None:
    """Whether ids mean the same tokens to both. A draft model may lack added (special) tokens: it never proposes them.

    Raises:
        ValueError: naming the first token that differs.
    """
    if difference := _difference(theirs, ours):
        raise ValueError(
            f"draft model {draft!r} has another tokenizer than target {target!r}: {difference}; ids are compared here, so the tokens must be the "
            f"same; give a draft model made for this target (`--drafter strings:{draft}` drafts by text)"
        )


def _difference(theirs: PreTrainedTokenizerBase, ours: PreTrainedTokenizerBase) -> str:
    """The first token that differs between a target's tokenizer and a draft model's, in words; "" where none does."""
    wanted, got = ({index: token for token, index in tokenizer.get_vocab().items()} for tokenizer in (theirs, ours))
    for index in sorted(wanted.keys() | got.keys()):
        target_token, draft_token = wanted.get(index), got.get(index)
        if target_token == draft_token or (draft_token is None and index in theirs.added_tokens_decoder):
            continue
        says = [f"has {token!r}" if token is not None else "has none" for token in (target_token, draft_token)]
        return f"at token {index} the target {says[0]}, the draft model {says[1]}"
    return ""


def _read(path: str, revision: str | None, trust_remote_code: bool, key: str) -> tuple[int, PreTrainedTokenizerBase]:
    """A model's number of logits and its tokenizer. Errors name `key`, where `path` was written.

    Raises:
        FileNotFoundError, ValueError: the folder is incomplete.
    """
    source = resolve_path(path, key)
    local = os.path.isdir(source)
    if local:
        check_folder(source)
    config = read_config(path, revision=revision, trust_remote_code=trust_remote_code, key=key)
    tokenizer = read_tokenizer(path, revision=revision, trust_remote_code=trust_remote_code, key=key)
    if tokenizer is None:
        raise ValueError(f"{path!r} has no tokenizer beside its weights, so that its tokens cannot be compared; copy tokenizer.json there")
    return config.get_text_config().vocab_size, tokenizer


def _check(target: str, theirs: PreTrainedTokenizerBase, vocab_size: int, draft: str, ours: PreTrainedTokenizerBase) -> None:
    check_tokens(target, theirs, draft, ours)
    token, index = max(ours.get_vocab().items(), key=lambda entry: entry[1])
    if index >= vocab_size:
        raise ValueError(
            f"draft model {draft!r} has token {index} {token!r}, target {target!r} only {vocab_size} logits, so that it can never be "
            "accepted; give a draft model made for this target"
        )
