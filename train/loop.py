"""The only training loop: order, accumulation, clipping, schedule, evaluation, saving and exact resumption.

What is trained, and for what, it does not know: an objective gives a sum and the weight to divide it by.
"""

import json
import math
import signal
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from draftsmith.inference import machine
from draftsmith.inference.progress import Bar
from draftsmith.train import checkpoint
from draftsmith.train import recipe as recipes
from draftsmith.train.recipe import Recipe, TrainSection

Batch = dict[str, Tensor]

# Keys that may differ between a checkpoint and the run that continues it: none changes a step already taken.
MAY_CHANGE = {"train.output", "train.steps", "train.micro_batch_size", "train.eval_every", "train.eval_batches", "train.save_every"}
MAY_CHANGE |= {"train.log_every", "data.cache"}


@dataclass(slots=True)
class Loss:
    """A loss as sum and weight, so that micro-batches and ranks add up exactly. `metrics` are sums over the same weight."""

    sum: Tensor
    weight: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


class Rows(Protocol):
    """A data set: a length, batches by row number, and the loss-bearing tokens of rows; `close` lets it write what it holds back.

    Number r is row r mod length in epoch r div length.
    """

    def __len__(self) -> int: ...

    def batch(self, rows: Tensor) -> Batch: ...

    def weight(self, rows: Tensor) -> float: ...

    def close(self) -> None: ...


Objective = Callable[[Any, Batch], Loss]


class _Step(nn.Module):
    """The objective as one forward, so that DDP and DeepSpeed see a single call."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model, self.objective = model, objective

    def forward(self, batch: Batch) -> Loss:
        return self.objective(self.model, batch)


def learning_rate(train: TrainSection, step: int) -> float:
    """The learning rate of optimizer step `step`, from 0. WSD is linear over the last quarter (arXiv 2404.06395)."""
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    done = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    shape = {
        "constant": 1.0,
        "cosine": 0.5 * (1 + math.cos(math.pi * done)),
        "wsd": min(1.0, 4 * (1 - done)),
    }[train.schedule]
    return train.lr * (train.min_lr + (1 - train.min_lr) * shape)


def sample_rows(length: int, seed: int, first: int, count: int) -> Tensor:
    """Rows number `first` … `first + count − 1` of the endless order that (seed, epoch) fix, [count] int64: epoch · length + row."""
    parts = []
    while count:
        epoch, offset = divmod(first, length)
        take = min(count, length - offset)
        parts.append(epoch * length + _order(length, seed, epoch)[offset : offset + take])
        first, count = first + take, count - take
    return torch.cat(parts)


def places_of(rows: Tensor, length: int, seed: int) -> Tensor:
    """Where in that order row numbers [n] stand, [n] int64: the inverse of `sample_rows`."""
    places = torch.empty_like(rows)
    for epoch in rows.div(length, rounding_mode="floor").unique().tolist():
        here = rows // length == epoch
        places[here] = epoch * length + _order(length, seed, epoch).argsort()[rows[here] % length]
    return places


@lru_cache(maxsize=4)
def _order(length: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


def loss_tokens(batch: Batch) -> Tensor:
    """Tokens to predict in a batch [B,S]: its weight, known before any forward. A document's first token is never one."""
    return batch["loss_mask"].sum().double()


def prefetched(fetch: Callable[[Tensor], Batch], wanted: Iterable[Tensor]) -> Generator[Batch]:
    """fetch(rows) for each of `wanted`, in order; a thread works two ahead."""
    ahead: deque[Future[Batch]] = deque()
    with ThreadPoolExecutor(1) as pool:
        for rows in wanted:
            ahead.append(pool.submit(fetch, rows))
            if len(ahead) > 2:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def fit(
    recipe: Recipe,
    model: nn.Module,
    objective: Objective,
    train: Rows,
    valid: Rows,
    facts: dict[str, Any],
    probe: Callable[[], float] | None = None,
    between: Callable[[int, Callable[[], bool]], None] | None = None,
) -> tuple[Accelerator, int]:
    """Train `model` in place as `recipe` says and leave checkpoints and metrics.jsonl in `train.output`.

    probe: measures τ at each evaluation, on the first rank; `model` ends with the weights that were best by it, and the run ends after
    train.patience evaluations without a better one.
    between: called on all ranks with the number of steps done, before the first step and after each: on-policy samples are made there. Its
    second argument says whether a signal asks for haste: what it had no time for it is asked for again when the run goes on.

    Continues from the newest checkpoint there, if it was made of the same `facts` (hashes of the data and the target, say) with
    the same recipe. SIGINT and SIGTERM save and exit with 128 + signal. Returns the Accelerator and the
    step whose weights `model` has.
    """
    section, folder = recipe.train, Path(recipe.train.output)
    accelerator, optimizer, state = _begin(recipe, model, facts)
    step_module = _Step(model, objective)
    module, optimizer = accelerator.prepare(step_module, optimizer)
    micro, accumulation = _split(section, accelerator.num_processes)
    done: int = state["step"]
    log = _Log(folder, accelerator.is_main_process, done)
    best = _Best(folder / "checkpoints", model, state["best"])
    steps = range(done, done if best.stale(section.patience) else section.steps)

    def rows(step: int) -> Tensor:
        return sample_rows(len(train), section.seed, step * section.batch_size, section.batch_size)

    own = (rows(step).view(accumulation, accelerator.num_processes, micro)[:, accelerator.process_index] for step in steps)
    batches = prefetched(train.batch, (part for parts in own for part in parts))
    bar = Bar("training", section.steps, done, accelerator.is_main_process)
    with _Signals() as signals, bar, closing(train), closing(valid), closing(batches):
        if between and steps:
            between(done, signals.pending)
            if stop := signals.agreed(accelerator):
                log.say(f"stopped by signal {stop} before step {done + 1}; the same command goes on from there")
                raise SystemExit(128 + stop)
        for step in steps:
            total = train.weight(rows(step))
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(section, step)
            module.train()
            for batch in islice(batches, accumulation):
                with accelerator.accumulate(module), accelerator.autocast():
                    loss = module(_to(batch, accelerator.device))
                    # Accelerate divides by the accumulation steps and DDP by the ranks: undo both, then divide by what counts.
                    accelerator.backward(loss.sum * (accumulation * accelerator.num_processes / max(total, 1.0)))
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), section.clip)
                    optimizer.step()
                    optimizer.zero_grad()
                log.add(loss)
            last = step + 1 == section.steps
            if last or (step + 1) % section.log_every == 0:
                bar.update(step + 1, log.training(step + 1, learning_rate(section, step), accelerator))
            if last or (section.eval_every and (step + 1) % section.eval_every == 0):
                means = evaluate(step_module, valid, section, micro, accelerator)
                log.held_out(step + 1, means | best.measure(probe, step + 1, accelerator))
                last = last or best.stale(section.patience)
            if between and not last:
                between(step + 1, signals.pending)
            stop = signals.agreed(accelerator)
            if last or stop or (section.save_every and (step + 1) % section.save_every == 0):
                if accelerator.is_main_process:
                    checkpoint.save(folder / "checkpoints", step + 1, model, optimizer, state | {"best": best.state()})
                accelerator.wait_for_everyone()
            if stop:
                log.say(f"stopped by signal {stop} after step {step + 1}; the same command goes on from there")
                raise SystemExit(128 + stop)
            done = step + 1
            if last:
                break
    if best.step:
        log.say(f"best τ {best.tau:.3f} after step {best.step}; those weights are kept")
        best.restore()
    return accelerator, best.step or done


def _begin(recipe: Recipe, model: nn.Module, facts: dict[str, Any]) -> tuple[Accelerator, torch.optim.Optimizer, dict[str, Any]]:
    """The Accelerator, the optimizer, and the state to begin with: that of the newest checkpoint, which `model` and optimizer then have."""
    section, folder = recipe.train, Path(recipe.train.output)
    newest = checkpoint.latest(folder / "checkpoints")
    before = checkpoint.state(newest) if newest else {}
    # What a probe of a busy machine decided stays decided: other threads or another precision would round differently.
    torch.set_num_threads(before.get("threads", torch.get_num_threads()))
    precision = before.get("precision") or (machine.precision() if section.precision == "auto" else section.precision)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision="bf16" if precision == "bf16" else "no")
    accelerator.gradient_accumulation_steps = _split(section, accelerator.num_processes)[1]
    optimizer = _adamw(model, section)
    model.to(accelerator.device)
    state = {"recipe": _flat(recipe), "facts": facts, "threads": torch.get_num_threads(), "precision": precision}
    if newest:
        _check_same(newest, before, state, section)
        checkpoint.load(newest, model, optimizer)
    if accelerator.is_main_process:
        if before.get("step", 0) < section.steps:
            checkpoint.check_room(folder / "checkpoints", model)
        recipes.save(recipe, folder)
        print(
            f"resuming from {newest}" if newest else f"{state['threads']} threads, {precision}, {accelerator.num_processes} process(es)",
            flush=True,
        )
    return accelerator, optimizer, state | {"step": before.get("step", 0), "best": before.get("best")}


def evaluate(module: nn.Module, valid: Rows, section: TrainSection, micro: int, accelerator: Accelerator) -> dict[str, float]:
    """Mean loss and metrics over the first `eval_batches` × `micro` held-out rows, shared out over the ranks.

    `module` is not wrapped: ranks may have unequal numbers of batches, and DDP would wait for the missing ones.
    """
    count = min(len(valid), section.eval_batches * micro)
    starts = range(accelerator.process_index * micro, count, accelerator.num_processes * micro)
    module.eval()
    sums: dict[str, Tensor] = {}
    with torch.no_grad(), accelerator.autocast():
        for start in starts or (0,):  # a rank without rows runs one batch for the names of the metrics, and counts it zero times
            loss = module(_to(valid.batch(torch.arange(start, min(start + micro, count))), accelerator.device))
            for name, value in {"loss": loss.sum, "weight": loss.weight, **loss.metrics}.items():
                sums[name] = sums.get(name, torch.zeros((), device=accelerator.device)) + value.detach().float() * bool(starts)
    return _means(sums, accelerator)


def _adamw(model: nn.Module, section: TrainSection) -> torch.optim.AdamW:
    """AdamW over what is trained; norms and biases do not decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim >= 2], "weight_decay": section.weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, fused=True)


def _split(section: TrainSection, ranks: int) -> tuple[int, int]:
    """(sequences of one forward, accumulation steps)."""
    micro = section.micro_batch_size or max(1, section.batch_size // ranks)
    accumulation, rest = divmod(section.batch_size, micro * ranks)
    if rest or not accumulation:
        raise ValueError(
            f"train.batch_size={section.batch_size} cannot be cut into {ranks} rank(s) × micro-batches of {micro}; "
            "make it a multiple of ranks × train.micro_batch_size"
        )
    return micro, accumulation


def _check_same(newest: Path, before: dict[str, Any], fixed: dict[str, Any], section: TrainSection) -> None:
    """Refuse to continue a checkpoint of another recipe, other data or another target, naming the first difference."""
    for name in ("recipe", "facts"):
        then, now = before[name], fixed[name]
        for key in sorted((now.keys() | then.keys()) - MAY_CHANGE):
            if now.get(key) != then.get(key):
                raise ValueError(
                    f"{newest} was made with {key}={then.get(key)}, this run has {now.get(key)}; "
                    "give another train.output, or delete that folder"
                )
    if before["step"] > section.steps:
        raise ValueError(f"{newest} is at step {before['step']}, past train.steps={section.steps}; raise it or give another train.output")


def _flat(recipe: Recipe) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, values in recipe.model_dump(mode="json").items() for key, value in values.items()}


def _to(batch: Batch, device: torch.device) -> Batch:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def _means(sums: dict[str, Tensor], accelerator: Accelerator) -> dict[str, float]:
    stacked = cast(Tensor, accelerator.reduce(torch.stack(list(sums.values())), "sum"))
    values = dict(zip(sums, stacked.tolist(), strict=True))
    weight = max(values.pop("weight"), 1.0)
    return {name: value / weight for name, value in values.items()}


class _Signals:
    """Within it the first SIGINT or SIGTERM is noted, for the loop to stop after its step; a second one acts as ever."""

    def __enter__(self) -> "_Signals":
        self.caught = 0
        self.before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _note(self, number: int, _: FrameType | None) -> None:
        self.caught = number
        self.__exit__()

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def pending(self) -> bool:
        """Whether this rank has caught one."""
        return bool(self.caught)

    def agreed(self, accelerator: Accelerator) -> int:
        """The signal that any rank has caught, 0 if none: all ranks must stop at the same step."""
        if accelerator.num_processes == 1:
            return self.caught
        return int(cast(Tensor, accelerator.gather(torch.tensor([self.caught], device=accelerator.device))).max())


class _Best:
    """The weights with the best τ so far, and how many evaluations ago that was."""

    def __init__(self, folder: Path, model: nn.Module, before: dict[str, Any] | None) -> None:
        self.file, self.model = folder / "best.safetensors", model
        self.tau, self.step, self.since = (before or {"tau": 0.0, "step": 0, "since": 0}).values()

    def state(self) -> dict[str, Any]:
        return {"tau": self.tau, "step": self.step, "since": self.since}

    def measure(self, probe: Callable[[], float] | None, step: int, accelerator: Accelerator) -> dict[str, float]:
        """τ now, the same on all ranks; the weights are kept if it is the best. Nothing without a probe."""
        if probe is None:
            return {}
        self.model.eval()
        tau = probe() if accelerator.is_main_process else 0.0
        tau = cast(Tensor, accelerator.reduce(torch.tensor(tau, device=accelerator.device), "sum")).item()
        self.since += 1
        if tau > self.tau:
            self.tau, self.step, self.since = tau, step, 0
            if accelerator.is_main_process:
                checkpoint.save_weights(self.file, self.model)
        return {"tau": tau}

    def stale(self, patience: int) -> bool:
        return bool(patience) and self.since >= patience

    def restore(self) -> None:
        """Give the model its best weights again."""
        checkpoint.load_weights(self.file, self.model)


class _Log:
    """metrics.jsonl and the text of the progress bar."""

    def __init__(self, folder: Path, main: bool, done: int) -> None:
        self.file, self.main, self.sums, self.tokens, self.since = folder / "metrics.jsonl", main, {}, 0, time.perf_counter()
        self.held = ""
        if main and self.file.is_file():  # steps that were taken after the checkpoint are taken again
            lines = self.file.read_text().splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= done]
            if kept != lines:
                temporary = self.file.with_suffix(".part")
                temporary.write_text("".join(kept))
                temporary.replace(self.file)

    def add(self, loss: Loss) -> None:
        for name, value in {"loss": loss.sum, "weight": loss.weight, **loss.metrics}.items():
            self.sums[name] = self.sums.get(name, 0) + value.detach().float()

    def training(self, step: int, lr: float, accelerator: Accelerator) -> str:
        tokens = cast(Tensor, accelerator.reduce(self.sums["weight"].clone(), "sum")).item()
        means = _means(self.sums, accelerator)
        speed = tokens / (time.perf_counter() - self.since)
        self.sums, self.since = {}, time.perf_counter()
        self._write({"step": step, "lr": lr, "tokens_per_s": round(speed, 1)} | means)
        return _text(means) + f"  {speed:,.0f} tok/s{self.held}"

    def held_out(self, step: int, means: dict[str, float]) -> None:
        self.held = f"  held out: {_text(means)}"
        self._write({"step": step} | {f"valid_{name}": value for name, value in means.items()})
        self.say(f"step {step}{self.held}")
        self.since = time.perf_counter()

    def say(self, text: str) -> None:
        if self.main:
            print(text, flush=True)

    def _write(self, row: dict[str, Any]) -> None:
        if self.main:
            with self.file.open("a") as file:
                file.write(json.dumps(row) + "\n")


def _text(means: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.3f}" for name, value in means.items())
