"""The training loop: move a batch, loss, backward, clip, step, EMA; at intervals log, draw samples, save."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from ema_pytorch import EMA
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

from rectified_flow.data.stream import StreamSampler, collate
from rectified_flow.errors import UsageError
from rectified_flow.progress import progress_bar
from rectified_flow.randomness import Rows, rows_of
from rectified_flow.training import checkpoint
from rectified_flow.training.collectives import check_equal_weights, gather_interleaved, mean_over_ranks, on_main
from rectified_flow.training.config import TrainingConfig
from rectified_flow.training.launch import build_accelerator
from rectified_flow.training.plan import describe_run, forward_flops
from rectified_flow.training.resume import choose_checkpoint, identify_run
from rectified_flow.training.state import CONFIG_FILE, STATE_FILE, TrainingState
from rectified_flow.training.tracking import RunLog, Throughput

Batch = dict[str, Tensor]


class Trainer:
    """Train a flow on a dataset, on however many processes were started.

    Args:
        flow: a module whose ``forward(**batch)`` returns the scalar loss. If it has ``sample(count, steps=...)``
            returning images in [0, 1], grids of samples are drawn. Its ``network``, or else the whole of it, is saved.
            Scalars it leaves in a dict ``logged`` are logged beside the loss; ``progress``, if it has one, is set
            before each step, from 0 to 1.
        dataset: map-style, with items that are ``image``, ``(image, label)``, or dicts of tensors.
        config: the run's flags.

    Raises:
        UsageError: if the batch does not divide, the dataset is smaller than it, or the precision is not to be had.
    """

    def __init__(self, flow: nn.Module, dataset: Dataset[Any], config: TrainingConfig) -> None:
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
        flow.to(self.device)
        # A look at one image: a flow learns its shape, and a mismatch shows before anything else happens.
        self.flops = forward_flops(flow, self._to_device(collate([dataset[0]])))
        ema = _average(flow, config.ema_decay) if config.use_ema else None
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
        self.wrapped, prepared = self.accelerator.prepare(flow, optimizer)
        self.state = TrainingState(flow, ema, prepared, parameters)
        self.run = identify_run(config, getattr(dataset, "fingerprint", f"{self.length} items"), self.batch.total)
        self.throughput = Throughput()
        self.log: RunLog | None = None
        self.grad_norm = torch.zeros(())

    @property
    def averaged_flow(self) -> nn.Module:
        """The flow with averaged weights, to sample from; the one in training if no average is kept."""
        return self.flow if self.state.ema is None else self.state.ema.ema_model

    def train(self) -> None:
        """Train to the last step, from the newest checkpoint if there is one and the config says so."""
        path, self.run = on_main(self.accelerator, lambda: choose_checkpoint(self.config, self.run, self._say))
        if path is not None:
            self.state.load(path)
            self.total_steps = self.config.total_steps(self.batch, self.length, self.state.step, self.state.images_seen)
        if self.state.step >= self.total_steps:
            self._say(
                f"already trained {self.state.step} of {self.total_steps} steps, see {path}: ask for more to go on"
            )
            return
        self._open(path)
        self.flow.train()
        batches = self._settle(self._batches())
        written: dict[str, Path] = {}
        self.throughput.restart()
        with self._progress_bar() as bar:
            while self.state.step < self.total_steps:
                self._train_step(batches)
                bar.update()
                if self._is_due(self.config.log_every):
                    bar.set_postfix_str(self._log_metrics())
                with self.throughput.paused():
                    if self._is_due(self.config.sample_every):
                        written |= self._draw_samples()
                    if self._is_due(self.config.save_every):
                        written |= self._save()
        if self.log is not None:
            self.log.close()
        for name, place in written.items():
            self._say(f"{name:<11} {place}")

    # One step

    def _train_step(self, batches: Iterator[Batch]) -> None:
        state, optimizer = self.state, self.state.optimizer
        if hasattr(self.flow, "progress"):
            self.flow.progress = state.step / self.total_steps  # type: ignore[assignment]
        for group in optimizer.param_groups:
            group["lr"] = self._learning_rate()
        for micro_batch in range(self.batch.accumulation):
            state.count(self._backward(next(batches), micro_batch))
        self.grad_norm = self.accelerator.clip_grad_norm_(
            state.parameters.values(), self.config.max_grad_norm or torch.inf
        )
        optimizer.step()
        optimizer.zero_grad()
        if state.ema is not None and not optimizer.step_was_skipped:
            state.ema.update()
        state.step += 1
        state.images_seen += self.batch.total
        self.throughput.images += self.batch.total

    def _backward(self, batch: Batch, micro_batch: int) -> dict[str, Tensor]:
        """Add the gradients of one micro-batch, those of a step's last summed over ranks; returns what to log."""
        mine = self.batch.rows(self.accelerator.process_index, micro_batch)
        rows = Rows(self.config.seed, self.state.step, self.batch.total, mine)
        last = micro_batch == self.batch.accumulation - 1
        with rows_of(rows, self.device), nullcontext() if last else self.accelerator.no_sync(self.wrapped):
            loss: Tensor = self.wrapped(**self._to_device(batch))
            self.accelerator.backward(loss)
        return {"loss": loss} | getattr(self.flow, "logged", {})

    def _to_device(self, batch: Batch) -> Batch:
        return {key: value.to(self.device, non_blocking=True) for key, value in batch.items()}

    def _learning_rate(self) -> float:
        """A function of the step: linear warm-up, then constant."""
        warmup = (self.state.step + 1) / max(1, self.config.lr_warmup_steps)
        return self.config.learning_rate * min(1.0, warmup)

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
        )
        return iter(loader)

    def _settle(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Bring every process to the same start: equal weights, gradient buckets in their final order.

        DistributedDataParallel reorders its buckets after the first backward pass, and a sum of more than two numbers
        depends on their order: a pass thrown away makes the first step of a resumed run like any other.
        """
        if self.accelerator.num_processes == 1:
            return batches
        check_equal_weights(self.accelerator, self.flow)
        first = next(batches)
        self._backward(first, self.batch.accumulation - 1)
        self.state.optimizer.zero_grad()
        return chain([first], batches)

    # At intervals

    def _is_due(self, every: int) -> bool:
        return self.state.step == self.total_steps or (every > 0 and self.state.step % every == 0)

    def _log_metrics(self) -> str:
        """Write down the mean loss since the last time; the only moment at which the device is waited for."""
        state = self.state
        means = mean_over_ranks(self.accelerator, {name: total / state.summands for name, total in state.sums.items()})
        state.clear_sums()
        rate = self.throughput.restart()
        if self.log is not None:
            self.log.metrics(
                state.step,
                images_seen=state.images_seen,
                **means,
                learning_rate=self.state.optimizer.param_groups[0]["lr"],
                grad_norm=float(self.grad_norm),
                images_per_second=round(rate, 2),
            )
        return ", ".join([*(f"{name} {value:.4f}" for name, value in means.items()), f"{rate:.1f} img/s"])

    def _draw_samples(self) -> dict[str, Path]:
        """Draw the same noise every time, an equal share on each rank, with the averaged weights."""
        sample: Callable[..., Tensor] | None = getattr(self.averaged_flow, "sample", None)
        total, world = self.config.num_samples, self.accelerator.num_processes
        if total == 0 or sample is None:
            return {}
        share = -(-total // world)
        mine = [(self.accelerator.process_index + world * i) % total for i in range(share)]
        with self.accelerator.autocast(), rows_of(Rows(self.config.seed, 0, total, mine), self.device):
            steps = {"steps": self.config.sample_steps} if self.config.sample_steps else {}  # else the flow's own
            images = sample(share, **steps)
        images = gather_interleaved(self.accelerator, images.mul(255).round().to(torch.uint8), total)
        return {} if self.log is None else {"samples": self.log.samples(self.state.step, images)}

    # Checkpoints

    def _open(self, path: Path | None) -> None:
        """Open the run's files and tell what is about to happen."""
        on_main(self.accelerator, self._open_log)
        self._say(describe_run(self.config, self.accelerator, self.flow, self.flops, self.dataset))
        if path is not None:
            self._say(f"{'resume':<11} step {self.state.step}, from {path}")

    def _open_log(self) -> None:
        with _writing("checkpoint_dir", self.config.checkpoints):
            pass
        with _writing("output_dir", self.config.output_dir):
            self.log = RunLog(self.accelerator, self.config, self.state.step, warn=self._say)
        self.log.start_trackers()

    def _save(self) -> dict[str, Path]:
        """Write a checkpoint; one that fails for want of space leaves the one before, and the run, alone."""
        check_equal_weights(self.accelerator, self.flow)
        counters = self.state.counters(mean_over_ranks(self.accelerator, self.state.sums)) | {"run": asdict(self.run)}
        folder, last = self.config.checkpoints, self.state.step == self.total_steps

        def write() -> dict[str, Path]:
            assert self.log is not None
            documents = {STATE_FILE: counters, CONFIG_FILE: self.config.plain()}
            plot = self.log.loss_plot()
            try:
                path = checkpoint.save(
                    folder, self.state.step, self.state.tensors(), documents, self.config.keep_checkpoints
                )
            except (OSError, SafetensorError) as error:
                if last:
                    raise UsageError(
                        f"could not save the last step to {folder} ({error}): make room, run the same command again"
                    ) from error
                self._say(f"warning: could not save to {folder} ({error}); training goes on")
                return {}
            return {"loss plot": plot, "checkpoint": path}

        return on_main(self.accelerator, write)

    # Talking

    def _say(self, line: str) -> None:
        if self.accelerator.is_main_process:
            tqdm.write(line)

    def _progress_bar(self) -> "tqdm[Any]":
        return progress_bar(
            total=self.total_steps,
            initial=self.state.step,
            unit="step",
            disable=not self.accelerator.is_main_process,
        )


@contextmanager
def _writing(flag: str, folder: Path) -> Iterator[None]:
    """Make ``folder`` and see that it can be written; what goes wrong inside is said of it, too."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as probe:
            probe.write(b"a full disk shows here")
        yield
    except OSError as error:
        raise UsageError(f"--{flag} {folder} cannot be written: {error.strerror}") from error


def _average(flow: nn.Module, decay: float) -> EMA:
    """The moving average of ``flow``, with its own counters on the CPU, where reading them waits for no device."""
    ema = EMA(flow, beta=decay, update_every=1, update_after_step=0, include_online_model=False, use_foreach=True)
    ema.ema_model.eval()
    return ema
