"""Examples become token ids with loss masks, in worker processes where there are many."""

import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, groupby, islice
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from draftsmith.data.chat import Template, Unusable
from draftsmith.data.conversations import Conversation
from draftsmith.data.dedup import MinHasher, Signature
from draftsmith.data.loops import repeats
from draftsmith.inference.machine import cores

CHUNK = 256  # examples of one task of a worker
SERIAL_EXAMPLES = 2048  # examples to encode in this process before starting workers is worth the time
ALL_SUPERVISED = "every token is supervised"
LOOPS = "an answer repeats itself"


class EncodedExample(NamedTuple):
    """A conversation or text as token ids.

    Attributes:
        id: the example's id.
        domain: its domain.
        chat: whether it is a conversation.
        pieces: (ids int32, mask bool), each of at most S tokens.
        problem: the reason why it cannot be trained on, or "".
        cut: tokens that did not fit.
        unknown: tokens that the tokenizer has no entry for.
        signature: by which duplicates are recognised.
    """

    id: str
    domain: str
    chat: bool
    pieces: list[tuple[np.ndarray, np.ndarray]]
    problem: str
    cut: int
    unknown: int
    signature: Signature


class Encoder:
    """Turns conversations and texts into EncodedExamples. It is pickled to the workers.

    Args:
        tokenizer: the target's; it needs an end-of-text token.
        seq_len: S, the most tokens of a piece.
        last_turn: only the last assistant turn of a conversation is supervised.
        prompts: texts of the evaluation prompts.
        loops: examples with an answer that repeats itself (`loops.repeats`) are usable as well.

    Raises:
        ValueError: a tokenizer without end-of-text token, or a chat template for which there is no loss mask.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, seq_len: int, last_turn: bool, prompts: tuple[str, ...], loops: bool = False
    ) -> None:
        self.tokenizer, self.seq_len, self.loops = tokenizer, seq_len, loops
        self.template = Template(tokenizer, last_turn) if tokenizer.chat_template else None
        self.minhasher = MinHasher(prompts)
        if not isinstance(tokenizer.eos_token_id, int):
            raise ValueError("the target's tokenizer has no end-of-text token, which ends a text; set its eos_token")
        self.end = tokenizer.eos_token_id
        # What the tokenizer puts before any text: mostly nothing, or BOS, without which some models' features are of no use.
        self.prefix = [token for token in tokenizer.encode("") if token != self.end or token == tokenizer.bos_token_id][:1]

    def __call__(self, conversation: Conversation) -> EncodedExample:
        """Encode a conversation or text. What cannot be trained on has a `problem`."""
        name, domain, size = conversation.id, conversation.domain, self.seq_len
        chat = conversation.messages is not None
        signature = self.minhasher.sign(conversation)
        try:
            ids, mask = self._tokens(conversation)
        except Unusable as error:
            return EncodedExample(name, domain, chat, [], error.reason, 0, 0, signature)
        complete = len(ids) <= size
        if chat or conversation.prompt:
            cuts, cut = [slice(0, size)], max(0, len(ids) - size)
        else:
            cuts, cut = [slice(start, start + size) for start in range(0, len(ids), size)], 0
        pieces = [(np.array(ids[span], dtype=np.int32), np.array(mask[span], dtype=bool)) for span in cuts]
        problem = ""
        if not any(mask[1:]):
            problem = "no token is supervised"
        elif not any(piece[1:].any() for _, piece in pieces):
            problem = f"the answer begins past {size} tokens"
        elif chat and complete and all(mask[1:]):
            problem = ALL_SUPERVISED
        elif (chat or conversation.prompt) and not self.loops and any(map(repeats, _answers(ids[:size], mask[:size]))):
            problem = LOOPS
        unknown = self.tokenizer.unk_token_id
        unknowns = (
            ids.count(unknown) if isinstance(unknown, int) and unknown != self.end else 0
        )  # GPT-2's unknown token is the one that ends a text
        return EncodedExample(name, domain, chat, pieces, problem, cut, unknowns, signature)

    def _tokens(self, conversation: Conversation) -> tuple[list[int], list[bool]]:
        if conversation.messages is not None and self.template:
            return self.template.encode(conversation.messages, conversation.tools)
        text, prompt = conversation.text, conversation.prompt
        if conversation.messages is not None and not text:
            Template(self.tokenizer)  # raises: there is none
        if prompt and prompt >= len(text):
            raise Unusable("no answer")
        try:
            encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=bool(prompt), verbose=False)
        except (UnicodeEncodeError, TypeError):
            raise Unusable("text that is no valid Unicode") from None
        ids = encoding["input_ids"]
        mask = [end > prompt for _, end in encoding["offset_mapping"]] if prompt else [True] * len(ids)
        if not conversation.cut:
            ids, mask = [*ids, self.end], [*mask, True]
        if not self.prefix:
            return ids, mask
        size = self.seq_len - len(self.prefix)
        starts = range(0, len(ids), size)
        return (
            list(chain.from_iterable(self.prefix + ids[start : start + size] for start in starts)),
            list(chain.from_iterable([False] * len(self.prefix) + mask[start : start + size] for start in starts)),
        )


def _answers(ids: list[int], mask: list[bool]) -> list[list[int]]:
    """The runs of supervised tokens."""
    runs = groupby(zip(ids, mask, strict=True), key=itemgetter(1))
    return [[token for token, _ in run] for supervised, run in runs if supervised]


def encoded(examples: Iterable[Conversation], encoder: Encoder, num_proc: int | None) -> Iterator[EncodedExample]:
    """Each example, encoded, in order: a few in this process, many in `num_proc` processes (None: one for each core)."""
    examples = iter(examples)
    yield from map(encoder, islice(examples, SERIAL_EXAMPLES))
    chunks = iter(lambda: list(islice(examples, CHUNK)), [])
    first = next(chunks, None)
    if first is None:
        return
    num_proc = min(num_proc or cores(), 8 * cores())  # each has half a gigabyte of modules
    if num_proc == 1:
        for chunk in chain([first], chunks):
            yield from map(encoder, chunk)
        return
    # Not fork: a child of a process whose tokenizer or torch has threads hangs. The fork server has none and imports once.
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    context.set_forkserver_preload([__name__])
    pending: deque = deque()
    with ProcessPoolExecutor(num_proc, context, _start_worker, (encoder,)) as pool:
        try:
            started = pool.submit(_encode, [])
            for chunk in chain([first], chunks):
                if not started.done():  # importing takes seconds, in which this process can encode many
                    yield from map(encoder, chunk)
                    continue
                pending.append(pool.submit(_encode, chunk))
                if len(pending) > 2 * num_proc:
                    yield from pending.popleft().result()
            while pending:
                yield from pending.popleft().result()
        except BrokenProcessPool:
            raise OSError("a worker process died while it tokenised (out of memory?); lower data.num_proc and run it again") from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


_encoder: list[Encoder] = []  # a worker's own


def _start_worker(encoder: Encoder) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    _encoder[:] = [encoder]


def _encode(examples: list[Conversation]) -> list[EncodedExample]:
    return list(map(_encoder[0], examples))
