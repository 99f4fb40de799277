"""Time each kernel beside its reference implementation, other libraries and the machine's limits: `draftsmith bench --kernels`, on a GPU.

The limits, which are the rates of a large copy and of a large matrix product, are measured in the same run. A kernel's floor is the least
time for its bytes and operations at a stated fraction of these rates (attention 75 % and 60 %, the verdict 70 %); the column
`floor / time` says how near a time comes to it. Rounds come after these lines: `benchmarks/rounds.py`.

Letters: B rows of a batch · V target vocabulary · N tree nodes with the root · K draft depth · C context length.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from draftsmith.eval.report import to_json
from draftsmith.inference import durable
from draftsmith.inference import verify as plain
from draftsmith.inference.kernels import missing
from draftsmith.inference.progress import Bar
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import DraftTree, unpack

__all__ = ["KernelTime", "RunningReport", "Sizes", "measure_limits", "measure_kernels", "print_kernels", "refusal", "run"]

FLEX, FLASHINFER = "FlexAttention", "FlashInfer"  # rivals

Timer = Callable[[Callable[[], object]], float]  # a call -> its median seconds


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a model, by default a Llama of 8B, and of the measurements.

    Attributes:
        layers: of the model.
        heads: of attention.
        kv_heads: of attention.
        dim: of a head.
        vocab: V.
        contexts: context lengths C to measure at.
        nodes: tree sizes N to measure at.
        rows: B of the verdict.
        depth: K.
        dtype: of weights and activations.
        copy_bytes: of the large copy.
        matmul: side of the large matrices.
        mlp: inner width of the model's MLP.
    """

    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    vocab: int = 128256
    contexts: tuple[int, ...] = (2048, 32768)
    nodes: tuple[int, ...] = (8, 16, 64)
    rows: int = 8
    depth: int = 5
    dtype: torch.dtype = torch.bfloat16
    copy_bytes: int = 1 << 30
    matmul: int = 8192
    mlp: int = 14336


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Seconds of one way (`how`) to do one thing (`what`). floor: seconds."""

    what: str
    how: str
    seconds: float
    floor: float


@dataclass
class RunningReport:
    """A report that is printed line by line, or written to `out` whenever a part is ready, so that an interrupted run leaves its results.

    Attributes:
        out: the JSON file; None writes none.
        as_json: print no lines for people.
        results: the content of the JSON.
        failure: why the file could not be written the last time; "" where it was. Neither this nor a full stdout ends the measurements.
    """

    out: Path | None
    as_json: bool
    results: dict[str, Any] = field(default_factory=dict)
    failure: str = ""

    def add(self, section: str, lines: Sequence[Any]) -> None:
        """Append dataclasses to a section, and write the file."""
        self.results.setdefault(section, []).extend(asdict(line) for line in lines)
        self.write()

    def say(self, *texts: object) -> None:
        if not self.as_json:
            with suppress(OSError):
                for text in texts:
                    print(text, flush=True)

    def write(self) -> None:
        if not self.out:
            return
        try:
            durable.write_text(self.out, self.text() + "\n")
            self.failure = ""
        except OSError as error:
            self.failure = f"--out {self.out}: not written ({error.strerror or error})"

    def text(self) -> str:
        return to_json(self.results)


def timer(call: Callable[[], object]) -> float:
    """Median device seconds of a call, after a warm-up."""
    from triton.testing import do_bench

    median: Any = do_bench(call, return_mode="median")
    return median / 1e3


def refusal() -> str:
    """Why nothing can be measured on this machine, in one line; "" where it can."""
    if not torch.cuda.is_available():
        return "it needs a CUDA device, and there is none here"
    return missing(torch.device("cuda"))


def measure_limits(sizes: Sizes, device: torch.device, time: Timer = timer) -> dict[str, float]:
    """Bytes per second of a large copy, reads and writes counted, and FLOPs per second of a large matrix product."""
    source = torch.randint(0, 255, (sizes.copy_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(sizes.matmul, sizes.matmul, dtype=sizes.dtype, device=device) for _ in range(2))
    copy_s, matmul_s = time(lambda: target.copy_(source)), time(lambda: a @ b)
    return {"copy_bytes_per_s": 2 * sizes.copy_bytes / copy_s, "matmul_flop_per_s": 2 * sizes.matmul**3 / matmul_s}


def measure_kernels(
    sizes: Sizes, device: torch.device, limits: dict[str, float], left_out: dict[str, str], time: Timer = timer
) -> Iterator[list[KernelTime]]:
    """Time all kernels.

    Args:
        sizes: of the model and the measurements.
        device: where to run.
        limits: see `measure_limits`.
        left_out: gets the names of libraries that could not take part, with the reasons.
        time: measures a call.

    Yields:
        The lines of one part, so that those of an interrupted run are known.

    Raises:
        ValueError: the attention kernel's result differs from its reference's.
    """
    bandwidth, rate = limits.values()
    for context in sizes.contexts:
        yield [line for nodes in sizes.nodes for line in _attention(sizes, device, time, context, nodes, bandwidth, rate, left_out)]
    yield _verdicts(sizes, device, time, bandwidth)
    yield _moves(sizes, device, time) + _rankings(sizes, device, time, bandwidth)


def _tree(rows: int, nodes: int, sizes: Sizes, device: torch.device) -> DraftTree:
    """Random trees [B,N] of depth K at most: the parent of a node is any earlier node less deep than K."""
    generator = torch.Generator().manual_seed(nodes)
    parents = torch.full((rows, nodes), -1)
    for own in parents:
        depths = [0]
        for node in range(1, nodes):
            possible = [earlier for earlier, depth in enumerate(depths) if depth < sizes.depth]
            own[node] = possible[int(torch.randint(len(possible), (), generator=generator))]
            depths.append(depths[own[node]] + 1)
    tokens = torch.randint(sizes.vocab, (rows, nodes), generator=generator)
    return DraftTree.build(tokens, parents, torch.full((rows,), nodes)).to(device)


def _attention(
    sizes: Sizes, device: torch.device, time: Timer, context: int, nodes: int, bandwidth: float, rate: float, left_out: dict[str, str]
) -> list[KernelTime]:
    from draftsmith.inference.kernels.attention import tree_attention, tree_attention_reference

    what, scale = f"attention of {nodes} nodes after {context:,}", sizes.dim**-0.5
    query = torch.randn(1, sizes.heads, nodes, sizes.dim, dtype=sizes.dtype, device=device)
    keys, values = (torch.randn(1, sizes.kv_heads, context + nodes, sizes.dim, dtype=sizes.dtype, device=device) for _ in range(2))
    tree = _tree(1, nodes, sizes, device)
    rows, length = torch.zeros(1, dtype=torch.int64, device=device), torch.full((1,), context, device=device)
    inputs = (query, keys, values, rows, length, tree.depth, tree.ancestors, tree.depth)
    prefix = torch.ones(1, nodes, context, dtype=torch.bool, device=device)
    mask = torch.cat((prefix, unpack(tree.ancestors, nodes)), 2)[:, None]
    ways: dict[str, Callable[[], Tensor]] = {
        "kernel": lambda: tree_attention(*inputs, scale=scale),
        "reference": lambda: tree_attention_reference(*inputs, scale=scale),
        "SDPA, dense mask": lambda: F.scaled_dot_product_attention(query, keys, values, mask, scale=scale, enable_gqa=True),
    }
    expected = ways["reference"]()
    if not _close(ways["kernel"](), expected):
        raise ValueError(f"{what}: the kernel's result differs from its reference's; its times mean nothing; run the tests marked gpu")
    rivals = {FLEX: _flex, FLASHINFER: _flashinfer} if device.type == "cuda" else {FLASHINFER: _flashinfer}
    for name, make in rivals.items():
        if name in left_out:
            continue
        try:
            rival = make(query, keys, values, mask, scale)
            if _close(rival(), expected):
                ways[name] = rival
            else:
                left_out[name] = f"{what}: its result differs from the reference's"
        except (ImportError, OSError, RuntimeError, ValueError) as error:  # it is not installed, or cannot be compiled
            left_out[name] = " ".join(str(error).split())[:200]
    moved = sum(tensor.nbytes for tensor in (query, keys, values)) + query.nbytes
    operations = 4 * sizes.heads * nodes * (context + nodes) * sizes.dim
    floor = max(moved / (0.75 * bandwidth), operations / (0.6 * rate))
    return [KernelTime(what, how, time(way), floor) for how, way in ways.items()]


def _flex(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Callable[[], Tensor]:
    """FlexAttention's of one row under a mask: -> [1,N,heads,dim], as `_flashinfer`'s."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    nodes, length = mask.shape[2:]
    blocks = create_block_mask(lambda b, h, q, k: mask[0, 0, q, k], None, None, nodes, length, device=str(query.device))
    # Its kernel for few queries takes those of a KV head together, and has no tile for more than 128 of them: it stopped on an H100.
    options: Any = {"BACKEND": "TRITON"} if nodes * query.shape[1] // keys.shape[1] > blocks.BLOCK_SIZE[0] else None

    def attention() -> Any:  # a new function for each call: dynamo limits the recompilations of one function
        return flex_attention(query, keys, values, block_mask=blocks, scale=scale, enable_gqa=True, kernel_options=options).transpose(1, 2)

    return torch.compile(attention, dynamic=False)


def _flashinfer(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Callable[[], Tensor]:
    """FlashInfer's attention of one row under a mask: -> [1,N,heads,dim].

    Queries are [N,heads,dim]; keys and values stay [kv heads,positions,dim] ("HND"). The mask [N,positions] is packed into bits once, row
    by row; the first bit is the lowest of its byte.
    """
    try:
        from flashinfer import packbits, single_prefill_with_kv_cache  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(f"{error} (pip install flashinfer-python)") from None
    nodes, bits = query[0].transpose(0, 1).contiguous(), packbits(mask[0, 0].flatten(), bitorder="little")
    return lambda: single_prefill_with_kv_cache(nodes, keys[0], values[0], packed_custom_mask=bits, kv_layout="HND", sm_scale=scale)[None]


def _close(got: Tensor, expected: Tensor) -> bool:
    got, expected = got.float(), expected.float()
    return bool((got - expected).norm() < 0.02 * expected.norm())


def _verdicts(sizes: Sizes, device: torch.device, time: Timer, bandwidth: float) -> list[KernelTime]:
    from draftsmith.inference.kernels.verify import verify

    nodes = sizes.nodes[-1]
    logits = torch.randn(sizes.rows, nodes, sizes.vocab, dtype=sizes.dtype, device=device)
    tree = _tree(sizes.rows, nodes, sizes, device)
    request, position = torch.arange(sizes.rows, device=device), torch.full((sizes.rows,), 100, device=device)
    lines = []
    for name, sampling in {"greedy": Sampling(), "T = 1": Sampling(1.0), "T = 1, top-p 0.9": Sampling(1.0, top_p=0.9)}.items():
        what = f"verdict on [{sizes.rows},{nodes},{sizes.vocab:,}], {name}"
        for how, function in (("kernel", verify), ("reference", plain.verify)):
            call = partial(function, tree, logits, sampling, request, position, sizes.depth)
            lines.append(KernelTime(what, how, time(call), logits.nbytes / (0.7 * bandwidth)))
    return lines


def _moves(sizes: Sizes, device: torch.device, time: Timer) -> list[KernelTime]:
    from draftsmith.inference.kernels.commit import commit, commit_reference, table

    shape = (1, sizes.kv_heads, sizes.contexts[0] + 64, sizes.dim)
    buffers = [torch.randn(shape, dtype=sizes.dtype, device=device) for _ in range(2 * sizes.layers)]
    rows, start = torch.zeros(1, dtype=torch.int64, device=device), torch.full((1,), sizes.contexts[0], device=device)
    nodes = torch.arange(2, 2 * sizes.depth + 2, 2, device=device)[None]
    groups, what = table(buffers), f"commit of {sizes.depth} nodes in {sizes.layers} layers"
    kernel_s = time(lambda: commit(groups, rows, start, nodes, 1))
    reference_s = time(lambda: commit_reference(buffers, rows, start, nodes, 1))
    return [KernelTime(what, "kernel", kernel_s, 30e-6), KernelTime(what, "reference", reference_s, 30e-6)]


def _rankings(sizes: Sizes, device: torch.device, time: Timer, bandwidth: float) -> list[KernelTime]:
    from draftsmith.inference.kernels.expand import best, best_reference

    logits = torch.randn(1, 8, sizes.vocab, dtype=sizes.dtype, device=device)
    what, floor = f"8 best of [1,8,{sizes.vocab:,}], with log-probabilities", logits.nbytes / (0.7 * bandwidth)
    ways = {"kernel": lambda: best(logits, 8), "reference": lambda: best_reference(logits, 8)}
    return [KernelTime(what, how, time(way), floor) for how, way in ways.items()]


def print_kernels(limits: dict[str, float], lines: list[KernelTime], device: str) -> None:
    """Print the lines for a person."""
    bandwidth, rate = limits.values()
    table = Table(title=f"{device}: copies {bandwidth / 1e12:.2f} TB/s, matmul {rate / 1e12:.0f} Tflop/s")
    for name in ("what", "how", "µs", "floor", "floor / time"):
        table.add_column(name, justify="left" if name in ("what", "how") else "right")
    for line in lines:
        table.add_row(line.what, line.how, f"{line.seconds * 1e6:,.1f}", f"{line.floor * 1e6:,.1f}", f"{line.floor / line.seconds:.2f}")
    Console().print(table)


def run(report: RunningReport, sizes: Sizes, device: torch.device, time: Timer = timer) -> None:
    """Measure limits and kernels into the report.

    Raises:
        ValueError: the attention kernel's result differs from its reference's.
    """
    left_out: dict[str, str] = {}
    limits = measure_limits(sizes, device, time)
    report.results["limits"] = limits
    report.results["left_out"] = left_out
    with Bar("kernels", len(sizes.contexts) + 2) as bar:
        for done, lines in enumerate(measure_kernels(sizes, device, limits, left_out, time), 1):
            report.add("lines", lines)
            if not report.as_json:
                print_kernels(limits, lines, report.results["device"])
            bar.update(done)
    report.say(*(f"left out: {name}: {reason}" for name, reason in left_out.items()))
