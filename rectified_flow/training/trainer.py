"""The training loop: steps, and at intervals a line of metrics, a grid of samples, a checkpoint."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import get_args

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, is_initialized
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset

from rectified_flow import distributed
from rectified_flow.condition import check_values
from rectified_flow.data.stream import Batch, Batches, StreamSampler, image_indices
from rectified_flow.errors import UsageError
from rectified_flow.flows.flow import Flow
from rectified_flow.networks.network import to_device
from rectified_flow.runs import checkpoint
from rectified_flow.runs.folder import CLOCK_FILE, data_description, times_of
from rectified_flow.runs.run import Run
from rectified_flow.runs.training_config import MixedPrecision, TrainingConfig
from rectified_flow.system.pictures import to_grid
from rectified_flow.system.signals import defer_signals, stop_requested
from rectified_flow.system.terminal import duration, line, progress_bar
from rectified_flow.training.clock import Clock, Pace
from rectified_flow.training.evaluations import Callback, draw_preview
from rectified_flow.training.loader import checked, explain_loader_errors, load, paired
from rectified_flow.training.optimizers import BuildOptimizer, LrSchedule, build_schedule, find_optimizer, warm_up_note
from rectified_flow.training.speed import Throughput, items_of, summarize
from rectified_flow.training.stepper import Stepper, TrainingState, constant_average, moved, trained_parameters

GO_ON, COMPARE, STOP = range(3)
"""Votes of a process after each step: to go on, to compare the run with the clock, to stop. The largest vote counts."""


class Trainer:
    """The training of a flow on a dataset, on however many processes were started.

    Args:
        flow: a module whose ``forward(**batch)`` returns the scalar loss, such as a :class:`Flow`. If it has
            ``sample(count, steps=...)``, grids of samples are generated. Its ``network``, or else the whole of it, is
            saved. Scalars in a dict ``logged`` are logged beside the loss; ``progress``, if it has one, is set before
            each step, from 0 to 1. Parameters that require no gradient are frozen: neither averaged nor compared.
        dataset: map-style, with items that are dicts of tensors, ``image``, or ``(image, label)``. Optional:
            ``read_batch(indices)`` reads items whole, ``fingerprint`` identifies the data, ``description`` names them
            for the user, ``described`` is a registered object whose ``open()`` opens them again.
        config: the run's flags.
        optimizer: builds the optimizer from pairs of name and trained parameter, for example
            ``partial(torch.optim.SGD, lr=0.1)``; the registered one that ``config`` names if not given. Its learning
            rates are the peaks.
        lr_schedule: the factor of the learning rates after ``updates`` of ``total`` updates; the warm-up and decay of
            ``config`` if not given.
        callbacks: called at the events of the run.
        data: description of the data, for the block ``data`` of ``config.json``; by default that of the dataset.
        flags: flags of the program that built these parts, for the block ``training``.
        preview_data: dataset whose sources are translated for previews; the training data if not given.
        clock: the time of the run, within which it ends; by default the run has as many steps as ``config`` says.

    Raises:
        UsageError: if the batch does not divide, the dataset is empty, a parameter would be trained in less than
            float32, the network of a :class:`Flow` does not return the shape of ``x``, a label of the first item does
            not exist, the precision is unavailable, or the processes differ in data, flags, flow or versions.
    """

    def __init__(
        self,
        flow: nn.Module,
        dataset: Dataset[object],
        config: TrainingConfig,
        *,
        optimizer: BuildOptimizer | None = None,
        lr_schedule: LrSchedule | None = None,
        callbacks: Sequence[Callback] = (),
        data: Mapping[str, object] | None = None,
        flags: Mapping[str, object] | None = None,
        preview_data: Dataset[object] | None = None,
        clock: Clock | None = None,
    ) -> None:
        if isinstance(optimizer, str):
            raise UsageError(f"`optimizer` is the name {optimizer}: pass it to TrainingConfig, or pass a function")
        self.preview_data, self.clock = preview_data, clock
        self.flow, self.dataset, self.config, self.callbacks = flow, dataset, config, list(callbacks)
        self.accelerator = build_accelerator(config)
        self.device = self.accelerator.device
        self.batch = config.split_batch(self.accelerator.num_processes)
        self.length = len(dataset)  # type: ignore[arg-type]
        if not self.length:
            raise UsageError("the dataset has no items: pass another dataset")
        self._set_pace(Pace(config.total_steps(self.batch, self.length)))
        parameters = trained_parameters(flow)
        to_device(flow, self.device, self.accelerator.mixed_precision)
        # One forward pass, so that a flow learns its shape, and a mismatch is reported first. The item is repeated,
        # because mean flow computes no derivative of a single row.
        was_training = flow.training
        item = Batches(dataset).__getitems__([0])
        check_values(getattr(flow, "conditions", {}), item)
        item = {name: 2 * each if _is_texts(each) else tree_map(_twice, each) for name, each in item.items()}
        with torch.no_grad(), self.accelerator.autocast():
            flow.eval()(**moved(item, self.device))
        flow.train(was_training)
        ema = constant_average(flow, config.ema_decay) if config.ema_decay else None
        if config.compile:
            # Forward mode does not pass through graphs cut at the borders of gradient buckets.
            torch._dynamo.config.optimize_ddp = False
            flow.compile()
        self.run = Run(
            self.accelerator, config, flow, dataset, lambda: (self.state.step, self.total_steps), data, flags
        )
        self.run.check_equal()  # first of all: where parameters differ in number, DDP would report nothing else
        # A fused step under a scaler does not report whether it was skipped.
        build = optimizer or find_optimizer(config, fused=self.accelerator.scaler is None)
        wrapped, prepared = self.accelerator.prepare(flow, build(list(parameters.items())))
        self.state = TrainingState(flow, ema, prepared, parameters)
        self.stepper = Stepper(
            self.accelerator,
            wrapped,
            self.state,
            self.batch,
            config,
            lr_schedule or build_schedule(config),
            lambda: self.pace,
            self._report_skipped,
        )
        self._takes_warm_up = lr_schedule is None
        self.throughput = Throughput()
        self.measured: dict[str, float] = {}
        """Values that callbacks measured last, which are logged with the metrics."""
        self._is_best = False
        self._saved: Path | None = None
        """The checkpoint of the current state, if there is one."""

    @property
    def averaged_flow(self) -> nn.Module:
        """The flow with averaged weights, to sample from; the one in training if no average is kept."""
        return self.flow if self.state.ema is None else self.state.ema.ema_model

    def train(self) -> bool:
        """Train to the last step, from the newest checkpoint if there is one and the config asks for it.

        Between two steps nothing waits for the device, except at intervals: a line of metrics reads the losses, a
        checkpoint copies the weights, and a callback or a preview may sample. A stop is requested by a signal on any
        process; all processes then end after the same step.

        Returns:
            Whether the last step is done; if not, a stop was requested, and the run is saved.

        Raises:
            UsageError: if the run cannot start in that folder, or resume from the checkpoints there.
            RunError: if it cannot continue: ranks that differ, too many bad steps, no space for the last checkpoint.
        """
        for callback in self.callbacks:
            callback.on_setup(self)
        with defer_signals(), self.run.locked():
            # An exception may have ended an earlier call within a step.
            self.stepper.finish_pending()
            self.state.optimizer.zero_grad()
            path = self.run.choose_checkpoint()
            state = self.state
            if path is not None:
                self._saved = path
                state.load(path, self.accelerator.process_index, self.accelerator.num_processes)
            # Changes of the pace may be recorded even if the run was killed before its first checkpoint.
            planned = self.config.total_steps(self.batch, self.length, state.step, state.images_seen)
            self._set_pace(Pace(planned) if self.clock is None else self.clock.pace(planned))
            if self.state.step >= self.total_steps:
                text = f"already trained {self.state.step} of {self.total_steps} steps ({path})"
                larger = f"larger `train_num_steps`, such as {2 * self.state.step}, in place of `budget` and `one_step`"
                more = "larger `train_num_steps` or `num_epochs`" if self.clock is None else larger
                self.run.print(f"{text}; to continue, pass this `output_dir` and a {more}")
                distributed.on_main(self.accelerator, self.run.write_status)
                return True
            with explain_loader_errors(), self.run.opened():
                batches = self._start(path)
                done, disable = self.state.step, not self.accelerator.is_main_process
                with progress_bar(total=self.total_steps, initial=done, unit="step", disable=disable) as bar:
                    while self.state.step < self.total_steps:
                        if hasattr(self.flow, "progress"):
                            progress = self.pace.position(self.state.step) / self.pace.planned
                            self.flow.progress = progress  # type: ignore[assignment]
                        self.stepper.take(batches)
                        self._saved, self._is_best = None, False
                        bar.update()
                        with self.throughput.paused():
                            for callback in self.callbacks:
                                callback.on_step(self)
                        if self.is_due(self.config.log_every):
                            bar.set_postfix_str(self._log_metrics())
                        with self.throughput.paused():
                            # Save the checkpoint first: a preview may run out of memory.
                            if self.is_due(self.config.save_every) or self._is_best:
                                self._save()
                            if self.is_due(self.config.sample_every):
                                self.preview()
                            if self._is_best and self._saved is None:  # set by a callback in preview()
                                self._save()
                        # The vote waits for the slowest rank, and this wait counts towards the throughput.
                        vote = distributed.largest(self.accelerator, self._vote())
                        if vote == STOP:
                            break
                        if vote == COMPARE and self.clock is not None:
                            self._compare_with_clock(self.clock)
                            bar.total = self.total_steps
                self._finish()
        return self.state.step == self.total_steps

    def is_due(self, every: int) -> bool:
        """Return whether this step is the last one, or reaches a multiple of ``every`` planned steps (0 for none)."""
        step = self.state.step
        if step == self.total_steps:
            return True
        now, before = self.pace.position(step), self.pace.position(step - 1)
        return every > 0 and now // every > before // every

    def _set_pace(self, pace: Pace) -> None:
        self.pace = pace
        self.total_steps = pace.total

    def end_here(self) -> None:
        """Make this step the last one. To be called on every rank."""
        self.total_steps = self.state.step

    def save_as_best(self) -> None:
        """Save this step, if it is not saved yet, and let the name ``best`` point to it. To be called on every rank."""
        if self._saved is None:
            self._is_best = True
        elif self.accelerator.is_main_process:
            with suppress(OSError, UsageError):  # a full or slow disk does not stop the run
                self.run.saver.wait(self.config.rank_timeout / 2)
                if checkpoint.is_checkpoint(self._saved):  # else it could not be written
                    checkpoint.mark_best(self._saved)

    # Before the first step

    def _start(self, path: Path | None) -> Iterator[Batch]:
        """Report how the run starts, bring all processes to the same start, and return this rank's micro-batches."""
        data = data_description(self.dataset)
        self.run.print(summarize(self.config, self.accelerator, self.flow, data, self.length, self.total_steps))
        if path is not None:
            self.run.print(line("resume", f"step {self.state.step}, from {path}"))
        if self._takes_warm_up and (note := warm_up_note(self.config, self.total_steps)):
            self.run.print(f"warning: {note}")
        self.flow.train()
        batches = self._warm_up_ddp(checked(self._batches(), self.flow, self.run.print))
        distributed.on_main(self.accelerator, self._begin_clock)
        for callback in self.callbacks:
            callback.on_start(self)
        if self._is_best:
            self._save()
        self.throughput.restart(self.state.images_seen)
        return batches

    def _batches(self) -> Iterator[Batch]:
        rank, position = self.accelerator.process_index, self.state.images_seen
        stream = StreamSampler(self.length, self.config.seed, self.batch, rank, position)
        batches = load(self.dataset, stream, self.config)
        if isinstance(self.flow, Flow) and self.flow.coupling == "ot":
            batches = paired(batches, self.flow, stream, self.state.step)
        return batches

    def _warm_up_ddp(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Bring every process to the same start: equal weights, gradient buckets in their final order.

        DistributedDataParallel reorders its buckets after the first backward pass, and a sum of more than two numbers
        depends on their order: a pass thrown away makes the first step of a resumed run like any other.
        """
        if self.accelerator.num_processes == 1:
            return batches
        distributed.check_equal_weights(self.accelerator, self.flow.parameters())
        # A forward pass may change buffers, such as running means.
        first, buffers = next(batches), [buffer.clone() for buffer in self.flow.buffers()]
        self.stepper.forward_backward(first, self.batch.accumulation - 1)
        self.state.optimizer.zero_grad()
        for buffer, before in zip(self.flow.buffers(), buffers, strict=True):
            buffer.copy_(before)
        distributed.set_collective_timeout(self.config.rank_timeout)
        return chain([first], batches)

    # At intervals

    def _vote(self) -> int:
        """Return what this process asks of all processes after a step: to go on, to read the clock, or to stop."""
        if stop_requested() is not None:
            return STOP
        if self.clock is None or not self.accelerator.is_main_process:
            return GO_ON
        return COMPARE if self.clock.tick(self.state.step, self.total_steps) else GO_ON

    def _compare_with_clock(self, clock: Clock) -> None:
        """Change the number of steps if the run would end too early or too late. Collective."""
        pace = distributed.on_main(self.accelerator, lambda: clock.compare(self.pace))
        if pace == self.pace:
            return
        self._write_clock(durable=True)
        text = f"{pace.total:,} steps in all instead of {self.total_steps:,}, to end after {duration(clock.seconds)}"
        self.run.print(line("clock", f"at step {self.state.step:,}: {text}"))
        self._set_pace(pace)

    def _log_metrics(self) -> str:
        """Write the mean loss since the last line, for which the device is waited for, and return it for the bar."""
        self.stepper.finish_pending()
        state = self.state
        state.require_sound()
        by_rank = distributed.gather_scalars(self.accelerator, state.sums)
        means = {name: fmean(sums) / state.summands for name, sums in by_rank.items()}
        state.sums, state.summands = {}, 0
        rate = self.throughput.restart(state.images_seen)
        values = {
            "images_seen": state.images_seen,
            **means,
            "learning_rate": state.optimizer.param_groups[0]["lr"],
            "images_per_second": round(rate, 2),
            "bad_steps": state.bad_steps,
            **self.measured,
            **({} if state.optimizer.scaler is None else {"scaler_skips": state.scaler_skips}),
        }
        self.run.log.metrics(state.step, values)
        self._write_clock()
        self._write_times(self.batch.total / rate)
        for callback in self.callbacks:
            callback.on_log(self, values)
        shown = [f"{name} {value:.4f}" for name, value in means.items() if name != "grad_norm"]
        return ", ".join([*shown, f"{rate:.1f} {items_of(self.flow)}/s"])

    def _begin_clock(self) -> None:
        """Record the time of the run, or that it has none any more."""
        if self.clock is None:
            (self.config.output_dir / CLOCK_FILE).unlink(missing_ok=True)
        else:
            self.clock.saved = self.state.step > 0
            self.clock.write(self.config.output_dir, self.pace.planned)

    def _write_clock(self, *, durable: bool = False) -> None:
        """Write the elapsed time, which counts towards the budget of a resumed run, and the changes of the pace."""
        if self.clock is not None and self.accelerator.is_main_process:
            with self.run.log.tolerant("the clock"):
                self.clock.saved = bool(checkpoint.list_checkpoints(self.config.checkpoints))
                self.clock.write(self.config.output_dir, self.pace.planned, durable=durable)

    def _write_times(self, step_time: float) -> None:
        """Write the step and the expected end of the run to ``status.json``.

        The clock sets the end, unless the number of steps is limited.
        """
        if self.accelerator.is_main_process and self.state.step < self.total_steps:
            step, total = self.state.step, self.total_steps
            left = (total - step) * step_time
            if self.clock is not None and total != self.clock.most_steps:
                left = self.clock.expected(step, total, step_time)
            self.run.write_status(running=True, times=times_of(step_time, left))

    def preview(self) -> None:
        """Write a grid of samples of the averaged flow. Collective."""
        self.stepper.finish_pending()
        data = self.dataset if self.preview_data is None else self.preview_data
        drawn = draw_preview(self.averaged_flow, data, self.config, self.accelerator, self.batch.per_process)
        if drawn is not None:
            self.run.log.samples(self.state.step, to_grid(*drawn))
            for callback in self.callbacks:
                callback.on_preview(self, drawn[0])

    def _report_skipped(self, positions: list[int]) -> None:
        """Report a step that was skipped, with the items of the global batch that may have caused it."""
        step = self.state.step
        images = sorted(image_indices(positions, self.length, self.config.seed).tolist())
        shown = ", ".join(map(str, images[:8])) + ", ..." * (len(images) > 8)
        bad = f"loss or gradient is not finite on {items_of(self.flow)} {shown} (all in bad_steps.jsonl)"
        self.run.print(f"warning: step {step} was skipped, number {self.state.bad_in_a_row} in a row: {bad}")
        self.run.log.bad_step(step, images)

    def _save(self) -> None:
        self.stepper.finish_pending()
        distributed.check_equal_weights(self.accelerator, self.state.parameters.values())
        self.state.require_sound()
        state = self.state
        counters = state.counters(distributed.gather_scalars(self.accelerator, state.sums))
        self._saved = self.run.save(state.step, state.tensors(), counters, best=self._is_best)
        for callback in self.callbacks:
            callback.on_checkpoint(self, self._saved)

    def _finish(self) -> None:
        """Save the last step, wait for the disk, and report where everything is."""
        if self._saved is None:
            self._save()
        # The others wait while the main process writes.
        distributed.set_collective_timeout(distributed.STARTUP_TIMEOUT.total_seconds())
        if distributed.on_main(self.accelerator, self.run.saver.is_behind):
            self._save()
        distributed.on_main(self.accelerator, self.run.finish)
        if self.clock is not None and self.state.step == self.total_steps:
            self._write_clock()
            self.run.print(line("time", f"{duration(self.clock.elapsed)} of {duration(self.clock.seconds)}"))
        for callback in self.callbacks:
            callback.on_end(self)


def choose_precision(config: TrainingConfig, device: torch.device) -> str:
    """Choose the precision of a run: that of the flag, else of Accelerate or its launcher, else the fastest safe one.

    The fastest is bf16 on a GPU with native support, and float32 (``no``) otherwise.
    """
    inherited = AcceleratorState().mixed_precision if is_initialized() else os.environ.get("ACCELERATE_MIXED_PRECISION")
    made_for_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    fastest = "bf16" if made_for_bf16 else "no"
    precision = config.mixed_precision or (inherited or fastest).lower()
    if precision not in get_args(MixedPrecision):
        known = "pass `mixed_precision` bf16, fp16 or no, or correct the configuration of the launcher"
        raise UsageError(f"the launcher asks for the precision {precision}, which is not supported: {known}")
    if device.type == "cpu" and precision == "fp16":
        raise UsageError("`mixed_precision` fp16 needs a GPU: on a CPU pass bf16 or no")
    return precision


def build_accelerator(config: TrainingConfig) -> Accelerator:
    """Build the Accelerator of a run."""
    state = distributed.join_processes()
    precision = choose_precision(config, state.device)
    if is_initialized() and precision != AcceleratorState().mixed_precision:
        other = f"this process already uses mixed_precision {AcceleratorState().mixed_precision}: start a new process"
        raise UsageError(f"`mixed_precision` {precision} is not possible, as {other}")
    return Accelerator(
        mixed_precision=precision,
        log_with=None if config.log_with == "none" else config.log_with,
        project_dir=config.output_dir,
        # The trainer counts micro-batches. The plugin divides the loss and ignores the end of the loader.
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=config.split_batch(state.num_processes).accumulation, sync_with_dataloader=False
        ),
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )


def _is_texts(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(each, str) for each in values)


def _twice(value: object) -> object:
    return torch.cat((value, value)) if isinstance(value, torch.Tensor) else value
