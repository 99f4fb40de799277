"""Suffix decoding with a memory on disk: what earlier requests answered, in this process and in those before it."""

from itertools import chain
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from draftsmith.inference import durable
from draftsmith.inference.drafter import Target
from draftsmith.inference.lookup import END, Suffix

__all__ = ["StoredSuffix"]

FORMAT = "draftsmith suffix memory 1"
MEMORY = 1 << 17  # tokens; in memory each takes about a kilobyte, on disk four bytes


class StoredSuffix(Suffix):
    """`Suffix` whose memory is read from a file, and written to it whenever a request ends.

    The file is replaced at once or not at all. Of two processes that write one file, the last to write wins.

    Args:
        file: is created if it does not exist.
        vocab_size: V of the target.
        tokenizer_hash: of the target's tokenizer.
        memory: tokens to remember.

    Raises:
        ValueError: a link, a folder that does not exist, a file that is no memory of this tokenizer, or a damaged one.
    """

    def __init__(self, file: Path, vocab_size: int, tokenizer_hash: str, memory: int = MEMORY) -> None:
        super().__init__(memory=memory)
        self.file, self._vocab, self._tokenizer_hash = file, vocab_size, tokenizer_hash
        if file.is_symlink():
            raise ValueError(f"suffix memory {str(file)!r} is a link; expected a file of its own; give the file that it leads to")
        if not file.parent.is_dir():
            raise ValueError(f"suffix memory {str(file)!r}: there is no folder {str(file.parent)!r}; make it, or give another file")
        if file.exists():
            self._remember(self._read())

    def bind(self, target: Target, slots: int, context: int) -> None:
        if target.vocab_size != self._vocab:
            raise ValueError(
                f"suffix memory {str(self.file)!r}: got a target of {target.vocab_size} tokens, expected {self._vocab}; give another file"
            )
        super().bind(target, slots, context)

    def drop(self, slots: list[int]) -> None:
        super().drop(slots)
        tokens = torch.tensor(self._finished.tokens, dtype=torch.int32)
        facts = {"format": FORMAT, "tokenizer_hash": self._tokenizer_hash}
        durable.replace(self.file, lambda part: save_file({"tokens": tokens}, part, facts))

    def _read(self) -> list[int]:
        where = f"suffix memory {str(self.file)!r}"
        try:
            with safe_open(self.file, "pt") as content:
                facts, tokens = content.metadata() or {}, content.get_tensor("tokens")
        except (SafetensorError, OSError) as error:
            reason = str(error).strip().split("\n")[0]
            raise ValueError(f"{where} is damaged, or no memory ({reason}); delete it, or give another file") from None
        if facts.get("format") != FORMAT:
            raise ValueError(f"{where}: got format {facts.get('format')!r}, expected {FORMAT!r}; give another file")
        if facts.get("tokenizer_hash") != self._tokenizer_hash:
            raise ValueError(f"{where} has tokens of another tokenizer than the target's; give another file")
        ids = tokens.tolist() if tokens.dim() == 1 and tokens.dtype == torch.int32 else [self._vocab]
        if not all(END <= token < self._vocab for token in ids) or ids[-1:] not in ([], [END]):
            raise ValueError(f"{where} is damaged: it has no tokens of the target's {self._vocab}; delete it, or give another file")
        return ids

    def _remember(self, tokens: list[int]) -> None:
        ends = [index for index, token in enumerate(tokens) if token == END]
        for begin, end in zip(chain([0], (end + 1 for end in ends)), ends, strict=False):
            if len(tokens) - begin <= self.memory:  # of a larger memory the last answers
                self._finished.extend(tokens[begin:end])
                self._finished.close()
