"""Rows of .parquet and .arrow files, each column checked: offsets in bounds, text in UTF-8, pages by their checksums where they have them."""

from collections.abc import Iterator
from contextlib import ExitStack
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
    number, size = 0, Size(path)
    try:
        with ExitStack() as stack:
            for batch in _batches(path, kind, stack):
                batch.validate(full=True)
                size.add(batch.nbytes)
                for start in range(0, batch.num_rows, BATCH):
                    for value in batch.slice(start, BATCH).to_pylist():
                        number += 1
                        yield number, value
    except (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
        raise ValueError(
            f"{path}: not a complete {kind} file of the kind `datasets` writes ({' '.join(str(error).split())}); copy or download it again"
        ) from None


def _batches(path: Path, kind: str, stack: ExitStack) -> "Iterator[pa.RecordBatch]":
    import pyarrow as pa
    import pyarrow.parquet as pq

    if kind == ".arrow":
        yield from stack.enter_context(pa.ipc.open_stream(stack.enter_context(pa.memory_map(str(path)))))
    else:
        table = stack.enter_context(pq.ParquetFile(path, page_checksum_verification=True))
        yield from table.iter_batches(BATCH)
