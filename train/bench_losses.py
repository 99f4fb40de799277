"""Peak memory and time of the chunked losses beside the plain ones: python -m draftsmith.train.bench_losses

Each measurement is a process of its own, forms alternating: the peak is what the loss adds to the resident set of that process
(on a GPU: to the allocator's), inputs not counted; the gradient of the head's weight is, in both forms.

Letters: S positions · V vocabulary · H hidden size.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

from draftsmith.train.losses import chunked_cross_entropy, chunked_kl

FORMS = ("plain", "chunked")


def once(loss: str, form: str, positions: int, vocab: int, hidden: int) -> dict[str, float]:
    """One forward and backward. Returns added peak memory in GiB, seconds, and the loss's value."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    x = torch.randn(positions, hidden, device=device, requires_grad=True)
    head = torch.randn(vocab, hidden, device=device).mul_(hidden**-0.5).requires_grad_()
    teacher, teacher_head = torch.randn_like(x), torch.randn_like(head).mul_(hidden**-0.5)
    targets, weight = torch.randint(0, vocab, (positions,), device=device), torch.ones(positions, device=device)
    (x[:8] @ head.T).sum().backward()  # libraries load, gradients exist
    before = _peak(device)
    start = time.perf_counter()
    if form == "chunked":
        if loss == "ce":
            total = chunked_cross_entropy(x, head, targets, weight).sum
        else:
            total = chunked_kl(x, head, teacher, teacher_head, weight).sum
    elif loss == "ce":
        total = F.cross_entropy(x @ head.T, targets, reduction="sum")
    else:
        total = F.kl_div((x @ head.T).log_softmax(-1), (teacher @ teacher_head.T).log_softmax(-1), reduction="sum", log_target=True)
    total.backward()
    value = total.item()
    return {"gib": (_peak(device) - before) / 2**30, "seconds": time.perf_counter() - start, "value": value}


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
    parser.add_argument("--losses", nargs="+", choices=("ce", "kl"), default=["ce", "kl"])
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = [options.positions, options.vocab, options.hidden]
    if options.worker:
        print(json.dumps(once(*options.worker, *sizes)))
        return
    print(f"S={sizes[0]} V={sizes[1]} H={sizes[2]}, fp32, medians of {options.repeats}, forward and backward")
    print(f"{'loss':6}{'form':10}{'peak GiB':>10}{'seconds':>10}{'value':>14}")
    arguments = [f"--{name}={size}" for name, size in zip(("positions", "vocab", "hidden"), sizes, strict=True)]
    for loss in options.losses:
        runs: dict[str, list[dict[str, float]]] = {form: [] for form in FORMS}
        for _ in range(options.repeats):
            for form in FORMS:
                command = [sys.executable, "-m", "draftsmith.train.bench_losses", *arguments, "--worker", loss, form]
                output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                runs[form].append(json.loads(output.splitlines()[-1]))
        median = {form: {key: statistics.median(run[key] for run in runs[form]) for key in runs[form][0]} for form in FORMS}
        for form in FORMS:
            print(f"{loss:6}{form:10}{median[form]['gib']:10.2f}{median[form]['seconds']:10.2f}{median[form]['value']:14.2f}")
        ratio = {key: median["plain"][key] / median["chunked"][key] for key in ("gib", "seconds")}
        print(f"{loss:6}{'ratio':10}{ratio['gib']:9.1f}x{ratio['seconds']:9.2f}x", flush=True)


if __name__ == "__main__":
    main()
