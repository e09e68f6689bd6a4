"""One optimizer step: the gradient of a global batch, the update, the average; bad numbers change nothing."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from rectified_flow.data.stream import GlobalBatch, image_indices
from rectified_flow.errors import RunError
from rectified_flow.flows.flow import Flow
from rectified_flow.processes.collectives import any_rank, from_main, gather_rows, join_lists
from rectified_flow.randomness import Rows, rows_of
from rectified_flow.training.config import TrainingConfig
from rectified_flow.training.state import TrainingState

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class BadStep:
    """A step that was skipped on every rank, because a loss or the gradient was not finite on one."""

    step: int
    images: list[int]
    """Indices of the images whose loss it was: those of a micro-batch, or of all if each loss was finite."""
    in_a_row: int


@dataclass
class _Taken:
    """A step taken on the device, before anybody knows how it went."""

    number: int
    position: int
    losses: list[Tensor]
    values: dict[str, Tensor]
    good: "_Flag"


class Stepper:
    """Takes steps, and settles each a little later.

    A step is skipped by the device itself where its gradient is not finite, which is so on all ranks or on none: the
    reduction spreads it. The processor reads the verdict when the next step's gradient is under way, or when someone
    asks, so it never makes the device wait. Then the average follows, the schedule advances and the losses count.

    Args:
        accelerator: of the run.
        wrapped: the flow as Accelerate prepared it.
        state: what the steps change.
        config: the run's flags.
        batch: how the global batch is cut.
        length: images in the dataset.
        on_bad: hears of each bad step, on every rank.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        wrapped: nn.Module,
        state: TrainingState,
        config: TrainingConfig,
        batch: GlobalBatch,
        length: int,
        on_bad: Callable[[BadStep], object],
    ) -> None:
        self.accelerator, self.wrapped, self.state = accelerator, wrapped, state
        self.config, self.batch, self.length, self.on_bad = config, batch, length, on_bad
        self._taken: _Taken | None = None

    def take(self, batches: Iterator[Batch]) -> None:
        """Train on the next global batch.

        Raises:
            RunError: as :meth:`settle`, of the step before.
        """
        state, optimizer = self.state, self.state.optimizer
        losses, values = [], dict[str, Tensor]()
        for micro_batch, batch in enumerate(self._micro_batches(batches)):
            losses.append(self.backward(batch, micro_batch))
            for name, value in {"loss": losses[-1], **getattr(state.flow, "logged", {})}.items():
                values[name] = values.get(name, 0) + value.detach() / self.batch.accumulation
        self.settle()
        for group in optimizer.param_groups:
            group["lr"] = self._learning_rate()
        norm = self.accelerator.clip_grad_norm_(state.parameters.values(), self.config.max_grad_norm or torch.inf)
        good = torch.isfinite(norm)
        if optimizer.scaler is None:
            optimizer.optimizer.found_inf = (~good).float()  # what the fused update asks before it changes anything
        optimizer.step()
        optimizer.zero_grad()
        values["grad_norm"] = norm
        self._taken = _Taken(state.step, state.images_seen, losses, values, _Flag(good))
        state.step += 1
        state.images_seen += self.batch.total

    def settle(self) -> None:
        """Learn how the last step went and do what follows from it.

        Raises:
            RunError: if too many steps in a row were bad.
        """
        taken, self._taken = self._taken, None
        if taken is None:
            return
        state = self.state
        if taken.good.read():
            state.bad_in_a_row = 0
            state.updates += 1
            state.count(taken.values)
            state.update_averages()
        else:
            bad_loss = any_rank(self.accelerator, not all(torch.isfinite(loss) for loss in taken.losses))
            if state.scale_may_be_too_large and not bad_loss:
                state.scaler_skips += 1
            else:
                self._report(taken)

    def backward(self, batch: Batch, micro_batch: int) -> Tensor:
        """Add the gradients of one micro-batch, those of a step's last summed over ranks; returns the loss."""
        mine = self.batch.rows(self.accelerator.process_index, micro_batch)
        rows = Rows(self.config.seed, self.state.step, self.batch.total, mine)
        last = micro_batch == self.batch.accumulation - 1
        device = self.accelerator.device
        with rows_of(rows, device), nullcontext() if last else self.accelerator.no_sync(self.wrapped):
            loss: Tensor = self.wrapped(**{key: value.to(device, non_blocking=True) for key, value in batch.items()})
            # A loss that is not finite may have a gradient that is: spoil that, so that all ranks see it.
            self.accelerator.backward(loss * torch.where(torch.isfinite(loss), 1.0, torch.nan).to(loss))
        return loss.detach()

    def _micro_batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """This rank's, with the noise that the flow chooses for each image if it looks at the global batch for that."""
        coming = islice(batches, self.batch.accumulation)
        flow, device = self.state.flow, self.accelerator.device
        if not (isinstance(flow, Flow) and flow.pairs):
            yield from coming
            return
        micro_batches = list(coming)
        everything = gather_rows(micro_batches, self.batch, device)
        with rows_of(Rows(self.config.seed, self.state.step, self.batch.total, slice(None)), device):
            chosen = from_main(flow.pair(**everything))
        for micro_batch, batch in enumerate(micro_batches):
            yield batch | {"noise_rows": chosen[self.batch.rows(self.accelerator.process_index, micro_batch)]}

    def _learning_rate(self) -> float:
        """A function of the updates made: linear warm-up, then constant."""
        warmup = (self.state.updates + 1) / max(1, self.config.lr_warmup_steps)
        return self.config.learning_rate * min(1.0, warmup)

    def _report(self, taken: _Taken) -> None:
        state = self.state
        state.bad_steps += 1
        state.bad_in_a_row += 1
        rank, positions = self.accelerator.process_index, range(taken.position, taken.position + self.batch.total)
        guilty = [m for m, loss in enumerate(taken.losses) if not torch.isfinite(loss)]
        mine = [position for m in guilty for position in positions[self.batch.rows(rank, m)]]
        guilty_positions = join_lists(self.accelerator, mine) or list(positions)
        images = sorted(image_indices(guilty_positions, self.length, self.config.seed).tolist())
        self.on_bad(BadStep(taken.number + 1, images, state.bad_in_a_row))
        if state.bad_in_a_row >= self.config.max_bad_steps:
            raise RunError(
                f"{state.bad_in_a_row} steps in a row had a loss or gradient that was not finite (--max_bad_steps), so "
                f"training ended at step {taken.number + 1}; their images are in bad_steps.jsonl, and the last "
                "checkpoint is good: lower --learning_rate or --max_grad_norm, or look at the pictures"
            )


class _Flag:
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
