"""A rank of a real `accelerate launch`: it trains the numbers of test_loop.py slowly until a fault.

fault_rank.py <output folder> <fate in step 4 of the last rank: none | exit | kill | hang | stop> [key=value of the train section ...]

It writes pid-<rank>, and code-<rank> when it ends by itself, beside the output folder.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from fault_forks import at_step, training

from draftsmith.inference.errors import exit_on_error

FATES = {
    "none": lambda: None,
    "exit": lambda: os._exit(1),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda: time.sleep(600),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


def main(words: list[str]) -> None:
    output, fate = Path(words[0]), FATES[words[1]]
    settings = {name: json.loads(value) for name, value in (word.split("=") for word in words[2:])}
    slow = settings.pop("slow", 0.0)
    last = int(os.environ.get("WORLD_SIZE", "1")) - 1
    training(output, rank, objective=at_step(4, last, fate, slow), **settings)


if __name__ == "__main__":
    rank = int(os.environ.get("RANK", "0"))
    beside = Path(sys.argv[1]).parent
    (beside / f"pid-{rank}").write_text(str(os.getpid()))
    code = 0
    try:
        exit_on_error(main, sys.argv[1:])
    except SystemExit as ended:
        code = ended.code
        raise
    finally:
        (beside / f"code-{rank}").write_text(str(code))
