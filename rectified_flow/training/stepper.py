"""The state of a training run, and the optimizer step that changes it: gradient, update, average.

Only trained parameters and buffers are averaged. Frozen parameters are shared with the module in training.

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

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import gather_object
from ema_pytorch import EMA
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from rectified_flow.data import GlobalBatch
from rectified_flow.data.stream import Batch
from rectified_flow.distributed import any_rank
from rectified_flow.errors import RunError, UsageError
from rectified_flow.flows.flow import network_of
from rectified_flow.randomness import BatchRows, deterministic
from rectified_flow.registry import Document
from rectified_flow.runs import checkpoint
from rectified_flow.runs.training_config import TrainingConfig
from rectified_flow.training.clock import Pace
from rectified_flow.training.optimizers import LrSchedule

OPTIMIZER_FILE = "optimizer.safetensors"
LARGEST_WEIGHT = 1e6
"""Bound of the trained weights. A larger one is left by an explosion, and nothing is learned from it."""
COUNTERS = [field.name for field in fields(checkpoint.Counters)]
MAX_SKIPPED = 10  # number of skipped steps in a row after which the run stops


def trained_parameters(flow: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters by name."""
    parameters = {name: p for name, p in flow.named_parameters() if p.requires_grad}
    for name, parameter in parameters.items():
        if parameter.element_size() < torch.float32.itemsize:
            precision = str(parameter.dtype).removeprefix("torch.")
            raise UsageError(f"{name} would be trained in {precision}: convert trained parameters with .float()")
    return parameters


def constant_average(flow: nn.Module, decay: float) -> EMA:
    """Build the moving average of ``flow``, whose own counters are on the CPU: reading them waits for no device."""
    ema = EMA(
        flow,
        deepcopy(flow, {id(p): p for p in flow.parameters() if not p.requires_grad}),
        beta=decay,
        update_every=1,
        update_after_step=0,
        include_online_model=False,
        use_foreach=True,
        ignore_names=checkpoint.frozen_names(flow),
    )
    ema.ema_model.eval()
    return ema


class TrainingState(checkpoint.Counters):
    """Weights, their averages, the optimizer's state and the counters: all that a resumed run needs.

    There is no random state in it and no loader state: both are functions of the seed and the counters.

    Args:
        flow: the module in training, not wrapped.
        ema: its average of constant decay, or None.
        optimizer: the optimizer of ``parameters``, as prepared by Accelerate.
        parameters: the trained parameters by name.
    """

    def __init__(
        self,
        flow: nn.Module,
        ema: EMA | None,
        optimizer: AcceleratedOptimizer,
        parameters: dict[str, nn.Parameter],
    ) -> None:
        super().__init__(step=0)
        self.flow, self.ema, self.optimizer, self.parameters = flow, ema, optimizer, parameters
        self._settings = [dict(group) for group in optimizer.param_groups]
        self.sums: dict[str, Tensor] = {}
        """Sums of this rank's loss and of the flow's other logged values over ``summands`` steps."""

    def require_sound(self) -> None:
        """Check the trained weights and their averages, which waits for the device."""
        weights: Mapping[str, Tensor] = self.parameters
        for tensors in (weights, self._averaged()):
            largest = get_total_norm([value for value in tensors.values() if value.is_floating_point()], torch.inf)
            if not largest <= LARGEST_WEIGHT:
                exploded = f"the weights exploded by step {self.step} (the largest is {largest:.1e}) and are not saved"
                raise RunError(f"{exploded}: lower `learning_rate`, or clip gradients with `max_grad_norm`")

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of a checkpoint by file; frozen parameters are in the model's file only."""
        return {
            checkpoint.MODEL_FILE: checkpoint.own_weights(network_of(self.flow)),
            OPTIMIZER_FILE: {name: value for name, value in self._moments().items() if isinstance(value, Tensor)},
            **({} if self.ema is None else {checkpoint.EMA_FILE: self._averaged()}),
        }

    def counters(self, sums: dict[str, list[float]]) -> Document:
        """Return everything else of the state as JSON can hold it; ``sums`` are the sums of all ranks."""
        scaler = self.optimizer.scaler
        numbers = {name: value for name, value in self._moments().items() if isinstance(value, int | float)}
        return {
            **{name: getattr(self, name) for name in COUNTERS},
            "sums": sums,
            "ema_step": None if self.ema is None else int(self.ema.step),
            "grad_scaler": None if scaler is None else scaler.state_dict(),
            "optimizer": type(self.optimizer.optimizer).__name__,
            "optimizer_numbers": numbers,
        }

    def load(self, path: Path, rank: int = 0, world_size: int = 1) -> None:
        """Restore the state of the checkpoint at ``path`` for one of the ranks."""
        checkpoint.load_weights(network_of(self.flow), path, checkpoint.MODEL_FILE)
        saved = checkpoint.load_state(path)
        if self.ema is not None:
            checkpoint.load_averaged(network_of(self.ema.ema_model), path)
            self.ema.initted.fill_(True)
            self.ema.step.fill_(saved.ema_step or 0)
        optimizer = type(self.optimizer.optimizer).__name__
        if saved.optimizer != optimizer:
            raise UsageError(f"{path} was trained by {saved.optimizer}, not {optimizer}: choose another `output_dir`")
        self._load_moments({**checkpoint.load_tensors(path, OPTIMIZER_FILE), **saved.optimizer_numbers})
        if self.optimizer.scaler is not None and saved.grad_scaler is not None:
            self.optimizer.scaler.load_state_dict(saved.grad_scaler)
        for name in COUNTERS:
            setattr(self, name, getattr(saved, name))
        # Each rank's own sums, to the last bit, if there are as many ranks as there were; else the mean for all.
        device = next(iter(self.parameters.values())).device
        self.sums = {
            name: torch.tensor(by_rank[rank] if len(by_rank) == world_size else fmean(by_rank), device=device)
            for name, by_rank in saved.sums.items()
        }

    def _averaged(self) -> dict[str, Tensor]:
        """Return the averaged weights of the network by name."""
        if self.ema is None:
            return {}
        frozen = checkpoint.frozen_names(network_of(self.flow))  # the average itself requires no gradient
        averaged = network_of(self.ema.ema_model).state_dict()
        return {name: value for name, value in averaged.items() if name not in frozen}

    def _moments(self) -> dict[str, Tensor | float | None]:
        """Return the optimizer's state by ``PARAMETER.NAME``: tensors, numbers and None.

        Some optimizers count in their groups: numbers that have changed since the start, by ``group N.NAME``.
        """
        return {
            f"{name}.{key}": value
            for name, parameter in self.parameters.items()
            for key, value in self.optimizer.optimizer.state[parameter].items()
        } | {
            f"group {number}.{key}": value
            for number, group in enumerate(self.optimizer.param_groups)
            for key, value in group.items()
            if type(value) in (int, float) and key != "lr" and value != self._settings[number].get(key)
        }

    def _load_moments(self, moments: Mapping[str, Tensor | float]) -> None:
        """Restore the optimizer's state, whatever the number and order of its groups.

        A checkpoint names parameters, while torch's state dict numbers them group by group.
        """
        groups = self.optimizer.state_dict()["param_groups"]
        by_group = {f"group {number}": group for number, group in enumerate(groups)}
        by_parameter: dict[nn.Parameter, dict[str, Tensor | float]] = defaultdict(dict)
        for label, value in moments.items():
            name, _, key = label.rpartition(".")
            if name in self.parameters:
                by_parameter[self.parameters[name]][key] = _like(self.parameters[name], value)
            elif name in by_group:
                by_group[name][key] = value
        ordered = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        state = {number: by_parameter[parameter] for number, parameter in enumerate(ordered)}
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        for parameter, values in by_parameter.items():
            loaded = self.optimizer.optimizer.state[parameter]
            for key, value in values.items():
                # Torch casts the tensors of a state to the type of their parameter.
                if isinstance(value, Tensor) and value.dtype != loaded[key].dtype:
                    loaded[key] = value.to(loaded[key].device)


def _like(parameter: Tensor, value: Tensor | float) -> Tensor | float:
    """Give a tensor of the shape of ``parameter`` its memory format, which a fused update takes for granted."""
    if isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim:
        return torch.empty_like(parameter, dtype=value.dtype).copy_(value)
    return value


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
        schedule: the factor of the learning rates after a number of updates of all updates.
        pace: returns the position of the run in its plan.
        report: called on every rank with the positions of the items that may have caused a skipped step.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        wrapped: nn.Module,
        state: TrainingState,
        batch: GlobalBatch,
        config: TrainingConfig,
        schedule: LrSchedule,
        pace: Callable[[], Pace],
        report: Callable[[list[int]], object],
    ) -> None:
        self.accelerator, self.wrapped, self.state, self.batch = accelerator, wrapped, state, batch
        self.config, self.schedule, self.pace, self.report = config, schedule, pace, report
        optimizer = state.optimizer
        self.peak_rates = [group["lr"] for group in optimizer.param_groups]
        # A fused update reads whether the gradient is finite before it changes anything; a scaler has its own flag.
        self._fused = optimizer.scaler is None and all(group.get("fused") for group in optimizer.param_groups)
        self._pending: _PendingStep | None = None

    def take(self, batches: Iterator[Batch]) -> None:
        """Train on the next global batch, and finish the previous step."""
        state, optimizer = self.state, self.state.optimizer
        losses, values = [], dict[str, Tensor]()
        for micro_batch in range(self.batch.accumulation):
            losses.append(self.forward_backward(next(batches), micro_batch))
            for name, value in {"loss": losses[-1], **getattr(state.flow, "logged", {})}.items():
                number = torch.as_tensor(value, device=losses[-1].device).detach()
                values[name] = values.get(name, 0) + number / self.batch.accumulation
        self.finish_pending()
        pace = self.pace()
        factor = self.schedule(pace.position(state.updates), pace.planned)
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
        """Read the verdict of the last step, and update averages and counters."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        state = self.state
        if pending.good.read():
            state.bad_in_a_row = 0
            state.updates += 1
            state.summands += 1
            for name, value in pending.values.items():
                state.sums[name] = state.sums.get(name, 0) + value  # without a wait for the device
            if state.ema is not None:
                # The time constant is a share of the run: it is planned in steps of the plan.
                state.ema.beta = self.config.ema_decay ** self.pace().stretch(state.step - 1)
                state.ema.update()
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
        # All Accelerators of a process share this number, by which the gradients are divided.
        self.accelerator.gradient_accumulation_steps = self.batch.accumulation
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
            raise RunError(f"{bad}: lower `learning_rate`, or inspect the items in bad_steps.jsonl")


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
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    if device.type == "cuda":  # it may wait for earlier work, to stage what is not pinned (docs/measurements/speed.md)
        tensors = {name: value if value.is_cuda else value.pin_memory() for name, value in tensors.items()}
    return batch | {name: value.to(device, non_blocking=True) for name, value in tensors.items()}
