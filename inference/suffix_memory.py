"""Suffix decoding with a memory on disk: what earlier requests answered, in this process and in those before it."""

import json
import warnings
from itertools import chain
from pathlib import Path

from draftsmith.inference.drafter import Target
from draftsmith.inference.durable import write_text
from draftsmith.inference.lookup import END, Suffix
from draftsmith.inference.reading import field, read_json

__all__ = ["StoredSuffix"]

FORMAT = "draftsmith suffix memory 1"
MEMORY = 1 << 17  # tokens; in memory each takes 200 to 400 bytes, on disk about six


class StoredSuffix(Suffix):
    """`Suffix` whose memory is read from a file, and written to it whenever a request ends.

    The file is replaced at once or not at all. Of two processes that write one file, the last to write wins.

    Args:
        file: is created if it does not exist and is written to.
        vocab_size: V of the target.
        tokenizer_hash: of the target's tokenizer.
        memory: tokens to remember.
        write: whether to write; an evaluation does not, so that it leaves no answers and finds none of its own.

    Raises:
        ValueError: a link, a folder that does not exist or cannot be written to, a file that is no memory of this tokenizer, or a damaged one.
    """

    def __init__(self, file: Path, vocab_size: int, tokenizer_hash: str, memory: int = MEMORY, *, write: bool = True) -> None:
        super().__init__(memory=memory)
        self.file, self._vocab, self._tokenizer_hash, self._write = file, vocab_size, tokenizer_hash, write
        self._opened: list[int] = []  # the tokens of the file
        if file.is_dir():
            raise ValueError(f"suffix memory {str(file)!r} is a folder; expected a file; give one, as in suffix:memory.json")
        if file.is_symlink():
            raise ValueError(f"suffix memory {str(file)!r} is a link; expected a file of its own; give the file that it leads to")
        if not file.parent.is_dir():
            raise ValueError(f"suffix memory {str(file)!r}: there is no folder {str(file.parent)!r}; make it, or give another file")
        if file.exists():
            self._opened = self._read()
            self._remember(self._opened)
        elif write:
            try:
                self._save()
            except OSError as error:
                raise ValueError(f"suffix memory {str(file)!r} cannot be written ({error.strerror}); give another file") from None

    def bind(self, target: Target, slots: int, context: int) -> None:
        if target.vocab_size != self._vocab:
            raise ValueError(
                f"suffix memory {str(self.file)!r}: got a target of {target.vocab_size} tokens, expected {self._vocab}; give another file"
            )
        super().bind(target, slots, context)

    def drop(self, slots: list[int]) -> None:
        super().drop(slots)
        if self._write:
            try:
                self._save()
            except OSError as error:  # a full disk must not cost an answer
                self._write = False
                text = f"suffix memory {str(self.file)!r} cannot be written any more ({error.strerror}); it stays as it is"
                warnings.warn(text, stacklevel=2)

    def _save(self) -> None:
        facts = {"format": FORMAT, "tokenizer_hash": self._tokenizer_hash, "tokens": self._finished.tokens}
        write_text(self.file, json.dumps(facts) + "\n")

    def forget(self) -> None:
        super().forget()
        self._remember(self._opened)

    def _read(self) -> list[int]:
        where = f"suffix memory {str(self.file)!r}"
        try:
            facts = read_json(self.file)
            written, tokens = field(facts, "format", str, self.file), field(facts, "tokens", list, self.file)
        except (ValueError, OSError) as error:
            raise ValueError(f"{where} is damaged, or no memory ({error}); delete it, or give another file") from None
        if written != FORMAT:
            raise ValueError(f"{where}: got format {written!r}, expected {FORMAT!r}; give another file")
        if facts.get("tokenizer_hash") != self._tokenizer_hash:
            raise ValueError(f"{where} has tokens of another tokenizer than the target's; give another file")
        if not all(type(token) is int and END <= token < self._vocab for token in tokens) or tokens[-1:] not in ([], [END]):
            raise ValueError(f"{where} is damaged: it has no tokens of the target's {self._vocab}; delete it, or give another file")
        return tokens

    def _remember(self, tokens: list[int]) -> None:
        ends = [index for index, token in enumerate(tokens) if token == END]
        for begin, end in zip(chain([0], (end + 1 for end in ends)), ends, strict=False):
            if len(tokens) - begin <= self.memory:  # of a larger memory the last answers
                self._finished.extend(tokens[begin:end])
                self._finished.close()
