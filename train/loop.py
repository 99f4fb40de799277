"""The only training loop: accumulation, clipping, schedule, evaluation, saving and exact resumption.

What is trained, and for what, it does not know: an objective gives a sum and the weight to divide it by.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from draftsmith.inference import machine
from draftsmith.inference.kernels import use
from draftsmith.inference.progress import Bar
from draftsmith.train import recipe as recipes
from draftsmith.train.engine import checkpoint, processes
from draftsmith.train.engine.log import Log, means
from draftsmith.train.engine.order import prefetched, sample_rows
from draftsmith.train.engine.profiler import Profile
from draftsmith.train.engine.sharded import ShardedModel
from draftsmith.train.engine.trackers import trackers
from draftsmith.train.engine.watchdog import NonFiniteCounter, Signals, Watchdog, agree_on_data, translate_errors
from draftsmith.train.objective import Batch, Loss, Objective, SequenceDataset
from draftsmith.train.recipe import Recipe, TrainSection

# Keys that may differ between a checkpoint and the run that continues it: none changes a step already taken.
MAY_CHANGE = {
    f"train.{key}"
    for key in "output steps micro_batch_size compile eval_every eval_batches save_every log_every keep resume watchdog_minutes "
    "max_nonfinite_steps patience trackers profile context_parallel kernels".split()
} | {"data.cache", "data.num_proc", "target.parallel", "eagle.checkpointing", "student.checkpointing"}


Refresh = Callable[[int, Callable[[], bool], Callable[[], AbstractContextManager[None]]], None]


class _Step(nn.Module):
    """The objective as one forward, so that DDP and DeepSpeed see a single call."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model, self.objective = model, objective

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        loss = self.objective(self.model, batch)
        return {"sum": loss.sum, "weight": loss.weight, **loss.metrics}


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


def fit(
    recipe: Recipe,
    model: nn.Module,
    objective: Objective,
    train: SequenceDataset,
    valid: SequenceDataset,
    facts: dict[str, Any],
    *,
    reference: Callable[[Batch], object] | None = None,
    probe: Callable[[], float] | None = None,
    together: bool = False,
    refresh: Refresh | None = None,
) -> tuple[Accelerator, int]:
    """Train `model` in place as `recipe` says and leave checkpoints and metrics.jsonl in `train.output`.

    reference: the frozen target's forward on a batch, to hold a step's time against.
    probe: measures τ at each evaluation, on the first rank (`together`: on all, where the target's forward is theirs in common); `model` ends
    with the weights that were best by it, and the run ends after train.patience evaluations without a better one.
    refresh: called on all ranks with the number of steps done, before the first step and after each: on-policy samples are made there. Its
    second argument says whether a signal asks for haste: what it had no time for it is asked for again when the run goes on. Within its
    third, which all ranks enter, `model` has its weights.

    Continues from the newest whole checkpoint there, if it was made of the same `facts` (hashes of the data and the target, say) with
    the same recipe, under whatever launcher and on however many ranks. SIGINT, SIGTERM and SIGUSR1 save and exit with 128 + signal. Returns
    the Accelerator and the step whose weights `model` has on the first rank.
    """
    section = recipe.train
    advice = f"the same command goes on from the newest checkpoint in {Path(section.output) / 'checkpoints'}"
    with Watchdog(section.watchdog_minutes, advice) as clock, translate_errors(section, advice), use(section.kernels):
        run = _Run(recipe, model, objective, train, valid, facts, clock, reference, together)
        with Signals() as signals:
            with run.open() as batches:

                def asked_to_stop() -> int:
                    if caught := signals.agreed(run.accelerator):
                        run.save(run.done)
                        run.log.say(f"stopped by signal {caught} after step {run.done}; {advice}")
                    return caught

                def pending() -> bool:
                    clock.at("making samples")
                    return signals.pending()

                stopped = 0
                if refresh and run.steps:
                    with run.log.paused():
                        refresh(run.done, pending, run.wrapped.whole)
                    stopped = asked_to_stop()
                for step in run.steps if not stopped else ():
                    run.step(step, batches)
                    last = step + 1 == section.steps
                    if last or (section.eval_every and (step + 1) % section.eval_every == 0):
                        run.judge(step + 1, probe)
                        last = last or run.best.stale(section.patience)
                    if refresh and not last:
                        with run.log.paused():
                            refresh(step + 1, pending, run.wrapped.whole)
                    if last or (section.save_every and (step + 1) % section.save_every == 0):
                        run.save(step + 1)
                    stopped = asked_to_stop()
                    if last or stopped:
                        break
            if stopped:
                run.accelerator.wait_for_everyone()  # the launcher gives the others 30 seconds once one is gone
                raise SystemExit(128 + stopped)
    run.wrapped.gather()
    if run.best.step:
        run.log.say(f"best τ {run.best.tau:.3f} after step {run.best.step}; those weights are kept")
        run.best.restore()
    return run.accelerator, run.best.step or run.done


class _Run:
    """A run under way: what is trained, how far it is (`done` steps; checkpoint `saved`), and what it writes."""

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        objective: Objective,
        train: SequenceDataset,
        valid: SequenceDataset,
        facts: dict[str, Any],
        clock: Watchdog,
        reference: Callable[[Batch], object] | None,
        together: bool,
    ) -> None:
        self.section, self.model, self.train, self.valid, self.clock = recipe.train, model, train, valid, clock
        self.wrapped, self.state = _begin(recipe, model, objective, train, facts)
        self.accelerator: Accelerator = self.wrapped.accelerator
        self.micro, self.accumulation = _split(recipe.train, self.accelerator.num_processes)
        self.groups, self.group = processes.groups(recipe.train.context_parallel)
        self.done: int = self.state["step"]
        self.saved = self.done
        folder = Path(recipe.train.output)
        self.checkpoints = folder / "checkpoints"
        self.log = Log(recipe, self.accelerator, self.done, reference)
        self.best = _Best(self.checkpoints, self.wrapped, self.state["best"], together)
        self.finite = NonFiniteCounter(folder, recipe.train.max_nonfinite_steps, self.state["left_out"], self.accelerator.process_index)
        self.steps = range(self.done, self.done if self.best.stale(recipe.train.patience) else recipe.train.steps)
        self.bar = Bar("training", recipe.train.steps, self.done, self.accelerator.is_main_process)
        self.profile = Profile(recipe.train, self.accelerator, self.done, self.log.paused)

    @contextmanager
    def open(self) -> Iterator[Iterator[Batch]]:
        """Within it the micro-batches of this rank, in order; what is open is closed after it."""
        shape = self.accumulation, self.groups, self.micro
        own = (_rows(self.section, self.train, step).view(shape)[:, self.group] for step in self.steps)
        batches = prefetched(self.train.batch, (part for parts in own for part in parts))
        with self.bar, closing(self.train), closing(self.valid), closing(batches), closing(self.log), self.profile:
            yield batches

    def step(self, step: int, batches: Iterator[Batch]) -> None:
        """One optimizer step, the `step`-th from 0; left out where its gradient is not finite."""
        accelerator, module, optimizer = self.accelerator, self.wrapped.module, self.wrapped.optimizer
        rate, total = learning_rate(self.section, step), self.train.weight(_rows(self.section, self.train, step))
        for group in optimizer.param_groups:
            group["lr"] = rate
        module.train()
        seen: list[Batch] = []
        applied = False
        for number in range(self.accumulation):
            self.clock.at(f"waiting for the data of step {step + 1}")
            seen.append(next(batches))
            self.clock.at(f"in step {step + 1}")
            batch = _to(seen[-1], accelerator.device)
            with accelerator.accumulate(module), accelerator.autocast(), self.log.watching(batch):
                # Dropout's noise belongs to the place in the order, not to the rank, so that a run resumes at any world size.
                place = number * self.groups + self.group
                torch.manual_seed((self.section.seed * 1_000_003 + step) * 4096 + place)
                loss = Loss.of(module(batch))
                # Accelerate or DeepSpeed divides by the accumulation steps and by the ranks: undo both, then divide by what counts.
                accelerator.backward(loss.sum * (self.accumulation * accelerator.num_processes / max(total, 1.0)))
                if accelerator.sync_gradients:
                    applied = self.wrapped.applied(accelerator.clip_grad_norm_(module.parameters(), self.section.clip))
                if applied:
                    optimizer.step()
                optimizer.zero_grad()
            self.log.add(cast(Any, loss))
        self.done = step + 1
        self.finite.after(self.done, applied, seen)
        self.profile.step()
        if self.done == self.section.steps or self.done % self.section.log_every == 0:
            self.bar.update(self.done, self.log.training(self.done, rate, left_out=self.finite.left_out))

    def judge(self, step: int, probe: Callable[[], float] | None) -> None:
        """Held-out means, and τ where there is a probe."""
        self.clock.at(f"evaluating step {step}")
        with self.log.paused():
            found = evaluate(self.wrapped.module, self.valid, self.section, self.micro, self.accelerator)
            self.log.held_out(step, found | self.best.measure(probe, step))

    def save(self, step: int) -> None:
        """Checkpoint `step`, where it is not there already."""
        if step == self.saved:
            return
        self.clock.at(f"saving step {step}")
        with self.log.paused():
            self.wrapped.gather()
            state = self.state | {"best": self.best.state(), "left_out": self.finite.left_out}
            kept = step, checkpoint.trained(self.model), self.wrapped.moments(), state, self.section.keep
            processes.on_first(lambda: checkpoint.save(self.checkpoints, *kept))
        self.saved = step


def _rows(section: TrainSection, train: SequenceDataset, step: int) -> Tensor:
    return sample_rows(len(train), section.seed, step * section.batch_size, section.batch_size)


def _begin(
    recipe: Recipe, model: nn.Module, objective: Objective, train: SequenceDataset, facts: dict[str, Any]
) -> tuple[ShardedModel, dict[str, Any]]:
    """The model as it will be trained, and the state to begin with: that of the newest checkpoint, whose weights and moments it then has."""
    section, folder = recipe.train, Path(recipe.train.output)
    # The first rank reads and says what it found: another machine may not see its disk.
    newest, before = processes.on_first(lambda: checkpoint.newest(folder / "checkpoints") or (None, {}))
    if newest and section.resume == "never":
        raise ValueError(f"{newest.parent} holds checkpoints and train.resume=never; give another train.output, or delete that folder")
    # What a probe of a busy machine decided stays decided: other threads or another precision would round differently.
    torch.set_num_threads(before.get("threads", torch.get_num_threads()))
    precision = before.get("precision") or (
        processes.on_first(lambda: str(machine.precision())) if section.precision == "auto" else section.precision
    )
    micro, accumulation = _split(section, processes.join().num_processes)
    accelerator = processes.accelerator(precision, micro, accumulation, section.clip, **trackers(section))
    state = {"recipe": _flat(recipe), "facts": facts, "threads": torch.get_num_threads(), "precision": precision, "left_out": 0}
    weights, moments = {}, {}
    if newest:
        _check_same(newest, before, state, recipe)
        weights, moments = processes.on_first(lambda: checkpoint.read(newest))
        checkpoint.fill(model, weights, newest)
    agree_on_data(accelerator, state | {"threads": None}, len(train), train.batch(_rows(section, train, before.get("step", 0))[:1]))
    processes.on_first(lambda: _announce(recipe, model, newest, before, state, accelerator))
    wrapped = ShardedModel(accelerator, model, lambda own: _Step(own, objective), lambda own: _adamw(own, section))
    if newest:
        wrapped.restore(moments)
    kept = {name: before[name] for name in ("step", "best", "left_out") if name in before}
    return wrapped, state | {"step": 0, "best": None} | kept


def _announce(recipe: Recipe, model: nn.Module, newest: Path | None, before: dict, state: dict, accelerator: Accelerator) -> None:
    folder = Path(recipe.train.output)
    if before.get("step", 0) < recipe.train.steps:
        checkpoint.check_room(folder / "checkpoints", model, recipe.train.keep)
    recipes.save(recipe, folder)
    kind = accelerator.distributed_type.value.lower()
    ranks = f"{state['threads']} threads, {state['precision']}, {accelerator.num_processes} process(es), {kind}"
    print(f"resuming from {newest}; {ranks}" if newest else ranks, flush=True)


def evaluate(module: nn.Module, valid: SequenceDataset, section: TrainSection, micro: int, accelerator: Accelerator) -> dict[str, float]:
    """Mean loss and metrics over the first `eval_batches` × `micro` held-out rows, shared out over the ranks.

    All ranks run as many batches, since a forward may be theirs in common: one that has none left runs the first again and counts it zero times.
    """
    groups, group = processes.groups(section.context_parallel)
    count = min(len(valid), section.eval_batches * micro)
    module.eval()
    sums: dict[str, Tensor] = {}
    with torch.no_grad(), accelerator.autocast():
        for first in range(0, count, groups * micro):
            start = first + group * micro
            counts, start = start < count, start if start < count else 0
            loss = Loss.of(module(_to(valid.batch(torch.arange(start, min(start + micro, count))), accelerator.device)))
            for name, value in {"loss": loss.sum, "weight": loss.weight, **loss.metrics}.items():
                sums[name] = sums.get(name, torch.zeros((), device=accelerator.device)) + value.detach().float() * counts
    return means(sums, accelerator)


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
    groups = processes.group_count(ranks, section.context_parallel)
    micro = section.micro_batch_size or max(1, section.batch_size // groups)
    accumulation, rest = divmod(section.batch_size, micro * groups)
    if rest or not accumulation:
        whom = "rank(s)" if groups == ranks else f"group(s) of {section.context_parallel} ranks"
        raise ValueError(
            f"train.batch_size={section.batch_size} cannot be cut into {groups} {whom} × micro-batches of {micro}; "
            f"make it a multiple of {groups} × train.micro_batch_size"
        )
    return micro, accumulation


def _check_same(newest: Path, before: dict[str, Any], fixed: dict[str, Any], recipe: Recipe) -> None:
    """Refuse to continue a checkpoint of another recipe, other data or another target, naming the first difference."""
    section = recipe.train
    # A key that is younger than the checkpoint had its default, unsaid.
    defaults = {name: field.get_default() for name, field in recipes.keys(type(recipe)).items() if not field.is_required()}
    for name in ("recipe", "facts"):
        then, now = (defaults if name == "recipe" else {}) | before[name], fixed[name]
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


class _Best:
    """The weights with the best τ so far, and how many evaluations ago that was."""

    def __init__(self, folder: Path, wrapped: ShardedModel, before: dict[str, Any] | None, together: bool) -> None:
        self.folder, self.wrapped, self.together = folder, wrapped, together
        self.tau, self.step, self.since = (before or {"tau": 0.0, "step": 0, "since": 0}).values()

    def state(self) -> dict[str, Any]:
        return {"tau": self.tau, "step": self.step, "since": self.since}

    def measure(self, probe: Callable[[], float] | None, step: int) -> dict[str, float]:
        """τ now, the same on all ranks; the weights are kept if it is the best. Nothing without a probe."""
        if probe is None:
            return {}
        accelerator, model = self.wrapped.accelerator, self.wrapped.model
        with self.wrapped.whole():
            model.eval()
            found = probe() if accelerator.is_main_process or self.together else 0.0
            tau = torch.tensor(found if accelerator.is_main_process else 0.0, device=accelerator.device)
            tau = cast(Tensor, accelerator.reduce(tau, "sum")).item()
            self.since += 1
            if tau > self.tau:
                self.tau, self.step, self.since = tau, step, 0
                processes.on_first(lambda: checkpoint.save_weights(checkpoint.best_file(self.folder, step), model))
        return {"tau": tau}

    def stale(self, patience: int) -> bool:
        return bool(patience) and self.since >= patience

    def restore(self) -> None:
        """Give the model its best weights again, on the first rank."""
        if self.wrapped.accelerator.is_main_process:
            checkpoint.load_weights(checkpoint.best_file(self.folder, self.step), self.wrapped.model)
