"""One optimizer step: the gradient of a global batch, the update, the average; bad numbers change nothing."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from rectified_flow.data.stream import image_indices
from rectified_flow.distributed.collectives import any_rank, join_lists
from rectified_flow.errors import RunError
from rectified_flow.randomness import BatchRows, deterministic
from rectified_flow.runs.config import GlobalBatch, TrainingConfig
from rectified_flow.training.optimizers import LrSchedule
from rectified_flow.training.state import TrainingState

Batch = dict[str, Any]


@dataclass(frozen=True)
class BadStep:
    """A step that was skipped on every rank, because a loss or the gradient was not finite on one."""

    step: int
    images: list[int]
    """Indices of the items that caused it: those of the micro-batches with a bad loss, or of all if none had one."""
    in_a_row: int


@dataclass
class _PendingStep:
    """A step under way on the device, whose verdict is not known yet."""

    number: int
    position: int
    losses: list[Tensor]
    values: dict[str, Tensor]
    good: "_AsyncBool"


class Stepper:
    """Takes steps, and finishes each a little later.

    The device itself skips a step whose gradient is not finite, which is so on all ranks or on none: the reduction
    spreads it. The processor reads the verdict when the next step's gradient is under way, or when it is needed, so it
    never makes the device wait. Then the average follows, the schedule advances and the losses count. (An optimizer
    that cannot skip, one that is not fused, waits for the verdict before its step.)

    Args:
        accelerator: of the run.
        wrapped: the flow as Accelerate prepared it.
        state: the state that steps change.
        config: the run's flags.
        batch: how the global batch is cut.
        length: items in the dataset.
        schedule: the factor of the learning rates.
        total_steps: of the whole run, for the schedule.
        on_bad: called with each bad step, on every rank.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        wrapped: nn.Module,
        state: TrainingState,
        config: TrainingConfig,
        batch: GlobalBatch,
        length: int,
        schedule: LrSchedule,
        total_steps: int,
        on_bad: Callable[[BadStep], object],
    ) -> None:
        self.accelerator, self.wrapped, self.state, self.config = accelerator, wrapped, state, config
        self.batch, self.length, self.schedule, self.total_steps = batch, length, schedule, total_steps
        self.on_bad = on_bad
        self.peak_rates = [group["lr"] for group in state.optimizer.param_groups]
        # A fused update asks whether the gradient is finite before it changes anything; a loss scaler asks for others.
        self._fused = state.optimizer.scaler is None and all(g.get("fused") for g in state.optimizer.param_groups)
        self._pending: _PendingStep | None = None

    def take(self, batches: Iterator[Batch]) -> None:
        """Train on the next global batch.

        Raises:
            RunError: as :meth:`finish_pending`, of the step before.
        """
        state, optimizer = self.state, self.state.optimizer
        losses, values = [], dict[str, Tensor]()
        for micro_batch in range(self.batch.accumulation):
            losses.append(self.backward(next(batches), micro_batch))
            for name, value in {"loss": losses[-1], **getattr(state.flow, "logged", {})}.items():
                values[name] = values.get(name, 0) + torch.as_tensor(value).detach() / self.batch.accumulation
        self.finish_pending()
        factor = self.schedule(state.updates, self.total_steps)
        for group, peak in zip(optimizer.param_groups, self.peak_rates, strict=True):
            group["lr"] = peak * factor
        norm = self.accelerator.clip_grad_norm_(state.parameters.values(), self.config.max_grad_norm or torch.inf)
        good = torch.isfinite(norm)
        if self._fused:
            optimizer.optimizer.found_inf = (~good).float()
        if self._fused or optimizer.scaler is not None or good:
            optimizer.step()
        optimizer.zero_grad()
        values["grad_norm"] = norm
        self._pending = _PendingStep(state.step, state.images_seen, losses, values, _AsyncBool(good))
        state.step += 1
        state.images_seen += self.batch.total

    def finish_pending(self) -> None:
        """Read how the last step went, and update averages and counters.

        Raises:
            RunError: if too many steps in a row were bad.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        state = self.state
        if pending.good.read():
            state.bad_in_a_row = 0
            state.updates += 1
            state.count(pending.values)
            state.update_averages()
        else:
            bad_loss = any_rank(self.accelerator, not all(torch.isfinite(loss) for loss in pending.losses))
            if state.scale_may_be_too_large and not bad_loss:
                state.scaler_skips += 1
            else:
                self._report(pending)

    def backward(self, batch: Batch, micro_batch: int) -> Tensor:
        """Add the gradients of one micro-batch, those of a step's last summed over ranks; returns the loss."""
        mine = self.batch.rows(self.accelerator.process_index, micro_batch)
        rows = BatchRows(self.config.seed, self.state.step, self.batch.total, mine)
        last = micro_batch == self.batch.accumulation - 1
        device = self.accelerator.device
        with deterministic(rows, device), nullcontext() if last else self.accelerator.no_sync(self.wrapped):
            loss: Tensor = self.wrapped(**moved(batch, device))
            # A loss that is not finite may have a gradient that is: spoil that, so that all ranks see it.
            self.accelerator.backward(loss * torch.where(torch.isfinite(loss), 1.0, torch.nan).to(loss))
        return loss.detach()

    def _report(self, pending: _PendingStep) -> None:
        state = self.state
        state.bad_steps += 1
        state.bad_in_a_row += 1
        rank, positions = self.accelerator.process_index, range(pending.position, pending.position + self.batch.total)
        guilty = [m for m, loss in enumerate(pending.losses) if not torch.isfinite(loss)]
        mine = [position for m in guilty for position in positions[self.batch.rows(rank, m)]]
        guilty_positions = join_lists(self.accelerator, mine) or list(positions)
        images = sorted(image_indices(guilty_positions, self.length, self.config.seed).tolist())
        self.on_bad(BadStep(pending.number + 1, images, state.bad_in_a_row))
        if state.bad_in_a_row >= self.config.max_bad_steps:
            raise RunError(
                f"{state.bad_in_a_row} steps in a row had a loss or gradient that was not finite (--max_bad_steps), so "
                f"training ended at step {pending.number + 1}; their images are in bad_steps.jsonl, and earlier "
                "checkpoints are kept: lower --learning_rate or --max_grad_norm, or inspect those items"
            )


class _AsyncBool:
    """A boolean on its way from the device."""

    def __init__(self, value: Tensor) -> None:
        self._value = value.to("cpu", non_blocking=value.is_cuda)
        self._arrived = torch.cuda.Event() if value.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def read(self) -> bool:
        if self._arrived is not None:
            self._arrived.synchronize()
        return bool(self._value)


def moved(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on ``device``; other values, like captions, as they are."""
    return {name: _moved(value, device) if isinstance(value, Tensor) else value for name, value in batch.items()}


def _moved(value: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda" and value.device.type == "cpu":
        value = value.pin_memory()  # else CUDA may wait for earlier work, to stage it (docs/measurements/speed.md)
    return value.to(device, non_blocking=True)
