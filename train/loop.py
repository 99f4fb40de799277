"""The only training loop: accumulation, clipping, schedule, evaluation, saving and exact resumption.

It knows neither what is trained nor the loss: an objective gives a sum, and the weight to divide it by.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from draftsmith.inference.kernels import use
from draftsmith.inference.progress import Bar
from draftsmith.train.engine import checkpoint, processes
from draftsmith.train.engine.best import BestWeights, MeasureTau
from draftsmith.train.engine.log import Log, means, sums_of
from draftsmith.train.engine.optimizer import cast_trained
from draftsmith.train.engine.order import drawn_rows, prefetched, sample_rows
from draftsmith.train.engine.profiler import Profile
from draftsmith.train.engine.resume import start_or_resume
from draftsmith.train.engine.sharded import ShardedModel
from draftsmith.train.engine.watchdog import NonFiniteCounter, Signals, Watchdog, translate_errors
from draftsmith.train.objective import Batch, Loss, Objective, Progress, SequenceDataset
from draftsmith.train.recipe import Recipe, TrainSection

# (steps done, whether to stop early, context in which the model has complete weights) -> None
Refresh = Callable[[int, Callable[[], bool], Callable[[], AbstractContextManager[None]]], None]


def fit(
    recipe: Recipe,
    model: nn.Module,
    objective: Objective,
    train: SequenceDataset,
    valid: SequenceDataset,
    fingerprint: dict[str, Any],
    *,
    target_forward: Callable[[Batch], object] | None = None,
    measure_tau: MeasureTau | None = None,
    collective: bool = False,
    keep_best: bool = True,
    refresh: Refresh | None = None,
    progress: Progress | None = None,
) -> tuple[Accelerator, int]:
    """Train `model` in place as the recipe says, and write checkpoints and metrics.jsonl to `train.output`.

    The run continues from the newest complete checkpoint there, exactly, under any launcher and on any number of ranks. SIGINT, SIGTERM and
    SIGUSR1 save a checkpoint and exit with 128 + signal.

    Args:
        recipe: of the run.
        model: what is trained; parameters that require no gradient stay as they are.
        objective: gives the loss of a batch.
        train, valid: training and held-out data.
        fingerprint: what must be the same when the run is continued, such as hashes of the data and of the target.
        target_forward: the frozen target's forward on a batch, with which a step's time is compared.
        measure_tau, collective: measures τ at each evaluation, on the main process or on all ranks.
        keep_best: end with the weights of the best τ, and after train.patience evaluations without a better one; not for a model that
            changes its target, whose τ is highest where the target says least.
        refresh: makes on-policy samples. It is called on all ranks before the first step and after each, with the steps taken, a function
            that says whether a signal asks the run to stop, and a context, entered by all ranks, in which `model` has complete weights.
            Samples that it had no time for are asked for again when the run continues.
        progress: shows the steps taken to an objective that depends on them.

    Returns:
        The Accelerator, and the step whose weights `model` has on the main process, in fp32 also where train.weights is bfloat16.

    Raises:
        ValueError: the checkpoint is of another recipe, other data or another target; the batch cannot be cut; ranks read different data.
        FloatingPointError: train.max_nonfinite_steps steps in a row were not finite.
        OSError: a checkpoint or metrics.jsonl could not be written.
        MemoryError: the memory of the GPU or the host is full.
        ConnectionError: another process of the run is gone.
        SystemExit: a signal ended the run.
    """
    folder = Path(recipe.train.output) / "checkpoints"
    advice = f"the same command goes on from the newest checkpoint in {folder}"
    with Watchdog(recipe.train.watchdog_minutes, advice) as watchdog, translate_errors(recipe, advice), use(recipe.train.kernels):
        sharded, state = start_or_resume(
            recipe,
            model,
            train,
            fingerprint,
            make_step=lambda trained: _Step(trained, objective),
        )
        best = BestWeights(folder, sharded, state["best"], measure_tau, collective, keep_best)
        run = _Run(recipe, sharded, state, best, train, valid, watchdog, target_forward, progress or Progress())
        with Signals() as signals:
            stopped_by = run.train_steps(signals, refresh)
            if stopped_by:
                run.accelerator.wait_for_everyone()  # once one rank is gone, the launcher gives the others 30 seconds
                raise SystemExit(128 + stopped_by)
    sharded.gather_weights()
    run.print_end()
    if best.step:
        best.restore()
    if recipe.train.weights == "bfloat16":
        cast_trained(model, torch.float32)  # as what is published has it
    return run.accelerator, best.step or run.done


class _Step(nn.Module):
    """The objective as one forward, so that DDP and DeepSpeed see a single call."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model, self.objective = model, objective

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return self.objective(self.model, batch).to_dict()


class _Run:
    """The steps of a run, and what they write.

    Attributes:
        done: steps taken.
        evaluated: the step of the last evaluation.
        saved: `done` and `evaluated` of the newest checkpoint.
        micro_batch: sequences of one forward on one rank.
        accumulation: micro-batches of one step.
        groups: context-parallel groups, which read sequences of their own.
        group: number of this rank's group.
    """

    def __init__(
        self,
        recipe: Recipe,
        sharded: ShardedModel,
        state: dict[str, Any],
        best: BestWeights,
        train: SequenceDataset,
        valid: SequenceDataset,
        watchdog: Watchdog,
        target_forward: Callable[[Batch], object] | None,
        progress: Progress,
    ) -> None:
        section, accelerator = recipe.train, sharded.accelerator
        self.section, self.sharded, self.state, self.best, self.watchdog = section, sharded, state, best, watchdog
        self.train, self.valid, self.accelerator = train, valid, accelerator
        self.micro_batch, self.accumulation = processes.split_batch(section, accelerator.num_processes)
        self.groups, self.group = processes.data_parallel(section.context_parallel)
        self.done: int = state["step"]
        self.evaluated: int = state["evaluated"]
        self.saved = self.done, self.evaluated
        self.progress = progress
        progress.steps, progress.total = self.done, section.steps
        self.log = Log(recipe, accelerator, self.done, self.evaluated, target_forward)
        self.nonfinite = NonFiniteCounter(Path(section.output), section.max_nonfinite_steps, state["left_out"], accelerator.process_index)
        self.steps = range(self.done, self.done if best.is_stale(section.patience) else section.steps)
        self.bar = Bar("training", section.steps, self.done, accelerator.is_main_process)
        self.profile = Profile(section, accelerator, self.done, self.log.paused)

    def train_steps(self, signals: Signals, refresh: Refresh | None) -> int:
        """Take all steps that are left -> the signal that stopped the run, 0 if none did."""
        with self._open() as batches:
            if refresh and self.steps:
                self._refresh(refresh, signals)
                stopped_by = self._save_if_signalled(signals)
                if stopped_by:
                    return stopped_by
            if self.evaluated < self.done and self._is_due(self.section.eval_every):  # the run was ended during that evaluation
                self._evaluate()
                self._save()
                if self.best.is_stale(self.section.patience):
                    return 0
            for step in self.steps:
                self._train_step(step, batches)
                if self._is_due(self.section.eval_every):
                    saves = self.best.measure_tau is not None or self._is_due(self.section.save_every)
                    if saves:  # decoding may fail, or outlast a signal's grace
                        self._save()
                    self._evaluate()
                    if saves:  # after a crash, a run without this record would evaluate again
                        self._save()
                finished = self.done == self.section.steps or self.best.is_stale(self.section.patience)
                if refresh and not finished:
                    self._refresh(refresh, signals)
                if finished or self._is_due(self.section.save_every):
                    self._save()
                stopped_by = self._save_if_signalled(signals)
                if finished or stopped_by:
                    return stopped_by
        return 0

    @contextmanager
    def _open(self) -> Iterator[Iterator[Batch]]:
        """Within it: the micro-batches of this rank, in order. Everything that was opened is closed at its end."""
        shape = self.accumulation, self.groups, self.micro_batch
        micro_batches = (rows for step in self.steps for rows in self._rows(step).view(shape)[:, self.group])
        batches = prefetched(self.train.batch, micro_batches)
        with self.bar, closing(self.train), closing(self.valid), closing(batches), closing(self.log), self.profile:
            yield batches

    def _rows(self, step: int) -> Tensor:
        """Numbers of the sequences of a step, over all ranks."""
        size = self.section.batch_size
        return sample_rows(len(self.train), self.section.seed, step * size, size)

    def _is_due(self, every: int) -> bool:
        """Whether something that is done every so many steps, and at the end, is done now."""
        return self.done == self.section.steps or (every > 0 and self.done % every == 0)

    def _train_step(self, step: int, batches: Iterator[Batch]) -> None:
        """Take one optimizer step, number `step` from 0. It is left out where its gradient is not finite."""
        accelerator, module, optimizer = self.accelerator, self.sharded.module, self.sharded.optimizer
        rate, weight = learning_rate(self.section, step), self.train.weight(self._rows(step))
        for group in optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        module.train()
        seen: list[Batch] = []
        applied = False
        for number in range(self.accumulation):
            self.watchdog.report(f"waiting for the data of step {step + 1}")
            seen.append(next(batches))
            self.watchdog.report(f"in step {step + 1}")
            batch = _to_device(seen[-1], accelerator.device)
            with accelerator.accumulate(module), accelerator.autocast(), self.log.measuring(batch, self.progress):
                # Dropout's noise depends on the position in the sample order, not on the rank, so that a run resumes at any world size.
                position = number * self.groups + self.group
                torch.manual_seed((self.section.seed * 1_000_003 + step) * 4096 + position)
                loss = Loss.from_dict(module(batch))
                # Accelerate or DeepSpeed divides by the accumulation steps and by the ranks: undo both, then divide by the step's weight.
                accelerator.backward(loss.sum * (self.accumulation * accelerator.num_processes / max(weight, 1.0)))
                if accelerator.sync_gradients:
                    applied = self.sharded.may_step(accelerator.clip_grad_norm_(module.parameters(), self.section.clip))
                if applied:
                    optimizer.step()
                optimizer.zero_grad()
            self.log.add(loss)
        self.done = self.progress.steps = step + 1
        self.nonfinite.after(self.done, applied, seen)
        self.profile.step()
        if self._is_due(self.section.log_every):
            self.bar.update(self.done, self.log.write_training(self.done, rate, left_out=self.nonfinite.left_out))

    def _evaluate(self) -> None:
        """Write held-out means, and τ if it is measured."""

        def report() -> None:
            self.watchdog.report(f"evaluating step {self.done}")

        with self.log.paused():
            metrics = held_out_means(self.sharded.module, self.valid, self.section, self.micro_batch, self.accelerator, report)
            if self.best.waits:
                self.watchdog.wait("waiting for the main process to measure τ")
            self.log.write_evaluation(self.done, metrics | self.best.measure(self.done, report))
        report()
        self.evaluated = self.done

    def print_end(self) -> None:
        """Say why the run ended early, and which weights are published."""
        if self.done < self.section.steps:
            self.log.print(
                f"no better τ in {self.best.since} evaluations: ended after step {self.done} of {self.section.steps}; a higher train.patience "
                "goes on"
            )
        if self.best.step:
            self.log.print(f"best τ {self.best.tau:.3f} after step {self.best.step}; those weights are kept")

    def _refresh(self, refresh: Refresh, signals: Signals) -> None:
        """Have on-policy samples made; each time that `refresh` asks whether to stop counts as progress."""

        def stop_requested() -> bool:
            self.watchdog.report("making samples")
            return signals.pending()

        with self.log.paused():
            refresh(self.done, stop_requested, self.sharded.gathered)

    def _save(self) -> None:
        """Write a checkpoint of the steps done, if there is none yet; its state alone where only an evaluation has been added."""
        if self.saved == (self.done, self.evaluated):
            return
        self.watchdog.report(f"saving step {self.done}")
        folder, keep = self.best.folder, self.section.keep
        state = self.state | {"best": self.best.state(), "left_out": self.nonfinite.left_out, "evaluated": self.evaluated}
        with self.log.paused():
            if self.saved[0] == self.done:
                processes.on_main(lambda: checkpoint.save_state(folder, self.done, state, keep))
            else:
                self.sharded.gather_weights()
                weights, optimizer_state = checkpoint.trained_tensors(self.sharded.model), self.sharded.optimizer_state()
                processes.on_main(lambda: checkpoint.save(folder, self.done, weights, optimizer_state, state, keep))
        self.saved = self.done, self.evaluated

    def _save_if_signalled(self, signals: Signals) -> int:
        """The signal that all ranks agree to stop for, after a checkpoint was written; 0 if there is none."""
        caught = signals.agreed(self.accelerator)
        if caught:
            self._save()
            self.log.print(f"stopped by signal {caught} after step {self.done}; {self.watchdog.advice}")
        return caught


def learning_rate(train: TrainSection, step: int) -> float:
    """The learning rate of optimizer step `step`, from 0. WSD falls linearly over the last quarter (arXiv 2404.06395)."""
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    progress = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    factor = {
        "constant": 1.0,
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "linear": 1 - progress,
        "wsd": min(1.0, 4 * (1 - progress)),
    }[train.schedule]
    return train.lr * (train.min_lr + (1 - train.min_lr) * factor)


def held_out_means(
    module: nn.Module,
    valid: SequenceDataset,
    section: TrainSection,
    micro_batch: int,
    accelerator: Accelerator,
    report: Callable[[], None],
) -> dict[str, float]:
    """Mean loss and metrics over the section's `held_out_sequences`, always the same ones, which the ranks share.

    All ranks run equally many batches, since the target's forward may need all of them. A rank that has no batch left runs the first one again
    and counts it zero times.

    Args:
        module: the wrapped step module.
        valid: held-out data.
        section: held_out_sequences and context_parallel.
        micro_batch: sequences of one forward on one rank.
        accelerator: of the run.
        report: is called before each batch.

    Returns:
        "loss" and the objective's metrics by name, equal on all ranks.
    """
    groups, group = processes.data_parallel(section.context_parallel)
    order = drawn_rows(len(valid))[: section.held_out_sequences]
    count = len(order)
    module.eval()
    sums: dict[str, Tensor] = {}
    with torch.no_grad(), accelerator.autocast():
        for first in range(0, count, groups * micro_batch):
            start = first + group * micro_batch
            counts = start < count
            if not counts:
                start = 0
            report()
            rows = order[start : start + micro_batch]
            loss = Loss.from_dict(module(_to_device(valid.batch(rows), accelerator.device)))
            for name, value in sums_of(loss).items():
                sums[name] = sums.get(name, 0) + value * counts
    return means(sums, accelerator)


def _to_device(batch: Batch, device: torch.device) -> Batch:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
