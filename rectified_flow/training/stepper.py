"""One optimizer step: the gradient of a global batch, the update, the average; bad numbers change nothing.

A loss or gradient that is not finite must not reach the weights, and on every rank the same steps must be skipped.
Three decisions make that cheap:

- *One verdict for all ranks.* The sum of the gradients over ranks spreads NaN and infinity: if one rank's gradient is
  not finite, the norm of the summed gradient is not finite on any rank. So no rank asks the others. A loss that is not
  finite may still have a finite gradient (``max(loss, 0)`` of NaN, for example), so the stepper multiplies such a loss
  by NaN before the backward pass.
- *The device skips by itself.* The verdict is a tensor on the device. A fused optimizer takes it as ``found_inf``, the
  flag by which loss scalers make it skip a step, and leaves weights and moments as they are.
- *The verdict is read late.* If the processor read it at once, it would wait until the device has finished the step,
  and the device would then wait for the next step's kernels. The verdict is copied to the CPU in the background, and
  read when the gradient of the next step has been launched. Then the averages, the schedule and the counters follow.
  Whoever reads them earlier, such as a checkpoint or a line of metrics, calls :meth:`Stepper.finish_pending` before.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from rectified_flow.data import GlobalBatch
from rectified_flow.data.stream import Batch
from rectified_flow.distributed import any_rank
from rectified_flow.errors import RunError
from rectified_flow.randomness import BatchRows, deterministic
from rectified_flow.runs.config import TrainingConfig
from rectified_flow.training.state import TrainingState

MAX_SKIPPED = 10  # number of skipped steps in a row after which the run stops


@dataclass
class _PendingStep:
    """The last step, under way on the device, whose verdict is not known yet."""

    losses: list[Tensor]
    values: dict[str, Tensor]
    good: "_AsyncBool"


class Stepper:
    """The optimizer steps of a run, each of which is finished while the next one is under way.

    An optimizer that is not fused cannot skip a step by itself, so the processor waits for the verdict before its step.

    Args:
        accelerator: the Accelerator of the run.
        wrapped: the flow as Accelerate prepared it.
        state: the state of the run, which the steps change.
        batch: the global batch.
        config: the flags of the run.
        schedule: the factor of the learning rates after a number of updates.
        report: called on every rank with the positions of the items that may have caused a skipped step.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        wrapped: nn.Module,
        state: TrainingState,
        batch: GlobalBatch,
        config: TrainingConfig,
        schedule: Callable[[int], float],
        report: Callable[[list[int]], object],
    ) -> None:
        self.accelerator, self.wrapped, self.state, self.batch = accelerator, wrapped, state, batch
        self.config, self.schedule, self.report = config, schedule, report
        optimizer = state.optimizer
        self.peak_rates = [group["lr"] for group in optimizer.param_groups]
        # A fused update reads whether the gradient is finite before it changes anything; a scaler has its own flag.
        self._fused = optimizer.scaler is None and all(group.get("fused") for group in optimizer.param_groups)
        self._pending: _PendingStep | None = None

    def take(self, batches: Iterator[Batch]) -> None:
        """Train on the next global batch, and finish the previous step.

        Raises:
            RunError: if too many steps in a row were bad, up to the previous one.
        """
        state, optimizer = self.state, self.state.optimizer
        losses, values = [], dict[str, Tensor]()
        for micro_batch in range(self.batch.accumulation):
            losses.append(self.forward_backward(next(batches), micro_batch))
            for name, value in {"loss": losses[-1], **getattr(state.flow, "logged", {})}.items():
                values[name] = values.get(name, 0) + torch.as_tensor(value).detach() / self.batch.accumulation
        self.finish_pending()
        factor = self.schedule(state.updates)
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
        self._pending = _PendingStep(losses, values, _AsyncBool(good))
        state.step += 1
        state.images_seen += self.batch.total

    def finish_pending(self) -> None:
        """Read the verdict of the last step, and update averages and counters.

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
            scaler = state.optimizer.scaler
            # The loss scale of fp16 can explain a bad step if it was above 1; it has been halved since.
            if scaler is not None and scaler.get_scale() > 0.5 and not bad_loss:
                state.scaler_skips += 1
            else:
                self._report(pending.losses)

    def forward_backward(self, batch: Batch, micro_batch: int) -> Tensor:
        """Add the gradients of one micro-batch, and return its loss.

        With the last micro-batch of a step, the gradients are summed over ranks.
        """
        mine = self.batch.rows(self.accelerator.process_index, micro_batch)
        rows = BatchRows(self.config.seed, self.state.step, self.batch.total, mine)
        last = micro_batch == self.batch.accumulation - 1
        device = self.accelerator.device
        with deterministic(rows, device), nullcontext() if last else self.accelerator.no_sync(self.wrapped):
            loss: Tensor = self.wrapped(**moved(batch, device))
            # A loss that is not finite may have a finite gradient: make that NaN, so that all ranks see it.
            self.accelerator.backward(loss * torch.where(torch.isfinite(loss), 1.0, torch.nan).to(loss))
        return loss.detach()

    def _report(self, losses: list[Tensor]) -> None:
        """Count and report a bad step, with the items of micro-batches with a bad loss, or of all if none had one."""
        state = self.state
        state.bad_steps += 1
        state.bad_in_a_row += 1
        rank, positions = self.accelerator.process_index, range(state.images_seen - self.batch.total, state.images_seen)
        guilty = [m for m, loss in enumerate(losses) if not torch.isfinite(loss)]
        mine = [position for m in guilty for position in positions[self.batch.rows(rank, m)]]
        self.report(gather_object(mine) or list(positions))
        if state.bad_in_a_row >= MAX_SKIPPED:
            bad = f"{state.bad_in_a_row} steps in a row had no finite loss or gradient, up to step {state.step}"
            raise RunError(f"{bad}: lower --learning_rate, or inspect the items in bad_steps.jsonl")


class _AsyncBool:
    """A boolean on its way from the device."""

    def __init__(self, value: Tensor) -> None:
        self._value = value.to("cpu", non_blocking=value.is_cuda)
        self._arrived = torch.cuda.Event() if value.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def read(self) -> bool:
        """Wait for the value, and return it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return bool(self._value)


def moved(batch: Batch, device: torch.device) -> Batch:
    """Return the batch with its tensors on ``device``, and other values, like captions, as they are."""
    return {name: _moved(value, device) if isinstance(value, Tensor) else value for name, value in batch.items()}


def _moved(value: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda" and value.device.type == "cpu":
        value = value.pin_memory()  # else CUDA may wait for earlier work, to stage it (docs/measurements/speed.md)
    return value.to(device, non_blocking=True)
