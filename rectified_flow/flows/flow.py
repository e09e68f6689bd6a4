"""The contract of a flow, and the draws that all flows share: data, sources, conditions and noise."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rectified_flow import randomness
from rectified_flow.arguments import fitting
from rectified_flow.condition import ConditionSpecs, Picture, Values, check_values, drop
from rectified_flow.errors import UsageError, quoted
from rectified_flow.flows import Coupling, Share, TimeGrid
from rectified_flow.flows.couplings import CANDIDATES, nearest_candidate, optimal_pairs, squared_distances
from rectified_flow.flows.solvers import Inpaint
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.spaces.space import Space

GPU_OPTIONS: Mapping[str, int] = {
    # A value is computed wherever it is read, instead of being stored and read back.
    "realize_reads_threshold": 32,
    "realize_opcount_threshold": 300,
    "realize_acc_reads_threshold": 64,
    # Independent small kernels are launched as one. Most are casts of weights and of their gradients.
    "combo_kernels": True,
    "combo_kernels_pointwise_only": True,
    "combo_kernel_max_num_nodes": 16,
}
"""The compiler's options on a GPU, where launches and bytes bound a step."""

SOURCE = "source"  # the entry of a batch with the picture that a path starts from, and the name of the condition


FLOW_NEEDS = ("space", "condition_dropout", "coupling", "from_source", "source_noise")
"""Names of the offered arguments that each :class:`Flow` has a parameter for; see :func:`rectified_flow.register`."""


class Flow(nn.Module):
    """A module that holds a network; ``forward(**batch)`` is the loss, and ``sample`` generates data.

    Time is the noise level: ``x_t = (1 - t) x_0 + t noise``, so ``t = 0`` is data, ``t = 1`` is noise and the velocity
    along the way is ``noise - x_0``.

    A subclass draws a batch with :meth:`draw_batch`, its times with a time distribution, and returns ``self.loss(...)``
    of them: the objective, a function of every draw, which is what :meth:`compile` compiles. Entries of a batch that
    are neither data, nor a condition that the network takes, nor ``noise`` or ``source`` are ignored.

    A flow can also translate pictures (Liu et al. 2022, arXiv:2209.03003, section 5.3). Each row then has a *source*:
    the entry ``source`` of the batch. With ``from_source``, paths start from the source, which takes the place of the
    noise in the formulas above. Otherwise paths start from noise, and the source is the
    condition ``source`` of the network (:class:`Picture <rectified_flow.condition.Picture>`).

    Args:
        network: called ``network(x, t, **conditions)``; its attribute ``conditions`` maps the names of the conditions
            it takes to their kinds (:mod:`rectified_flow.condition`). Without one it takes none. Its method
            ``check_shape``, if it has one, raises a ValueError for a shape of ``x`` that it does not take.
        space: map between stored data and ``x``; :class:`Pixels` if not given.
        condition_dropout: probability of training a row without its conditions (Ho & Salimans 2022, arXiv:2207.12598).
        coupling: pairing of data and noise: ``independent``, or ``ot`` or ``immiscible`` for nearby pairs, see
            :mod:`rectified_flow.flows.couplings`. With ``from_source``, sources take the place of the noise.
        from_source: whether paths start from sources instead of noise.
        source_noise: standard deviation of the noise that is added to sources at the start of paths.

    Raises:
        ValueError: if the network does not take data of the space's shape, a condition has the name of an argument of
            ``sample``, or the coupling has no meaning with sources.
    """

    sample: Callable[..., Tensor]
    """Function that generates data ``[b, ...]``, decoded by the space. Subclasses implement it."""
    velocity: Callable[..., Tensor]
    """The predicted velocity ``[b, ...]`` at ``(x, t, **conditions)``, for measuring."""
    loss: Callable[..., Any]
    """The objective: the loss as a function of every draw."""
    is_map: ClassVar[bool] = False
    """Whether the network predicts average velocities over intervals, and takes the earlier time ``r``."""
    default_steps: ClassVar[int] = 16
    """Intervals of :meth:`sample` if a caller gives no number."""

    def __init__(
        self,
        network: nn.Module,
        *,
        space: Space | None = None,
        condition_dropout: Share = 0.0,
        coupling: Coupling = "independent",
        from_source: bool = False,
        source_noise: float = 0.0,
    ) -> None:
        super().__init__()
        self.network = network
        self.space = space or Pixels()
        check_shape = getattr(network, "check_shape", None)
        if check_shape is not None and self.space.shape is not None:
            check_shape(self.space.shape)
        # Only the class of this package is checked: a user's ``sample`` may have its conditions as arguments.
        own = next(each for each in type(self).__mro__ if each.__module__.startswith(__package__))
        taken = signature(own.sample).parameters.values() if hasattr(own, "sample") else ()
        names = {each.name for each in taken if each.kind is not each.VAR_KEYWORD}
        for name in sorted(names & self.conditions.keys()):
            raise UsageError(f"the condition {name} has the name of an argument of sample: rename it")
        self.condition_dropout = condition_dropout
        self.coupling = coupling
        self.from_source, self.source_noise = from_source, source_noise
        # A coupling would make the noise depend on the source in training, but in sampling they are independent.
        if self.takes_source and coupling not in ("independent", *(["ot"] if from_source else [])):
            raise ValueError(f"with sources, coupling {coupling} is for noise; ot needs from_source")

    def predict(self, x: Tensor, *times: Tensor, **inputs: Tensor) -> Tensor:
        """Return the network's output for ``x`` ``[b, ...]``, in float32.

        Raises:
            UsageError: if the output has another shape than ``x``; the loss would broadcast it.
        """
        output = self.network(x, *times, **inputs).float()
        if output.shape != x.shape:
            found = f"{tuple(output.shape)} for x of {tuple(x.shape)}"
            raise UsageError(f"{type(self.network).__name__} returns {found}: return the shape of x")
        return output

    @property
    def takes_source(self) -> bool:
        """Whether a batch needs a source for each row, and samples are made from one."""
        return self.from_source or isinstance(self.conditions.get(SOURCE), Picture)

    @property
    def conditions(self) -> ConditionSpecs:
        """The conditions that the network takes, by name."""
        return getattr(self.network, "conditions", {})

    @property
    def default_guidance(self) -> float:
        """The guidance scale that programs use unless a flag sets it."""
        return 1.0

    @property
    def default_grid(self) -> TimeGrid:
        """The spacing of the times of :meth:`sample` if a caller gives none."""
        return "uniform"

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the objective; drawing stays outside, and no saved name changes.

        Args:
            args: positional arguments of :func:`torch.compile`.
            kwargs: keyword arguments of :func:`torch.compile`. By default, a flow on a GPU is compiled with the
                :data:`GPU_OPTIONS` that the installed PyTorch supports.
        """
        if self.device.type == "cuda" and not kwargs:
            known = torch._inductor.list_options()  # PyTorch 2.8 lacks two options, and refuses unknown ones
            kwargs["options"] = {name: value for name, value in GPU_OPTIONS.items() if name in known}
        self.loss = torch.compile(self.loss, *args, **kwargs)

    def draw_batch(self, batch: Values) -> tuple[Tensor, Tensor, Values]:
        """Draw ``x_0``, noise and conditions of a training batch, augmented and dropped as training does.

        Args:
            batch: the data under ``space.key``, conditions by name, and optionally ``source`` ``[b, ...]``, ``noise``
                ``[b, ...]``, which belongs to the data (they are then not augmented), or ``noise_rows``, int64 ``[b]``,
                of :meth:`pair`.
        """
        if self.space.key not in batch:
            raise UsageError(f"a batch has {', '.join(batch)}, but not {self.space.key}: rename the entry of the items")
        data, described, is_drawn = batch[self.space.key], Values(), "noise" in batch
        if not is_drawn:
            if self.takes_source and SOURCE in batch:
                # With the same random draws, a source is cropped, mirrored and augmented like its target.
                with torch.random.fork_rng([data.device] if data.device.type == "cuda" else []):
                    batch = batch | {SOURCE: self.space.source_space.augment(batch[SOURCE])[0]}
            data, described = self.space.augment(data)
        x_0 = self.space.encode(data)
        self.space.shape = self.space.shape or tuple(x_0.shape[1:])
        conditions = self.conditions_of(batch)
        if is_drawn:
            start = batch["noise"].float()
        else:
            start, conditions = self.start_from(self._draw_noise(x_0, conditions, batch), conditions)
        return x_0, start, drop(self.conditions, conditions, self.condition_dropout) | described

    def conditions_of(self, batch: Values) -> Values:
        """Return the conditions in a batch by name, and the encoded source if the flow takes one.

        Args:
            batch: has the sources as the entry ``source``, in the form in which the space stores data.

        Raises:
            UsageError: if the flow takes sources, and the batch has none.
        """
        values, is_drawn = self._written_conditions(batch), "noise" in batch
        if not self.takes_source or (self.from_source and is_drawn):  # a teacher's noise has become the source
            return values
        if SOURCE not in batch:
            raise UsageError(f"the flow translates data, and a batch has no {SOURCE}: give the items such an entry")
        source = batch[SOURCE]
        is_encoded = is_drawn and source.is_floating_point()  # in a teacher's store
        return values | {SOURCE: source.float() if is_encoded else self.space.source_space.encode(source)}

    def _written_conditions(self, batch: Values) -> Values:
        """Return the conditions in a batch without the source."""
        source = {SOURCE} if self.takes_source else set()
        return {name: batch[name] for name in self.conditions if name in batch and name not in source}

    def start_from(self, noise: Tensor, conditions: Values) -> tuple[Tensor, Values]:
        """Return the start of the paths ``[b, ...]``, and the conditions of the network.

        Args:
            noise: standard normal ``[b, ...]``, which also replaces the unknown pixels of a source.
            conditions: conditions by name, with the encoded source.
        """
        if not self.from_source:
            return noise, conditions
        source, others = conditions[SOURCE], {name: each for name, each in conditions.items() if name != SOURCE}
        return torch.where(source.isnan(), noise, source + self.source_noise * noise), others

    def pair(self, **batch: Tensor) -> Tensor:
        """Return the row of noise, or of the sources, for each row of a global batch, int64 ``[b]``.

        With the coupling ``ot``, the trainer calls it where all rows are present (:mod:`rectified_flow.randomness`),
        before parts of them are given to ``forward``.
        """
        data = batch[self.space.key]
        if self.from_source:
            # A pair is mirrored and augmented alike, which does not change its distance much.
            x_0, starts = self.space.encode(data), self.space.source_space.encode(batch[SOURCE]).nan_to_num(0.0)
        else:
            x_0 = self.space.encode(self.space.augment(data)[0])
            starts = randomness.randn("noise", x_0.shape, x_0.device)
        groups = _groups(self._written_conditions(batch))
        return optimal_pairs(squared_distances(self.masked(x_0)[0], starts), groups)

    def _draw_noise(self, x_0: Tensor, conditions: Values, batch: Values) -> Tensor:
        if self.coupling == "immiscible":
            drawn = (randomness.randn(f"noise {k}", x_0.shape, x_0.device) for k in range(CANDIDATES))
            return nearest_candidate(self.masked(x_0)[0], drawn)
        rows = batch.get("noise_rows")
        noise = randomness.randn("noise", x_0.shape, x_0.device, global_rows=rows)
        if self.coupling == "ot" and rows is None and not self.from_source:  # no global batch: pair this batch
            noise = noise[optimal_pairs(squared_distances(self.masked(x_0)[0], noise), _groups(conditions))]
        return noise

    def draw_start(
        self,
        count: int,
        conditions: Values,
        *,
        noise: Tensor | None = None,
        start: Tensor | None = None,
        strength: float = 1.0,
    ) -> tuple[Tensor, Values]:
        """Return the start of sampling and a value of every condition; those that are not given are drawn.

        Args:
            count: number of rows if no tensor is given.
            conditions: values by name; sources ``source`` ``[b, ...]`` are data as the space stores them.
            noise: standard normal ``[b, ...]``.
            start: data ``[b, ...]`` to start from, as the space stores them, with noise up to ``strength``.
            strength: the time to start at, with ``start``.

        Raises:
            UsageError: if neither ``noise`` nor the space has a shape, a condition has an unknown value or is not
                a tensor, the numbers of rows differ, ``strength`` has no ``start``, the ``start`` has another shape
                than ``x``, or a flow from sources has no ``source``.
        """
        for name, value in conditions.items():
            if name not in (*self.conditions, SOURCE) and not torch.is_tensor(value):
                unknown = f"is neither an argument of {type(self).__name__}.sample nor a condition of the network"
                raise UsageError(f"`{name}` {unknown}: leave it out")
            fitting(quoted(name), [value], Tensor, strict=True)
        if start is None and strength != 1:
            raise UsageError("`strength` needs `start`: pass the data to start from")
        if self.from_source and SOURCE not in conditions:
            raise UsageError("the flow translates data: pass `source`, the data [b, ...] to translate")
        check_values(self.conditions, conditions)
        tensors = {"start": start, "noise": noise, **conditions}
        if scalars := [name for name, each in tensors.items() if each is not None and each.ndim == 0]:
            raise UsageError(f"`{scalars[0]}` is a number: pass a tensor [b, ...] with a row for each sample")
        rows = {name: len(each) for name, each in tensors.items() if each is not None}
        if len(set(rows.values())) > 1:
            found = ", ".join(f"`{name}` has {number} row{'s' * (number != 1)}" for name, number in rows.items())
            raise UsageError(f"{found}: pass tensors with equal numbers of rows")
        count = next(iter(rows.values()), count)
        if noise is None:
            if self.space.shape is None:
                raise UsageError("the flow does not know the shape of its data: give noise, or a space with a shape")
            noise = randomness.randn("sample noise", (count, *self.space.shape), self.device)
        given = self.on_device(conditions)
        drawn = {
            name: each.draw(name, count, self.device) for name, each in self.conditions.items() if name not in given
        }
        x, values = self.start_from(noise.float().to(self.device), drawn | given)
        if start is not None:
            known = self.space.encode(start).to(self.device)
            if known.shape != x.shape:  # it would be broadcast
                problem = f"`start` {tuple(start.shape)} becomes {tuple(known.shape)}, and x is {tuple(x.shape)}"
                raise UsageError(f"{problem}: pass data [b, ...] of the shape of the samples")
            x = torch.lerp(known.nan_to_num(0.0), x, strength)
        return x, values

    def on_device(self, conditions: Mapping[str, Tensor]) -> Values:
        """Return conditions on the device of the network, with sources encoded."""
        placed = {name: values.to(self.device) for name, values in conditions.items()}
        if self.takes_source and SOURCE in placed:
            placed[SOURCE] = self.space.source_space.encode(placed[SOURCE])
        return placed

    def inpainting(self, start: Tensor | None, mask: Tensor | None, x: Tensor, strength: float = 1.0) -> Inpaint | None:
        """Return the function that keeps the part of ``start`` where ``mask`` is false; None without a mask.

        Args:
            start: data ``[b, ...]``, as the space stores them.
            mask: bool ``[b, 1, h, w]``, true where data are generated. Unknown values of ``start`` are generated, too.
            x: the start of sampling ``[b, ...]``, at the time ``strength``.
            strength: the time of ``x``.

        Raises:
            UsageError: if the mask is not bool, or has other sides than ``x`` and the pictures of the space.
        """
        if mask is None:
            return None
        if start is None:
            raise UsageError("`mask` needs `start`: pass the data to keep")
        sides = self.space.medium.sides if x.ndim == 4 else ()
        sides = sides if sides and all(sides) else tuple(x.shape[2:])
        fits = _broadcasts(mask, x)
        shapes = (len(x), 1, *sides), (1, 1, *sides), (1, *sides)
        if mask.dtype != torch.bool or not (fits or tuple(mask.shape) in shapes):
            found = f"`mask` is {mask.dtype} {tuple(mask.shape)}"
            raise UsageError(f"{found}: pass torch.bool {(len(x), 1, *sides)}, true where data are generated")
        known, generated = self.space.encode(start).to(x.device), mask.to(x.device)
        if not fits:  # latents have smaller sides than pictures
            generated = F.adaptive_max_pool2d(generated.float(), x.shape[-2:]) > 0
        generated = generated | known.isnan()
        return lambda now, t: torch.where(generated, now, torch.lerp(known, x, t / strength))

    def masked(self, x_0: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return encoded data with 0 in place of unknown values, and weights ``[b, ...]`` of the error, or None.

        With the weights, the mean square of the error over all values equals that over the known values. A row without
        known values has a loss of 0.
        """
        if not self.space.has_missing:
            return x_0, None
        known = ~x_0.isnan()
        share = known.float().flatten(1).mean(dim=1).clamp(min=1 / known[0].numel())
        return x_0.nan_to_num(0.0), known * expand(share.rsqrt(), x_0)

    @property
    def device(self) -> torch.device:
        """Device of the network."""
        return _device_of(self)

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the network's weights; diffusers reads this attribute."""
        return next((p.dtype for p in self.parameters()), torch.float32)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the flow into evaluation mode inside the block."""
        was_training = self.training
        self.eval()
        try:
            yield
        finally:
            self.train(was_training)


def network_of(flow: nn.Module) -> nn.Module:
    """Return the module whose weights a checkpoint keeps: the flow's network, or a flow with weights outside of it."""
    network = getattr(flow, "network", None)
    if isinstance(network, nn.Module) and len(network.state_dict()) == len(flow.state_dict()):
        return network
    return flow


def _device_of(module: nn.Module) -> torch.device:
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def _broadcasts(mask: Tensor, x: Tensor) -> bool:
    """Return whether a mask can be broadcast to the shape of ``x``."""
    sizes = zip(reversed(mask.shape), reversed(x.shape), strict=False)
    is_whole = x.ndim != 4 or mask.shape[-2:] == x.shape[-2:]  # not a value for each row or column
    return is_whole and mask.ndim <= x.ndim and all(size in (1, of_x) for size, of_x in sizes)


def expand(t: Tensor, x: Tensor) -> Tensor:
    """Return ``t`` ``[b]`` with trailing sides of 1, to multiply ``x`` ``[b, ...]``."""
    return t.reshape(-1, *[1] * (x.ndim - 1))


def _groups(conditions: Values) -> Tensor | None:
    """Return numbers ``[b]`` that are equal for rows with equal conditions; None without conditions."""
    if not conditions:
        return None
    columns = torch.cat([values.reshape(len(values), -1).double() for values in conditions.values()], dim=1)
    return columns.nan_to_num(nan=1e300).unique(dim=0, return_inverse=True)[1]


def sampling_defaults(flow: Flow) -> dict[str, Any]:
    """Return the arguments that the method ``sample`` of a flow has, with their defaults.

    Only a rectified flow has a choice of solvers, for example.
    """
    return {name: each.default for name, each in signature(flow.sample).parameters.items()}


def sample_batches(
    flow: Flow,
    numbers: Sequence[int],
    *,
    seed: int = 0,
    batch_size: int = 64,
    conditions: Mapping[str, Tensor] | None = None,
    start: Tensor | None = None,
    mask: Tensor | None = None,
    draws: Sequence[int] | None = None,
    render: bool = True,
    **options: object,
) -> Iterator[tuple[Sequence[int], Tensor]]:
    """Generate samples, and yield their numbers and their pictures, uint8 ``[b, 3, h, w]``, a batch at a time.

    Args:
        flow: the flow to sample from, or another module with the method ``sample`` of a flow.
        numbers: numbers of the samples to generate.
        seed: seed of all samples.
        batch_size: largest number of samples in a batch.
        conditions: sample ``i`` has row ``i % n`` of each of these ``[n, ...]``; one that is left out is drawn.
        start: sample ``i`` starts from row ``i % n`` of these data ``[n, ...]``.
        mask: sample ``i`` has row ``i % n`` of these masks ``[n, 1, h, w]``, see :meth:`Flow.inpainting`.
        draws: sample ``i`` has the random draws of sample ``draws[i]``; by default its own.
        render: yield pictures; otherwise the generated data ``[b, ...]``.
        options: further arguments of ``flow.sample``.
    """
    space = getattr(flow, "space", None) or Pixels()
    rows = {**(conditions or {}), "start": start, "mask": mask}
    for first in range(0, len(numbers), batch_size):
        some = numbers[first : first + batch_size]
        given = {name: each[[i % len(each) for i in some]] for name, each in rows.items() if each is not None}
        drawn = some if draws is None else [draws[number] for number in some]
        with randomness.deterministic(randomness.Samples(seed, drawn), _device_of(flow)):
            data = flow.sample(len(some), **given, **options)
            yield some, space.medium.render(data) if render else data
