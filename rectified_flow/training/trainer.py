"""The training loop: steps, and at intervals a line of metrics, a grid of samples, a checkpoint."""

from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

from rectified_flow.averages import PowerAverages, constant_average
from rectified_flow.data.stream import StreamSampler, collate
from rectified_flow.errors import UsageError
from rectified_flow.evaluation.evaluator import Evaluator
from rectified_flow.interruption import deferring, leave_signals_to_parent, requested
from rectified_flow.networks import place
from rectified_flow.processes.collectives import (
    any_rank,
    check_equal_weights,
    gather_scalars,
    limit_waiting,
    on_main,
)
from rectified_flow.processes.joining import PATIENCE_AT_START
from rectified_flow.progress import progress_bar
from rectified_flow.training.accelerator import build_accelerator, precision_name
from rectified_flow.training.config import TrainingConfig
from rectified_flow.training.costs import forward_flops
from rectified_flow.training.evaluations import Evaluations
from rectified_flow.training.plan import describe_run
from rectified_flow.training.previews import draw_preview
from rectified_flow.training.record import RunRecord
from rectified_flow.training.resume import choose_checkpoint, identify_run
from rectified_flow.training.state import TrainingState, network_of
from rectified_flow.training.stepper import Batch, Stepper
from rectified_flow.training.tracking import Throughput


class Trainer:
    """Train a flow on a dataset, on however many processes were started.

    Args:
        flow: a module whose ``forward(**batch)`` returns the scalar loss. If it has ``sample(count, steps=...)``
            returning images in [0, 1], grids of samples are drawn. Its ``network``, or else the whole of it, is saved.
            Scalars it leaves in a dict ``logged`` are logged beside the loss; ``progress``, if it has one, is set
            before each step, from 0 to 1.
        dataset: map-style, with items that are ``image``, ``(image, label)``, or dicts of tensors.
        config: the run's flags.
        evaluator: what measures a :class:`Flow` where ``config.evaluate_every`` asks for it.

    Raises:
        UsageError: if the batch does not divide, the dataset is smaller than it, or the precision is not to be had.
    """

    def __init__(
        self, flow: nn.Module, dataset: Dataset[Any], config: TrainingConfig, evaluator: Evaluator | None = None
    ) -> None:
        self.flow, self.dataset, self.config = flow, dataset, config
        self.accelerator = build_accelerator(config)
        self.device = self.accelerator.device
        self.batch = config.split_batch(self.accelerator.num_processes)
        self.length = len(dataset)  # type: ignore[arg-type]
        if self.length < self.batch.total:
            raise UsageError(
                f"the dataset has {self.length} images, fewer than one global batch ({self.batch}): "
                "pass a smaller --batch_size"
            )
        self.total_steps = config.total_steps(self.batch, self.length)
        place(flow, self.device, self.accelerator.mixed_precision)
        # A look at one image: a flow learns its shape, and a mismatch shows before anything else happens.
        self.flops = forward_flops(flow, {key: value.to(self.device) for key, value in collate([dataset[0]]).items()})
        ema = constant_average(flow, config.ema_decay) if config.use_ema else None
        power = PowerAverages(network_of(flow)) if config.power_ema else None
        if config.compile:
            # Forward mode does not pass through graphs cut at the borders of gradient buckets.
            torch._dynamo.config.optimize_ddp = False
            flow.compile()
        parameters = {name: p for name, p in flow.named_parameters() if p.requires_grad}
        optimizer = torch.optim.AdamW(
            parameters.values(),
            lr=config.learning_rate,
            betas=(0.9, 0.99),
            weight_decay=config.weight_decay,
            fused=self.accelerator.scaler is None,  # a fused step under a scaler does not tell whether it was skipped
        )
        wrapped, prepared = self.accelerator.prepare(flow, optimizer)
        self.state = TrainingState(flow, ema, power, prepared, parameters)
        self.record = RunRecord(self.accelerator, config, lambda: (self.state.step, self.total_steps))
        tell_bad = self.record.bad_step
        self.stepper = Stepper(self.accelerator, wrapped, self.state, config, self.batch, self.length, tell_bad)
        fingerprint = getattr(dataset, "fingerprint", f"{self.length} items")
        self.run = identify_run(config, fingerprint, self.batch.total, precision_name(self.accelerator))
        self.throughput = Throughput()
        self.evaluations: Evaluations | None = None
        if config.evaluate_every > 0:
            if evaluator is None:
                raise ValueError("config.evaluate_every needs an evaluator")
            self.evaluations = Evaluations(self.accelerator, evaluator, config, self.record)

    @property
    def averaged_flow(self) -> nn.Module:
        """The flow with averaged weights, to sample from; the one in training if no average is kept."""
        return self.flow if self.state.ema is None else self.state.ema.ema_model

    def train(self) -> bool:
        """Train to the last step, from the newest checkpoint if there is one and the config says so.

        Returns:
            Whether the last step is done; if not, the run was asked to end, and has saved what it had.

        Raises:
            UsageError: if the run cannot start in that folder, or go on from what is there.
            RunError: if it cannot go on: ranks that differ, too many bad steps, no space for the last checkpoint.
        """
        say = self.record.say
        if self.evaluations is not None:
            self.evaluations.evaluator.prepare()  # it may take long, and there is nothing to save yet
        with deferring(), self.record.holding_folder():
            path, self.run = on_main(self.accelerator, lambda: choose_checkpoint(self.config, self.run, say))
            if path is not None:
                self._load(path)
            if self.state.step >= self.total_steps:
                say(f"already trained {self.state.step} of {self.total_steps} steps, see {path}: ask for more to go on")
                self.record.tell("finished")
                return True
            with self.record.writing():
                say(describe_run(self.config, self.accelerator, self.flow, self.flops, self.dataset))
                if path is not None:
                    say(f"{'resume':<11} step {self.state.step}, from {path}")
                return self._run()

    def _run(self) -> bool:
        self.flow.train()
        batches = self._even_out(self._batches())
        self.throughput.restart(self.state.images_seen)
        places: dict[str, Path] = {}
        request = False
        if self.evaluations is not None and self.state.step > 0 and self._is_due(self.config.evaluate_every):
            self.evaluations.make_up(self.averaged_flow, self.state.step)
        with self._progress_bar() as bar:
            while self.state.step < self.total_steps and not request:
                if hasattr(self.flow, "progress"):
                    self.flow.progress = self.state.step / self.total_steps  # type: ignore[assignment]
                self.stepper.take(batches)
                bar.update()
                if self._is_due(self.config.log_every):
                    bar.set_postfix_str(self._log_metrics())
                with self.throughput.paused():
                    if self._is_due(self.config.sample_every):
                        places |= self._draw_samples()
                    best = self._evaluate()
                    request = any_rank(self.accelerator, requested() is not None)
                    if self._is_due(self.config.save_every) or request or best:
                        self._save(best)
        limit_waiting(PATIENCE_AT_START.total_seconds())  # for the disk, which is the main process's alone
        places |= on_main(self.accelerator, self.record.finish)
        for name, path in places.items():
            self.record.say(f"{name:<11} {path}")
        return self.state.step == self.total_steps

    def _batches(self) -> Iterator[Batch]:
        rank, position = self.accelerator.process_index, self.state.images_seen
        loader = DataLoader(
            self.dataset,
            batch_sampler=StreamSampler(self.length, self.config.seed, self.batch, rank, position),
            collate_fn=collate,
            num_workers=self.config.num_workers,
            multiprocessing_context=self.config.multiprocessing_context,
            persistent_workers=self.config.persistent_workers,
            pin_memory=self.config.pin_memory,
            worker_init_fn=leave_signals_to_parent,
        )
        return iter(loader)

    def _even_out(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Bring every process to the same start: equal weights, gradient buckets in their final order.

        DistributedDataParallel reorders its buckets after the first backward pass, and a sum of more than two numbers
        depends on their order: a pass thrown away makes the first step of a resumed run like any other.
        """
        if self.accelerator.num_processes == 1:
            return batches
        check_equal_weights(self.accelerator, self.flow)
        first = next(batches)
        self.stepper.backward(first, self.batch.accumulation - 1)
        self.state.optimizer.zero_grad()
        limit_waiting(self.config.rank_timeout)
        return chain([first], batches)

    # At intervals

    def _is_due(self, every: int) -> bool:
        return self.state.step == self.total_steps or (every > 0 and self.state.step % every == 0)

    def _log_metrics(self) -> str:
        """Write down the mean loss since the last time; the only moment at which the device is waited for."""
        self.stepper.settle()
        state = self.state
        by_rank = gather_scalars(self.accelerator, state.sums)
        means = {name: fmean(sums) / state.summands for name, sums in by_rank.items()}
        state.clear_sums()
        rate = self.throughput.restart(state.images_seen)
        values = {
            "images_seen": state.images_seen,
            **means,
            "learning_rate": state.optimizer.param_groups[0]["lr"],
            "images_per_second": round(rate, 2),
            "bad_steps": state.bad_steps,
            **({} if state.optimizer.scaler is None else {"scaler_skips": state.scaler_skips}),
        }
        self.record.metrics(state.step, values)
        shown = [f"{name} {value:.4f}" for name, value in means.items() if name != "grad_norm"]
        return ", ".join([*shown, f"{rate:.1f} img/s"])

    def _draw_samples(self) -> dict[str, Path]:
        self.stepper.settle()
        images = draw_preview(self.accelerator, self.averaged_flow, self.config)
        return self.record.samples(self.state.step, images)

    def _evaluate(self) -> bool:
        """Measure, if it is time; returns whether there is no better checkpoint."""
        if self.evaluations is None or not self._is_due(self.config.evaluate_every):
            return False
        self.stepper.settle()
        return self.evaluations.evaluate(self.averaged_flow, self.state.step)

    def _save(self, best: bool = False) -> None:
        self.stepper.settle()
        check_equal_weights(self.accelerator, self.flow)
        state, sums = self.state, gather_scalars(self.accelerator, self.state.sums)
        documents = state.documents(self.config.plain(), asdict(self.run), sums)
        self.record.checkpoint(state.step, state.tensors(), documents, best=best)

    def _load(self, path: Path) -> None:
        self.state.load(path, self.accelerator.process_index, self.accelerator.num_processes)
        self.total_steps = self.config.total_steps(self.batch, self.length, self.state.step, self.state.images_seen)

    def _progress_bar(self) -> "tqdm[Any]":
        return progress_bar(
            total=self.total_steps,
            initial=self.state.step,
            unit="step",
            disable=not self.accelerator.is_main_process,
        )
