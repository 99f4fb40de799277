"""Errors that a user can mend become one line on stderr, without a traceback."""

import sys
from collections.abc import Callable


def exit_on_error(main: Callable[[list[str]], None], arguments: list[str], usage: str | None = None) -> None:
    """Run `main`; errors that a person can mend are one line on stderr and exit 2, without a traceback.

    With a `usage`, no arguments or --help print it.
    """
    if usage is not None and (not arguments or arguments[0] in ("-h", "--help")):
        print(usage.strip())
        raise SystemExit(0 if arguments else 2)
    if usage is None and not {"-h", "--help"}.isdisjoint(arguments):
        main(arguments)  # argparse prints the help and exits
        return
    import torch  # late, so that --help stays quick
    from jinja2 import TemplateError
    from safetensors import SafetensorError
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        main(arguments)
        if torch.distributed.is_initialized():  # part in order, else a rank may be aborted by the others' going
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()
    except BrokenPipeError:  # the reader left: `draftsmith generate ... | head`
        sys.stderr.close()
        raise SystemExit(141) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except (
        ValueError,
        OSError,
        SafetensorError,
        TemplateError,
        EOFError,
        FloatingPointError,
        MemoryError,
        torch.OutOfMemoryError,
    ) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
