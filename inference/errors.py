"""What a command does about errors and about other libraries' warnings, so that stderr holds what a user can act on and nothing else."""

import atexit
import io
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from draftsmith.inference.terminal import printable

# Warnings of other libraries about themselves, by logger and by a part of their text. Nothing else that these loggers say is left out.
FOREIGN_WARNINGS = {
    "torchao": "Failed to load ",  # its kernels for other GPUs; transformers imports torchao wherever it is installed
    "torch.utils._pytree": "is an Enum subclass and is now natively supported",  # the way in which torchao registers its classes
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",  # PEFT imports bitsandbytes wherever it is installed
    "DeepSpeed": "Setting accelerator to CPU",  # Accelerate imports DeepSpeed wherever it is installed, whatever the launcher
}
# The same of Python's own warnings: PEFT and `train/distill.py` use names that transformers replaced and keeps until 6.
FOREIGN_DEPRECATION = "`(is_gradient_checkpointing|gradient_checkpointing_enable)` is deprecated"
# Errors of libraries that a user can correct, by module. A module that is not loaded has raised nothing.
LIBRARY_ERRORS = {"torch": "OutOfMemoryError", "safetensors": "SafetensorError", "jinja2": "TemplateError"}
# What torch says where sizes do not fit in the memory of the machine: plain RuntimeErrors.
OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "Storage size calculation overflowed")

_format_warning = warnings.formatwarning


def quiet_libraries() -> None:
    """Leave out the warnings above, and the progress bars of transformers. Call it before transformers is imported."""
    for name in FOREIGN_WARNINGS:
        logging.getLogger(name).addFilter(_concerns_the_user)
    warnings.filterwarnings("ignore", message=FOREIGN_DEPRECATION, category=FutureWarning)
    warnings.formatwarning = _printable_warning
    if "transformers" in sys.modules:
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
    else:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # transformers reads it when it is imported


def _concerns_the_user(record: logging.LogRecord) -> bool:
    return FOREIGN_WARNINGS[record.name] not in record.getMessage()


def _printable_warning(*words: Any, **named: Any) -> str:
    return printable(_format_warning(*words, **named))


def exit_on_error(main: Callable[[list[str]], None], arguments: list[str]) -> None:
    """Run `main(arguments)`. An error that a user can correct becomes one line on stderr and exit status 2, without a traceback.

    Imports no heavy library, so that a `main` which only prints its help stays quick; what `main` imports may be interrupted as well.

    Raises:
        SystemExit: 2 for such an error, or where stdout takes nothing more; 130 for Ctrl-C, 143 for SIGTERM; 141 where the reader of stdout
            is gone (`draftsmith generate ... | head`).
    """
    left_group = threading.Event()
    if "RANK" in os.environ:
        atexit.register(_end_rank, left_group)  # before other libraries register theirs, hence called after them
    try:
        quiet_libraries()
        _prepare_streams()
        with _terminable():
            try:
                main(arguments)
                if _leave_process_group():
                    left_group.set()
            finally:
                sys.stdout.flush()
    except BrokenPipeError:
        _failed_stream()
        raise SystemExit(141) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        if not _correctable(error):
            raise
        with suppress(OSError, ValueError):  # stderr may be closed or full as well
            print(f"error: {_one_line(error)}", file=sys.stderr, flush=True)
        _failed_stream()
        raise SystemExit(2) from None


def _prepare_streams() -> None:
    """Let stdout escape what its encoding lacks, and stand in for streams that are closed.

    Otherwise print() would write to stdout what is meant for a closed stderr, and the next file to be opened would be stdout to C code.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            setattr(sys, name, None)
    if None in (sys.stdin, sys.stdout, sys.stderr):
        while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(descriptor)
    if sys.stdout is None:  # opened for reading, so that it is an error to print a result there
        sys.stdout = open(os.open(os.devnull, os.O_RDONLY), "w")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


@contextmanager
def _terminable() -> Iterator[None]:
    """Context in which SIGTERM ends the process as Ctrl-C does, so that unfinished files are removed and the terminal is restored.

    Not in a rank of a launch, which must end even while it waits for other ranks in a library's code.
    """
    alone = "RANK" not in os.environ and threading.current_thread() is threading.main_thread()
    if not alone or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def terminate(_number: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(143)

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) == terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _one_line(error: Exception) -> str:
    """What the error says, safe to print; an error without words gives its type."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror and not error.filename and (stream := _failed_stream()):
        text = f"{stream}: {error.strerror}"
    elif isinstance(error, MemoryError | RecursionError):
        text = f"{'not enough memory' if isinstance(error, MemoryError) else 'nested too deep'} {f'({text})' if text else ''}".strip()
    return printable(text, keep="") or type(error).__name__


def _failed_stream() -> str:
    """The name of the stream that takes nothing more; "" where both do. From then on nothing is written to it, not even at exit."""
    failed = ""
    for name, stream in (("stderr", sys.stderr), ("stdout", sys.stdout)):
        try:
            stream.flush()
        except OSError:
            failed = name
            with suppress(OSError, ValueError):  # ValueError: a stream in memory
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return failed


def _leave_process_group() -> bool:
    """All ranks leave together: otherwise a rank may be aborted because another one has gone. Returns whether there was a group."""
    torch = sys.modules.get("torch")
    if not torch or not torch.distributed.is_initialized():
        return False
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return True


def _end_rank(left_group: threading.Event) -> None:
    """End a rank that is done, with status 0, before the interpreter ends.

    DeepSpeed keeps groups beyond `destroy_process_group`. A thread of theirs that frees a tensor while the interpreter ends aborts the process
    ("terminate called without an active exception", pytorch issue 190489), although everything was done.
    """
    if left_group.is_set():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _correctable(error: Exception) -> bool:
    """Whether a user can correct it."""
    of_libraries = (getattr(sys.modules[module], name) for module, name in LIBRARY_ERRORS.items() if module in sys.modules)
    kinds = (ValueError, OSError, EOFError, FloatingPointError, OverflowError, MemoryError, RecursionError, *of_libraries)
    return isinstance(error, kinds) or (isinstance(error, RuntimeError) and any(part in str(error) for part in OUT_OF_MEMORY))
