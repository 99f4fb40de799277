"""Peak memory and time of the chunked losses beside the plain ones: python -m draftsmith.train.benchmarks.losses

Each measurement runs in a process of its own, and forms alternate. The peak is what the loss adds to the resident set of that process (on a
GPU: to the allocator's memory). It includes the gradient of the head's weight in all forms, but not the inputs. `student-…` are losses of
`chunked_draft_loss`. Liger's fused linear JSD is measured too where liger_kernel is installed, and on a GPU the Triton kernels.

Letters: S positions · V target vocabulary · H hidden size.
"""

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.inference.kernels import missing, use
from draftsmith.train.losses.chunked import chunked_cross_entropy, chunked_kl
from draftsmith.train.losses.draft import chunked_draft_loss

LOSSES = ("ce", "kl", "student-kl", "student-tv", "student-jsd")


def chunked(loss: str, x: Tensor, head: Tensor, target_hidden: Tensor, target_head: Tensor, targets: Tensor) -> Tensor:
    weight = torch.ones_like(targets, dtype=x.dtype)
    if loss == "ce":
        return chunked_cross_entropy(x, head, targets, weight).sum
    if loss == "kl":
        return chunked_kl(x, head, target_hidden, target_head, weight).sum
    return chunked_draft_loss(x[None], head, target_hidden, target_head, weight[None], [0], None, loss.removeprefix("student-")).sum


def plain(loss: str, x: Tensor, head: Tensor, target_hidden: Tensor, target_head: Tensor, targets: Tensor) -> Tensor:
    if loss == "ce":
        return F.cross_entropy(x @ head.T, targets, reduction="sum")
    log_p, log_q = (target_hidden @ target_head.T).log_softmax(-1), (x @ head.T).log_softmax(-1)
    if loss == "student-tv":
        return len(x) - torch.minimum(log_p.exp(), log_q.exp()).sum()
    if loss == "student-jsd":
        log_m = torch.logaddexp(log_p, log_q) - math.log(2)
        return (_kl(log_p, log_m) + _kl(log_q, log_m)) / 2
    return _kl(log_p, log_q)


def liger(loss: str, x: Tensor, head: Tensor, target_hidden: Tensor, target_head: Tensor, targets: Tensor) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss  # pyright: ignore[reportMissingImports]

    mean = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.5, compiled=False)
    return mean(x, head, target_hidden, target_head, targets) * len(x)


def fused(*problem: Any) -> Tensor:
    with use(True):
        return chunked(*problem)


FORMS = {"plain": plain, "chunked": chunked, "kernels": fused, "liger": liger}


def inputs(positions: int, vocab: int, hidden: int, device: str) -> tuple[Tensor, ...]:
    """Random hidden states [S,H] and heads [V,H] of a student and of a target, and token ids [S]."""
    torch.manual_seed(0)
    x = torch.randn(positions, hidden, device=device, requires_grad=True)
    head = torch.randn(vocab, hidden, device=device).mul_(hidden**-0.5).requires_grad_()
    target_hidden, target_head = torch.randn_like(x), torch.randn_like(head).mul_(hidden**-0.5)
    return x, head, target_hidden, target_head, torch.randint(0, vocab, (positions,), device=device)


def measure(loss: str, form: str, positions: int, vocab: int, hidden: int) -> dict[str, float]:
    """One forward and backward: the peak memory that they add in GiB, their seconds, and the loss's value."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    FORMS[form](loss, *inputs(8, vocab if device == "cuda" else 16, 8, device)).backward()  # libraries load, kernels compile
    problem = inputs(positions, vocab, hidden, device)
    (problem[0][:8] @ problem[1].T).sum().backward()  # gradients exist
    before = _peak(device)
    start = time.perf_counter()
    total = FORMS[form](loss, *problem)
    total.backward()
    value = total.item()
    return {"gib": (_peak(device) - before) / 2**30, "seconds": time.perf_counter() - start, "value": value}


def measure_in_process(loss: str, form: str, *sizes: int) -> dict[str, float]:
    """`measure` in a process of its own."""
    arguments = [f"--{name}={size}" for name, size in zip(("positions", "vocab", "hidden"), sizes, strict=True)]
    command = [sys.executable, "-m", "draftsmith.train.benchmarks.losses", *arguments, "--worker", loss, form]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def forms(loss: str) -> list[str]:
    """The forms to measure. Liger's loss must be equal to ours on a small problem. Raises RuntimeError if it is not."""
    ours = ["plain", "chunked"]
    if torch.cuda.is_available() and not missing(torch.device("cuda")):
        ours.append("kernels")
    if loss != "student-jsd":
        return ours
    if not find_spec("liger_kernel"):
        print("student-jsd: liger_kernel is not installed, so its loss is left out")
        return ours
    theirs, same = (measure_in_process(loss, form, 64, 1000, 32)["value"] for form in ("liger", "chunked"))
    if not math.isclose(theirs, same, rel_tol=1e-4):
        raise RuntimeError(f"{loss}: Liger's loss is {theirs}, ours {same}; expected the same quantity")
    return [*ours, "liger"]


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return F.kl_div(log_q, log_p, reduction="sum", log_target=True)


def _peak(device: str) -> float:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # KiB on Linux


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--positions", type=int, default=4096, help="S (default 4096)")
    parser.add_argument("--vocab", type=int, default=128_000, help="V (default 128000)")
    parser.add_argument("--hidden", type=int, default=256, help="H (default 256)")
    parser.add_argument("--repeats", type=int, default=3, help="processes for each form; medians are printed (default 3)")
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=LOSSES, help="losses to measure (default: all)")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = [options.positions, options.vocab, options.hidden]
    if options.worker:
        print(json.dumps(measure(*options.worker, *sizes)))
        return
    print(f"S={sizes[0]} V={sizes[1]} H={sizes[2]}, fp32, medians of {options.repeats}, forward and backward")
    print(f"{'loss':12}{'form':10}{'peak GiB':>10}{'seconds':>10}{'value':>14}{'over chunked: peak':>20}{'seconds':>10}")
    for loss in options.losses:
        runs: dict[str, list[dict[str, float]]] = {form: [] for form in forms(loss)}
        for _ in range(options.repeats):
            for form, results in runs.items():
                results.append(measure_in_process(loss, form, *sizes))
        medians = {form: {key: statistics.median(run[key] for run in results) for key in results[0]} for form, results in runs.items()}
        ours = medians["chunked"]
        for form, result in medians.items():
            print(f"{loss:12}{form:10}{result['gib']:10.2f}{result['seconds']:10.2f}{result['value']:14.2f}", end="")
            print(f"{result['gib'] / ours['gib']:19.1f}x{result['seconds'] / ours['seconds']:9.2f}x", flush=True)


if __name__ == "__main__":
    main()
