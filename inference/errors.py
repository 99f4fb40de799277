"""What a command does about errors and about other libraries' warnings, so that stderr holds what a user can act on and nothing else."""

import logging
import os
import sys
import warnings
from collections.abc import Callable

# Warnings of other libraries about themselves, by logger and by a part of their text. Nothing else that these loggers say is left out.
FOREIGN_WARNINGS = {
    "torchao": "Failed to load ",  # its kernels for other GPUs; transformers imports torchao wherever it is installed
    "torch.utils._pytree": "is an Enum subclass and is now natively supported",  # the way in which torchao registers its classes
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",  # PEFT imports bitsandbytes wherever it is installed
    "DeepSpeed": "Setting accelerator to CPU",  # Accelerate imports DeepSpeed wherever it is installed, whatever the launcher
}
# The same of Python's own warnings: PEFT asks transformers for an attribute by its old name.
FOREIGN_DEPRECATION = "`is_gradient_checkpointing` is deprecated"
# Errors of libraries that a user can correct, by module. A module that is not loaded has raised nothing.
LIBRARY_ERRORS = {"torch": "OutOfMemoryError", "safetensors": "SafetensorError", "jinja2": "TemplateError"}


def quiet_libraries() -> None:
    """Leave out the warnings above, and the progress bars of transformers. Call it before transformers is imported."""
    for name in FOREIGN_WARNINGS:
        logging.getLogger(name).addFilter(_concerns_the_user)
    warnings.filterwarnings("ignore", message=FOREIGN_DEPRECATION, category=FutureWarning)
    if "transformers" in sys.modules:
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
    else:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # transformers reads it when it is imported


def _concerns_the_user(record: logging.LogRecord) -> bool:
    return FOREIGN_WARNINGS[record.name] not in record.getMessage()


def exit_on_error(main: Callable[[list[str]], None], arguments: list[str]) -> None:
    """Run `main(arguments)`. An error that a user can correct becomes one line on stderr and exit status 2, without a traceback.

    Imports no heavy library, so that a `main` which only prints its help stays quick.

    Raises:
        SystemExit: 2 for such an error, 130 for Ctrl-C, 141 where the reader of stdout is gone (`draftsmith generate ... | head`).
    """
    quiet_libraries()
    try:
        main(arguments)
        _leave_process_group()
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(141) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        if not isinstance(error, _correctable()):
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None


def _leave_process_group() -> None:
    """All ranks leave together: otherwise a rank may be aborted because another one has gone."""
    torch = sys.modules.get("torch")
    if torch and torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def _correctable() -> tuple[type[Exception], ...]:
    """The errors that a user can correct."""
    of_libraries = (getattr(sys.modules[module], name) for module, name in LIBRARY_ERRORS.items() if module in sys.modules)
    return (ValueError, OSError, EOFError, FloatingPointError, MemoryError, *of_libraries)
