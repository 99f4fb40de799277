"""Rows of .parquet and .arrow files, each column checked: offsets in bounds, text in UTF-8, pages by their checksums where they have them."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.data.text_files import Size, check_regular

if TYPE_CHECKING:
    import pyarrow as pa

BATCH = 256  # rows that are in memory as Python objects


def rows(path: Path, kind: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbered rows of a table.

    Args:
        path: a file as `datasets` writes it.
        kind: ".parquet" or ".arrow".

    Raises:
        ValueError: it is damaged or cut off, is of another kind, or expands without bound.
    """
    import pyarrow as pa

    check_regular(path, "data file")
    try:
        # All of it first, which is quick beside the tokenizer: damage at the end is then no hour late, and a bomb has no effect.
        size = Size(path)
        for batch in _batches(path, kind):
            batch.validate(full=True)
            size.add(sum(_plain(column).nbytes for column in batch.columns))
        slices = (batch.slice(start, BATCH) for batch in _batches(path, kind) for start in range(0, batch.num_rows, BATCH))
        yield from enumerate((value for part in slices for value in part.to_pylist()), 1)
    except (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
        raise ValueError(
            f"{path}: not a complete {kind} file of the kind `datasets` writes ({' '.join(str(error).split())}); copy or download it again"
        ) from None


def as_json(value: Any) -> Any:
    """An example as JSON has it: tables give every example each key that any of them has, and have times, decimals and bytes."""
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [as_json(item) for item in value]
    return value if isinstance(value, str | int | float | None) else str(value)


def _plain(column: "pa.Array") -> "pa.Array":
    """The column as it is in memory once it is read: a dictionary holds each text once, its rows do not."""
    return getattr(column, "dictionary_decode", lambda: column)()


def _batches(path: Path, kind: str) -> "Iterator[pa.RecordBatch]":
    import pyarrow as pa
    import pyarrow.parquet as pq

    if kind == ".arrow":
        with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as stream:
            yield from stream
    else:
        with pq.ParquetFile(path, page_checksum_verification=True) as table:
            yield from table.iter_batches(BATCH)
