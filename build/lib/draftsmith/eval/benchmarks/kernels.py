"""Each kernel beside its plain twin and what else does its work, and beside what the machine can do: `draftsmith bench --kernels`, on a GPU.

The ceilings, a large copy and a large product, are measured in the same run. A floor is the time that the fewest bytes and operations would
take at a stated share of them (attention 75 % and 60 %, the verdict 70 %), and `of the floor` how near a time comes. Whole rounds come after
these lines: `bench_rounds`.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from draftsmith.inference import verify as plain
from draftsmith.inference.kernels import missing
from draftsmith.inference.progress import Bar
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import DraftTree, unpack

__all__ = ["Line", "Report", "Sizes", "measure_ceilings", "measure_parts", "refusal", "run", "show"]

RIVAL = "FlashInfer"

Timer = Callable[[Callable[[], object]], float]  # a call -> its median seconds


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a Llama of 8B by default. copied: bytes of the copy · product: side of the matrices · mlp: its inner width."""

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
    copied: int = 1 << 30
    product: int = 8192
    mlp: int = 14336


@dataclass(frozen=True, slots=True)
class Line:
    """seconds of one way of doing one thing; floor in seconds, 0 where none is stated."""

    what: str
    how: str
    seconds: float
    floor: float


@dataclass
class Report:
    """What is known so far: each line is printed, or the whole written to `out`, as soon as it is there."""

    out: Path | None
    as_json: bool
    found: dict[str, Any] = field(default_factory=dict)

    def add(self, section: str, lines: Sequence[Any]) -> None:
        """Dataclasses of one kind, below the earlier ones of this section."""
        self.found.setdefault(section, []).extend(asdict(line) for line in lines)
        self.write()

    def say(self, *texts: object) -> None:
        if not self.as_json:
            for text in texts:
                print(text, flush=True)

    def write(self) -> None:
        if self.out:
            part = self.out.with_name(self.out.name + ".part")
            part.write_text(self.text() + "\n")
            part.replace(self.out)

    def text(self) -> str:
        return json.dumps(self.found, allow_nan=False)


def timer(call: Callable[[], object]) -> float:
    """Median device time of a call, warmed up."""
    from triton.testing import do_bench

    median: Any = do_bench(call, return_mode="median")
    return median / 1e3


def refusal() -> str:
    """Why nothing can be measured here, in one line; "" where it can."""
    if not torch.cuda.is_available():
        return "it needs a CUDA device, and there is none here"
    return missing(torch.device("cuda"))


def measure_ceilings(sizes: Sizes, device: torch.device, time: Timer = timer) -> dict[str, float]:
    """bytes/s of a large copy, reads and writes counted, and flop/s of a large product."""
    source = torch.randint(0, 255, (sizes.copied,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(sizes.product, sizes.product, dtype=sizes.dtype, device=device) for _ in range(2))
    copied, product = time(lambda: target.copy_(source)), time(lambda: a @ b)
    return {"copy_bytes_per_s": 2 * sizes.copied / copied, "product_flop_per_s": 2 * sizes.product**3 / product}


def measure_parts(
    sizes: Sizes, device: torch.device, ceilings: dict[str, float], left_out: dict[str, str], time: Timer = timer
) -> Iterator[list[Line]]:
    """The lines, some at a time, so that those of an interrupted run are known. left_out: who could not take part gets its reason here.

    Raises:
        ValueError: a kernel whose result is not its twin's.
    """
    bandwidth, rate = ceilings.values()
    for context in sizes.contexts:
        yield [line for nodes in sizes.nodes for line in _attention(sizes, device, time, context, nodes, bandwidth, rate, left_out)]
    yield _verdicts(sizes, device, time, bandwidth)
    yield _moves(sizes, device, time) + _rankings(sizes, device, time, bandwidth)


def _tree(rows: int, nodes: int, vocab: int, device: torch.device) -> DraftTree:
    """Random trees, the parents any earlier nodes."""
    generator = torch.Generator().manual_seed(nodes)
    parents = torch.tensor([[-1] + [int(torch.randint(node, (), generator=generator)) for node in range(1, nodes)] for _ in range(rows)])
    tokens = torch.randint(vocab, (rows, nodes), generator=generator)
    return DraftTree.build(tokens, parents, torch.full((rows,), nodes)).to(device)


def _attention(
    sizes: Sizes, device: torch.device, time: Timer, context: int, nodes: int, bandwidth: float, rate: float, left_out: dict[str, str]
) -> list[Line]:
    from draftsmith.inference.kernels.attention import tree_attention, tree_attention_reference

    what, scale = f"attention of {nodes} nodes after {context:,}", sizes.dim**-0.5
    query = torch.randn(1, sizes.heads, nodes, sizes.dim, dtype=sizes.dtype, device=device)
    keys, values = (torch.randn(1, sizes.kv_heads, context + nodes, sizes.dim, dtype=sizes.dtype, device=device) for _ in range(2))
    tree = _tree(1, nodes, 100, device)
    rows, length = torch.zeros(1, dtype=torch.int64, device=device), torch.full((1,), context, device=device)
    given = (query, keys, values, rows, length, tree.depth, tree.ancestors, tree.depth)
    prefix = torch.ones(1, nodes, context, dtype=torch.bool, device=device)
    mask = torch.cat((prefix, unpack(tree.ancestors, nodes)), 2)[:, None]
    ways: dict[str, Callable[[], Tensor]] = {
        "kernel": lambda: tree_attention(*given, scale=scale),
        "twin": lambda: tree_attention_reference(*given, scale=scale),
        "SDPA, dense mask": lambda: F.scaled_dot_product_attention(query, keys, values, mask, scale=scale, enable_gqa=True),
    }
    if device.type == "cuda":
        ways["FlexAttention"] = _flex(query, keys, values, mask, scale)
    expected = ways["twin"]()
    if not _alike(ways["kernel"](), expected):
        raise ValueError(f"{what}: the kernel's result is not its twin's; its times mean nothing; run the tests marked gpu")
    if RIVAL not in left_out:
        try:
            rival = _flashinfer(query, keys, values, mask, scale)
            if _alike(rival()[None], expected):
                ways[RIVAL] = rival
            else:
                left_out[RIVAL] = f"{what}: its result is another"
        except (ImportError, OSError, RuntimeError, ValueError) as error:  # not there, or it could not be compiled
            left_out[RIVAL] = f"{' '.join(str(error).split())[:200]} (pip install flashinfer-python)"
    moved = sum(tensor.nbytes for tensor in (query, keys, values)) + query.nbytes
    operations = 4 * sizes.heads * nodes * (context + nodes) * sizes.dim
    floor = max(moved / (0.75 * bandwidth), operations / (0.6 * rate))
    return [Line(what, how, time(way), floor) for how, way in ways.items()]


def _flex(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Callable[[], Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    nodes, reach = mask.shape[2:]
    blocks = create_block_mask(lambda b, h, q, k: mask[0, 0, q, k], None, None, nodes, reach, device=str(query.device))

    def attention() -> Any:  # a function of our own: dynamo counts recompilations by function, and has a limit
        return flex_attention(query, keys, values, block_mask=blocks, scale=scale, enable_gqa=True)

    return torch.compile(attention, dynamic=False)


def _flashinfer(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Callable[[], Tensor]:
    """FlashInfer's attention of one row under a mask of its own: -> [N,heads,dim]. Queries [N,heads,dim], keys and values as they are
    ("HND"), the mask [N,keys] as bits, row by row, the first the lowest of its byte; packed once, as the tree's words are."""
    from flashinfer import packbits, single_prefill_with_kv_cache  # pyright: ignore[reportMissingImports]

    nodes, bits = query[0].transpose(0, 1).contiguous(), packbits(mask[0, 0].flatten(), bitorder="little")
    return lambda: single_prefill_with_kv_cache(nodes, keys[0], values[0], packed_custom_mask=bits, kv_layout="HND", sm_scale=scale)


def _alike(got: Tensor, expected: Tensor) -> bool:
    got, expected = got.float(), expected.float()
    return bool((got - expected).norm() < 0.02 * expected.norm())


def _verdicts(sizes: Sizes, device: torch.device, time: Timer, bandwidth: float) -> list[Line]:
    from draftsmith.inference.kernels.verify import verify

    nodes = sizes.nodes[-1]
    logits = torch.randn(sizes.rows, nodes, sizes.vocab, dtype=sizes.dtype, device=device)
    tree = _tree(sizes.rows, nodes, sizes.vocab, device)
    request, position = torch.arange(sizes.rows, device=device), torch.full((sizes.rows,), 100, device=device)
    lines = []
    for name, sampling in {"greedy": Sampling(), "T = 1": Sampling(1.0), "T = 1, top-p 0.9": Sampling(1.0, top_p=0.9)}.items():
        what = f"verdict on [{sizes.rows},{nodes},{sizes.vocab:,}], {name}"
        for how, by in (("kernel", verify), ("twin", plain.verify)):
            call = lambda by=by, sampling=sampling: by(tree, logits, sampling, request, position, sizes.depth)  # noqa: E731
            lines.append(Line(what, how, time(call), logits.nbytes / (0.7 * bandwidth)))
    return lines


def _moves(sizes: Sizes, device: torch.device, time: Timer) -> list[Line]:
    from draftsmith.inference.kernels.commit import commit, commit_reference, table

    shape = (1, sizes.kv_heads, sizes.contexts[0] + 64, sizes.dim)
    buffers = [torch.randn(shape, dtype=sizes.dtype, device=device) for _ in range(2 * sizes.layers)]
    rows, start = torch.zeros(1, dtype=torch.int64, device=device), torch.full((1,), sizes.contexts[0], device=device)
    slots = torch.arange(2, 2 * sizes.depth + 2, 2, device=device)[None]
    groups, what = table(buffers), f"commit of {sizes.depth} nodes in {sizes.layers} layers"
    kernel, twin = time(lambda: commit(groups, rows, start, slots, 1)), time(lambda: commit_reference(buffers, rows, start, slots, 1))
    return [Line(what, "kernel", kernel, 30e-6), Line(what, "twin", twin, 30e-6)]


def _rankings(sizes: Sizes, device: torch.device, time: Timer, bandwidth: float) -> list[Line]:
    from draftsmith.inference.kernels.expand import best, best_reference

    logits = torch.randn(1, 8, sizes.vocab, dtype=sizes.dtype, device=device)
    what, floor = f"8 best of [1,8,{sizes.vocab:,}], with log-probabilities", logits.nbytes / (0.7 * bandwidth)
    ways = {"kernel": lambda: best(logits, 8), "twin": lambda: best_reference(logits, 8)}
    return [Line(what, how, time(way), floor) for how, way in ways.items()]


def show(ceilings: dict[str, float], lines: list[Line], device: str) -> None:
    """Print them for a person."""
    copied, product = ceilings.values()
    table = Table(title=f"{device}: copies {copied / 1e12:.2f} TB/s, products {product / 1e12:.0f} Tflop/s")
    for name in ("what", "how", "µs", "floor", "of the floor"):
        table.add_column(name, justify="left" if name in ("what", "how") else "right")
    for line in lines:
        table.add_row(line.what, line.how, f"{line.seconds * 1e6:,.1f}", f"{line.floor * 1e6:,.1f}", f"{line.floor / line.seconds:.2f}")
    Console().print(table)


def run(report: Report, sizes: Sizes, device: torch.device, time: Timer = timer) -> None:
    """Ceilings and lines into the report, and why someone was left out.

    Raises:
        ValueError: a kernel whose result is not its twin's.
    """
    left_out: dict[str, str] = {}
    ceilings = measure_ceilings(sizes, device, time)
    report.found |= {"ceilings": ceilings, "left_out": left_out}
    with Bar("kernels", len(sizes.contexts) + 2) as bar:
        for done, lines in enumerate(measure_parts(sizes, device, ceilings, left_out, time), 1):
            report.add("lines", lines)
            if not report.as_json:
                show(ceilings, lines, report.found["device"])
            bar.update(done)
    report.say(*(f"left out: {name}: {reason}" for name, reason in left_out.items()))
