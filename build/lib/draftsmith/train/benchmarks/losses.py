"""Peak memory and time of the chunked losses beside the plain ones: python -m draftsmith.train.benchmarks.losses

Each measurement is a process of its own, forms alternating: the peak is what the loss adds to the resident set of that process
(on a GPU: to the allocator's), inputs not counted; the gradient of the head's weight is, in all forms. `student-…` are the losses of
one student under one teacher by `chunked_draft_loss`; Liger's fused linear JSD is measured beside it where liger_kernel is installed,
and on a GPU the chunked form with `loss_kernels`.

Letters: S positions · V vocabulary · H hidden size.
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


def chunked(loss: str, x: Tensor, head: Tensor, teacher: Tensor, teacher_head: Tensor, targets: Tensor) -> Tensor:
    weight = torch.ones_like(targets, dtype=x.dtype)
    if loss == "ce":
        return chunked_cross_entropy(x, head, targets, weight).sum
    if loss == "kl":
        return chunked_kl(x, head, teacher, teacher_head, weight).sum
    return chunked_draft_loss(x[None], head, teacher, teacher_head, weight[None], [0], None, loss.removeprefix("student-")).sum


def plain(loss: str, x: Tensor, head: Tensor, teacher: Tensor, teacher_head: Tensor, targets: Tensor) -> Tensor:
    if loss == "ce":
        return F.cross_entropy(x @ head.T, targets, reduction="sum")
    log_p, log_q = (teacher @ teacher_head.T).log_softmax(-1), (x @ head.T).log_softmax(-1)
    if loss == "student-tv":
        return len(x) - torch.minimum(log_p.exp(), log_q.exp()).sum()
    if loss == "student-jsd":
        log_m = torch.logaddexp(log_p, log_q) - math.log(2)
        return (_kl(log_p, log_m) + _kl(log_q, log_m)) / 2
    return _kl(log_p, log_q)


def liger(loss: str, x: Tensor, head: Tensor, teacher: Tensor, teacher_head: Tensor, targets: Tensor) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    mean = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.5, compiled=False)
    return mean(x, head, teacher, teacher_head, targets) * len(x)


def fused(*given: Any) -> Tensor:
    with use(True):
        return chunked(*given)


FORMS = {"plain": plain, "chunked": chunked, "kernels": fused, "liger": liger}


def inputs(positions: int, vocab: int, hidden: int, device: str) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    x = torch.randn(positions, hidden, device=device, requires_grad=True)
    head = torch.randn(vocab, hidden, device=device).mul_(hidden**-0.5).requires_grad_()
    teacher, teacher_head = torch.randn_like(x), torch.randn_like(head).mul_(hidden**-0.5)
    return x, head, teacher, teacher_head, torch.randint(0, vocab, (positions,), device=device)


def once(loss: str, form: str, positions: int, vocab: int, hidden: int) -> dict[str, float]:
    """One forward and backward. Returns added peak memory in GiB, seconds, and the loss's value."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    FORMS[form](loss, *inputs(8, vocab if device == "cuda" else 16, 8, device)).backward()  # libraries load, kernels compile
    given = inputs(positions, vocab, hidden, device)
    (given[0][:8] @ given[1].T).sum().backward()  # gradients exist
    before = _peak(device)
    start = time.perf_counter()
    total = FORMS[form](loss, *given)
    total.backward()
    value = total.item()
    return {"gib": (_peak(device) - before) / 2**30, "seconds": time.perf_counter() - start, "value": value}


def measured(loss: str, form: str, *sizes: int) -> dict[str, float]:
    """`once` in a process of its own."""
    arguments = [f"--{name}={size}" for name, size in zip(("positions", "vocab", "hidden"), sizes, strict=True)]
    command = [sys.executable, "-m", "draftsmith.train.benchmarks.losses", *arguments, "--worker", loss, form]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def forms(loss: str) -> list[str]:
    """Those to measure: kernels on a GPU, Liger's where it is installed, and it must give what ours does on a small problem."""
    ours = ["plain", "chunked"] + ["kernels"] * (torch.cuda.is_available() and not missing(torch.device("cuda")))
    if loss != "student-jsd":
        return ours
    if not find_spec("liger_kernel"):
        print("student-jsd: liger_kernel is not installed, so its loss is left out")
        return ours
    theirs, same = (measured(loss, form, 64, 1000, 32)["value"] for form in ("liger", "chunked"))
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
    parser.add_argument("--positions", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128_000)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=LOSSES)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = [options.positions, options.vocab, options.hidden]
    if options.worker:
        print(json.dumps(once(*options.worker, *sizes)))
        return
    print(f"S={sizes[0]} V={sizes[1]} H={sizes[2]}, fp32, medians of {options.repeats}, forward and backward")
    print(f"{'loss':12}{'form':10}{'peak GiB':>10}{'seconds':>10}{'value':>14}{'over chunked: peak':>20}{'seconds':>10}")
    for loss in options.losses:
        runs: dict[str, list[dict[str, float]]] = {form: [] for form in forms(loss)}
        for _ in range(options.repeats):
            for form, found in runs.items():
                found.append(measured(loss, form, *sizes))
        median = {form: {key: statistics.median(run[key] for run in found) for key in found[0]} for form, found in runs.items()}
        ours = median["chunked"]
        for form, one in median.items():
            print(f"{loss:12}{form:10}{one['gib']:10.2f}{one['seconds']:10.2f}{one['value']:14.2f}", end="")
            print(f"{one['gib'] / ours['gib']:19.1f}x{one['seconds'] / ours['seconds']:9.2f}x", flush=True)


if __name__ == "__main__":
    main()
