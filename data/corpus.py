"""Text and conversations -> fixed-length rows of token ids with a loss mask, tokenised once and kept on disk."""

import gzip
import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from jinja2 import TemplateError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from draftsmith.data import chat, stdlib
from draftsmith.models.identity import tokenizer_hash

HELD_OUT_IN = 20  # one document in twenty, where no held-out file is named
SEPARATOR = "<|endoftext|>"


@dataclass(frozen=True, slots=True)
class Corpus:
    """`ids` [rows, S] int32 and `mask` [rows, S] bool: True where a token bears loss (as something to predict).

    `key` changes with the source's content, the tokenizer, the split and S.
    """

    ids: Tensor
    mask: Tensor
    key: str

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, rows: Tensor) -> dict[str, Tensor]:
        """input_ids [B,S] int64, loss_mask [B,S] bool, sample_id [B] int64."""
        return {"input_ids": self.ids[rows].long(), "loss_mask": self.mask[rows], "sample_id": rows}


def load(train: str, valid: str | None, split: str, tokenizer: PreTrainedTokenizerBase, seq_len: int, cache: str | Path) -> Corpus:
    """The `split` ("train" or "valid") of a source: `stdlib`, or a .txt / .jsonl file (also .gz).

    Plain text is joined with the end-of-text token and cut into rows of `seq_len`; a conversation is a row of its own, cut or
    padded. Raises ValueError for a missing or empty source, a broken line, and rows none of which bears loss.
    """
    source = valid if valid and split == "valid" else train
    parts = (_fingerprint(source), tokenizer_hash(tokenizer), tokenizer.chat_template, tokenizer.eos_token_id, split, bool(valid), seq_len)
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:20]
    path = Path(cache) / f"{split}-{key}.safetensors"
    if path.is_file():
        try:
            stored = load_file(path)
            return Corpus(stored["ids"], stored["mask"].bool(), key)
        except (SafetensorError, KeyError):
            path.unlink()  # written by halves; it costs only the tokenising to write it again
    print(f"tokenising {source} ({split}) ...", file=sys.stderr, flush=True)
    rows = list(_rows(documents(source, split, whole=bool(valid)), tokenizer, seq_len))
    if not rows:
        raise ValueError(
            f"{source}: no {split} rows of {seq_len} tokens; the source is empty or too short, give more text or a smaller data.seq_len"
        )
    corpus = Corpus(torch.tensor([ids for ids, _ in rows], dtype=torch.int32), torch.tensor([mask for _, mask in rows]), key)
    silent = int((~corpus.mask.any(1)).sum())
    if silent:
        raise ValueError(
            f"{source}: {silent} of {len(rows)} {split} rows bear no loss (no assistant turn within data.seq_len={seq_len}); "
            "drop them or raise data.seq_len"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"ids": corpus.ids, "mask": corpus.mask.to(torch.uint8)}, temporary := path.with_suffix(".part"))
    temporary.replace(path)
    return corpus


def documents(source: str, split: str, whole: bool = False) -> Iterator[str | list[dict]]:
    """Texts and conversations of `split`; all of them if `whole`.

    One in HELD_OUT_IN is held out. Where there are fewer, the last part of that size of each text is: a book is one document.
    """
    if source == "stdlib":
        yield from (text for _, text in stdlib.modules(split))
        return
    found = list(_read(Path(source)))
    if whole or len(found) >= HELD_OUT_IN:
        yield from (text for n, text in enumerate(found) if whole or (n % HELD_OUT_IN == HELD_OUT_IN - 1) == (split == "valid"))
        return
    for document in found:
        if not isinstance(document, str):
            raise ValueError(f"{source}: {len(found)} conversations are too few to hold some out; name a held-out file in data.valid")
        cut = len(document) - len(document) // HELD_OUT_IN
        yield document[cut:] if split == "valid" else document[:cut]


def _read(path: Path) -> Iterator[str | list[dict]]:
    if not path.is_file():
        raise ValueError(f"data file {str(path)!r} not found; give a .txt or .jsonl file (also .gz), or `stdlib`")
    kind = path.suffixes[-2] if path.suffix == ".gz" and len(path.suffixes) > 1 else path.suffix
    if kind not in (".txt", ".jsonl"):
        raise ValueError(f"data file {str(path)!r}: expected .txt or .jsonl (also .gz)")
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8", errors="replace") as lines:
        if kind == ".txt":
            yield from (text for text in lines.read().split(SEPARATOR) if text.strip())
            return
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _row(line, f"{path}:{number}")


def _row(line: str, where: str) -> str | list[dict]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not a JSON object ({error.msg})") from None
    if isinstance(row, dict) and isinstance(row.get("messages"), list):
        if not all(isinstance(turn, dict) and isinstance(turn.get("role"), str) and "content" in turn for turn in row["messages"]):
            raise ValueError(f"{where}: expected every message to be an object with `role` and `content`")
        return row["messages"]
    if isinstance(row, dict) and isinstance(row.get("text"), str):
        return row["text"]
    raise ValueError(f"{where}: expected a JSON object with `messages` or `text`")


def _rows(found: Iterator[str | list[dict]], tokenizer: PreTrainedTokenizerBase, seq_len: int) -> Iterator[tuple[list[int], list[bool]]]:
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise ValueError("the target's tokenizer has no end-of-text token, which separates documents; set its eos_token")
    buffer: list[int] = []
    for number, document in enumerate(found, 1):
        if isinstance(document, str):
            buffer += tokenizer.encode(document, add_special_tokens=False, verbose=False) + [end]
            whole = len(buffer) // seq_len * seq_len
            yield from ((buffer[i : i + seq_len], [True] * seq_len) for i in range(0, whole, seq_len))
            buffer = buffer[whole:]
        else:
            try:
                ids, mask = chat.encode(document, tokenizer)
            except (ValueError, TemplateError) as error:
                raise ValueError(f"conversation {number}: {error}") from None
            missing = max(0, seq_len - len(ids))
            yield ids[:seq_len] + [end] * missing, mask[:seq_len] + [False] * missing


def _fingerprint(source: str) -> str:
    if source == "stdlib":
        digest = hashlib.sha256()
        for split in ("train", "valid"):
            for name, text in stdlib.modules(split):
                digest.update(f"{name} {len(text)} ".encode())
        return digest.hexdigest()
    path = Path(source)
    if not path.is_file():
        raise ValueError(f"data file {source!r} not found; give a .txt or .jsonl file (also .gz), or `stdlib`")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
