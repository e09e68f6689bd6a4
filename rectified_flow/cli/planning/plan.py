"""The plan of a run: settings that suit its data, its time and the speed of this machine, with the reason for each.

The settings that :func:`plan` returns depend only on its facts and on the speeds of trials. The measurements are in
docs/measurements/budget.md and small_data.md.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil, inf, log2
from typing import Any, Literal, NamedTuple

from rectified_flow.cli.budget import time_text
from rectified_flow.cli.planning.limits import MIN_IMAGES, UNAUGMENTED_PASSES, limit_of, passes_of
from rectified_flow.cli.settings import command_line
from rectified_flow.cli.training_flags import Method
from rectified_flow.errors import UsageError
from rectified_flow.networks.network import Network
from rectified_flow.networks.unet import Unet
from rectified_flow.runs.checkpoint import EARLY
from rectified_flow.system.terminal import duration
from rectified_flow.training.clock import LEAST_SHARE
from rectified_flow.training.speed import Speed

Starter = Literal["unsuited", "suited", "requested"]
STARTER_DIMS = {False: 32, True: 48}  # --dim of the starters for pixels and for latents
STARTER_SIDES = {"pixels": range(32, 2**14 + 1), "small": range(32)}  # where half of the weights or more fit
WIDER_THAN_STARTER = {False: 0, True: 10_000_000}  # images for more channels, as many as the starter for latents had
UNET_FLAGS = ("dim", "dim_mults", "dropout")  # arguments of the Unet that are flags of their own
SHORT = {"learning_rate": 2e-3, "lr_decay": "cosine"}
MUON = {"optimizer": ("muon",), **SHORT}  # Fréchet distance 128 instead of 213 (budget.md)
BY_METHOD: dict[Method, dict[str, Any]] = {
    "rectified": {**MUON, "time_distribution": ("stratified=True",)},  # distance -5% (budget.md)
    "mean_flow": {**SHORT, "learning_rate": 1e-3},  # Muon was measured on distillation data only (budget.md)
    "distill": {**MUON, "flow": ("whole_fraction=0.75", "halves_fraction=0.5")},
    "reflow": MUON,  # distance -9% on the data of a teacher (budget.md)
}
MIN_BATCH, MIN_BATCH_OF_PATHS, MIN_BATCH_OF_LATENTS, MIN_BATCH_OF_GPU = 8, 16, 32, 32  # budget.md; GPU: a guess
MAX_BATCH, MIN_STEPS = 256, 7000  # a larger batch needs at least so many steps (budget.md, "Batch size")
BF16_GAIN = 1.1  # speed of bf16 on a CPU above which bf16 is chosen; measured gains are 1.3 or none (budget.md)
TOO_SLOW = "pass a smaller --image_size, or a longer --budget"
TOO_FEW_PICTURES = "add pictures, or pass --train_num_steps in place of --budget, to train for longer"
FEWEST_STEPS = {1: 10, 2: 30}
"""Smallest useful number of steps, by the number of runs: with ``--one_step``, the second run also draws samples of its
teacher, and has larger batches."""
EMA_SHARE = 0.05  # time constant of the average of the weights, as a share of the steps (budget.md, first table)
MAX_EMA_DECAY = 0.99999  # 1 would keep the initial weights
TRAINED_SHARE = 0.9  # of the time, for steps; the rest is for previews and checkpoints (budget.md)
SAMPLES_SHARE = {"distill": 1 / 4, "reflow": 1 / 3}  # of the time, at most, for the data of a teacher (budget.md)
FORWARD_SHARE = 0.35  # of a training step (benchmarks/step_parts.py of commit 2f9616d)
# Of the free memory of a CPU and of a GPU, for a step. The rest is for libraries, previews and, on a CPU, copies for
# checkpoints. On a GPU, steps of the batch itself are measured
MEMORY_SHARE = {"cpu": 0.8, "cuda": 0.95}
PREVIEW_SECONDS, PREVIEW_SHARE, LOG_SECONDS = 120.0, 0.05, 5.0  # between previews; their share; between log lines
PREVIEWS = (64, 36, 16, 9, 4)  # samples in a preview
PREVIEW_CALLS: dict[Method, int] = {"rectified": 16, "reflow": 16, "mean_flow": 1, "distill": 1}  # for each sample


@dataclass(frozen=True)
class Facts:
    """The facts that a plan depends on, all counted or given by flags."""

    method: Method
    pictures: int
    """Number of training pictures, without those that are held out."""
    budget: float
    """The time of the run [s]."""
    sides: tuple[int, ...]
    """Sides of the data that the network works on, pictures or latents."""
    fixed: frozenset[str] = frozenset()
    """Flags that the user has set, and the alternatives to them."""
    spent: float = 0.0
    """The time that has passed when the plan is made [s]."""
    runs: int = 1
    """Number of runs that share the time that has passed: both of ``--one_step`` need the pictures."""
    memory: float = inf
    """Free memory of a process [bytes]."""
    processes: int = 1
    device: str = "cpu"
    batch: int | None = None
    """The global batch size, if flags set it."""
    augment: float = 0.0
    """The probability of augmentations in a run that is long enough to memorise its pictures."""
    network: type[Network] = Unet
    """The class of the network."""
    why_network: str = ""
    """The origin of the network, if the plan does not choose its size."""
    starter: Starter = "unsuited"
    latents: bool = False
    """Whether the network works on latents of pictures."""
    precisions: tuple[str | None, ...] = (None,)
    """The precisions to choose from, the safest one first; None is the default of the device."""
    samples: int = 0
    """Number of samples of a teacher that are wanted."""
    drawn: int | None = None
    """Number of samples of a teacher that exist already."""
    calls: int = 0
    """Calls of the teacher's network for a sample."""
    num_samples: int | None = None
    """Samples of a preview, if flags set them."""
    sample_steps: int | None = None
    """Steps of each of these samples, if flags set them."""

    @property
    def seconds(self) -> float:
        """The time that is left [s]."""
        return seconds_left(self.budget, self.spent / self.runs)

    @property
    def min_batch(self) -> int:
        """The smallest global batch size that a plan chooses; on small sets, more processes make no fewer steps."""
        on_cpu = MIN_BATCH_OF_LATENTS if self.latents else MIN_BATCH_OF_PATHS if self.method == "distill" else MIN_BATCH
        least = MIN_BATCH_OF_GPU if self.device == "cuda" else on_cpu
        return max(least, int(min(self.processes * least, self.limit / MIN_STEPS)) // self.processes * self.processes)

    @property
    def limit(self) -> float:
        """The largest number of images of a run; unlimited for the data of a teacher."""
        return inf if self.calls else limit_of(self.pictures, self.augment, latents=self.latents)

    @property
    def remedy(self) -> str:
        """The advice of an error about a time into which too few images fit.

        The data of a teacher have its size, and latents of a smaller size are not processed faster.
        """
        has_size = self.calls or (self.latents and "image_size" not in self.fixed)
        advice = "pass a longer --budget" if has_size else TOO_SLOW
        is_wide = "dim" in self.fixed and self.network is Unet and not self.calls
        return f"lower --dim, or {advice}" if is_wide else advice


class Trial(NamedTuple):
    """A training whose speed matters to a plan."""

    width: int | None
    """Width of the network; None if the plan does not choose its size."""
    batch: int
    precision: str | None
    augment: float = 0.0


Measure = Callable[[Trial], Speed]
"""Function that returns the speed of a trial, summed over all processes. It is called at most once for each trial."""


class Plan(NamedTuple):
    """The settings of a run by flag, and the reasons by topic."""

    settings: dict[str, Any]
    reasons: dict[str, str]
    most_steps: int | None = None
    """Number of steps after which samples become copies of the pictures; None for no limit."""


def seconds_left(budget: float, spent: float) -> float:
    """Return the time that is left for training [s], at least a part of the budget: a shorter run would be useless."""
    return max(budget - spent, LEAST_SHARE * budget)


def plan(facts: Facts, measure: Measure) -> Plan:
    """Choose the settings of a run that fits into the time in ``facts``."""
    measure = cache(measure)
    width, why_network = _choose_width(facts, measure)
    trial = Trial(width, _choose_batch(facts, 0, facts.samples), _choose_precision(facts, measure, width))
    speed = measure(trial)
    if not _micro_batches(facts, trial, speed):
        problem = f"a step of {trial.batch:,} images does not fit into the memory (about {speed.memory / 1e9:.1f} GB)"
        raise UsageError(f"{problem}: lower --image_size or --batch_size")
    samples, seconds = _choose_samples(facts, speed)
    fitting = TRAINED_SHARE * seconds * speed.rate
    if not facts.calls and fitting > UNAUGMENTED_PASSES * facts.pictures:
        trial = trial._replace(augment=facts.augment)
    larger = trial._replace(batch=_choose_batch(facts, min(fitting, facts.limit), samples))
    trial = larger if _micro_batches(facts, larger, measure(larger)) else trial
    speed = measure(trial)
    fitting = TRAINED_SHARE * seconds * speed.rate
    steps, step = int(min(fitting, facts.limit) / trial.batch), trial.batch / speed.rate
    if steps < FEWEST_STEPS[facts.runs]:
        text = f"a step of {trial.batch} images takes {step:.1f} s on this machine; {facts.remedy}"
        raise UsageError(f"--budget {time_text(facts.budget * facts.runs)} is too short: {text}")
    settings = settings_of(facts, trial) | intervals(facts, step, speed.rate, steps)
    settings |= {"train_num_steps": steps, "num_epochs": None, "lr_warmup_steps": max(10, steps // 50)}
    settings |= {"ema_decay": min(round(1 - 1 / max(10.0, EMA_SHARE * steps), 5), MAX_EMA_DECAY)}
    settings |= {"teacher_samples": samples} if facts.calls else {}
    if not (parts := _micro_batches(facts, trial, speed)):
        text = f"a step of {trial.batch:,} images does not fit into the memory ({speed.memory / 1e9:.1f} GB)"
        raise UsageError(f"{text}: lower --image_size or --batch_size")
    settings |= {"batch_size": trial.batch // (facts.processes * parts)} if parts > 1 else {}
    speed = speed._replace(memory=speed.memory / parts)
    reasons = _reasons(facts, settings, speed, why_network, trial.batch, fitting)
    chosen = {name: value for name, value in settings.items() if name not in facts.fixed}
    return Plan(chosen, reasons, None if facts.limit == inf else max(steps, int(facts.limit / trial.batch)))


def settings_of(facts: Facts, trial: Trial) -> dict[str, Any]:
    """Return the settings that determine the speed of a trial."""
    settings: dict[str, Any] = {**BY_METHOD[facts.method], "global_batch_size": trial.batch}
    settings |= {} if trial.width is None else network_flags(facts.network, trial.width, facts.sides)
    settings |= {"mixed_precision": trial.precision} if trial.precision else {}
    settings |= {"augment": trial.augment} if trial.augment else {}
    if facts.starter == "suited" and trial.width == STARTER_DIMS[facts.latents]:
        settings["init_from"] = "starter"
    return {name: value for name, value in settings.items() if name not in facts.fixed}


def network_flags(kind: type[Network], width: int, sides: Sequence[int]) -> dict[str, Any]:
    """Return the flags of a network of a width, for data with these sides."""
    arguments = kind.sized_for(width, sides)
    flags = {name: value for name, value in arguments.items() if name in UNET_FLAGS}
    words = [f"{name}={json.dumps(value)}" for name, value in arguments.items() if name not in flags]
    return flags | {"network": (kind.__name__, *words)}


def intervals(facts: Facts, step: float, rate: float, steps: int) -> dict[str, Any]:
    """Return the intervals of previews, checkpoints and log lines, and a number of samples that costs little.

    Args:
        facts: the facts of the plan.
        step: time of a step [s].
        rate: images per second of the training.
        steps: steps of the run.
    """
    interval = min(PREVIEW_SECONDS, facts.seconds / 4, steps * step / 4)  # a small set ends before the budget
    calls = PREVIEW_CALLS[facts.method] if facts.sample_steps is None else facts.sample_steps
    sample = calls * FORWARD_SHARE / rate  # time of a sample
    counts = PREVIEWS if facts.num_samples is None else (facts.num_samples,)
    count = next((each for each in counts if each * sample <= PREVIEW_SHARE * interval), counts[-1])
    every = max(1, round(max(interval, count * sample / PREVIEW_SHARE) / step))
    return {
        "num_samples": count,
        "sample_steps": calls,
        "sample_every": every,
        "save_every": min(every, max(1, round(EARLY * steps))),  # for an early checkpoint
        "log_every": min(50, max(1, round(LOG_SECONDS / step))),
    }


def _choose_width(facts: Facts, measure: Measure) -> tuple[int | None, str]:
    """Return the widest network that will process enough images, and the reason."""
    if facts.why_network:
        return None, facts.why_network
    if facts.starter == "requested":
        return STARTER_DIMS[facts.latents], "the network of the starter"
    suits, latents = facts.starter == "suited", facts.latents
    least, needed = (STARTER_DIMS[latents], WIDER_THAN_STARTER[latents]) if suits else (0, 0)
    widths = facts.network.widths
    chosen, *wider = [width for width in widths if width >= least]
    for width in wider:
        trial = Trial(width, _choose_batch(facts, 0, facts.samples), _choose_precision(facts, measure, width))
        speed = measure(trial)
        if not _micro_batches(facts, trial, speed):
            return chosen, f"a step with the width {width} does not fit into the memory"
        images, enough = min(TRAINED_SHARE * facts.seconds * speed.rate, facts.limit), max(needed, widths[width])
        if images < enough:
            return chosen, f"with the width {width}, the run would process {images:,.0f} images, and needs {enough:,}"
        chosen = width
    return chosen, "the largest size"


def _micro_batches(facts: Facts, trial: Trial, speed: Speed) -> int:
    """Return the least number of parts of the batch with which a step fits into the memory; 0 if none does."""
    most = 1 if facts.batch else trial.batch // facts.processes
    fitting = (each for each in range(1, most + 1) if trial.batch % (each * facts.processes) == 0)
    fitting = (each for each in fitting if trial.batch <= each * facts.processes * speed.at_once)
    room = MEMORY_SHARE.get(facts.device, 1.0) * facts.memory
    return next((each for each in fitting if speed.rate > 0 and speed.memory / each <= room), 0)


def _choose_precision(facts: Facts, measure: Measure, width: int | None) -> str | None:
    """Return the first precision, or another one that is clearly faster."""
    safest, *others = facts.precisions
    batch = _choose_batch(facts, 0, facts.samples)
    for other in others:
        if measure(Trial(width, batch, other)).rate > BF16_GAIN * measure(Trial(width, batch, safest)).rate:
            return other
    return safest


def _choose_batch(facts: Facts, images: float, samples: int) -> int:
    """Return the largest power of two with which ``images`` are enough steps, and which the processes can share."""
    if facts.batch is not None:
        return facts.batch
    batch = min(max(2 ** int(log2(max(1.0, images / MIN_STEPS))), facts.min_batch), MAX_BATCH)
    if facts.calls:
        batch = max(facts.processes, min(batch, samples // facts.processes * facts.processes))
    return ceil(batch / facts.processes) * facts.processes


def _choose_samples(facts: Facts, speed: Speed) -> tuple[int, float]:
    """Return the number of samples that a teacher draws, and the time that is left for training [s]."""
    if not facts.calls or facts.drawn is not None:
        return facts.drawn or 0, facts.seconds
    seconds = facts.calls * FORWARD_SHARE / speed.rate  # of a sample
    count, fitting = facts.samples, int(SAMPLES_SHARE[facts.method] * facts.seconds / seconds)
    if "teacher_samples" not in facts.fixed:
        count = max(facts.min_batch, min(count, fitting))
    if count * seconds >= facts.seconds:
        refusal = f"generating {count:,} samples of the teacher would take all of --budget {time_text(facts.budget)}"
        raise UsageError(f"{refusal}: lower --teacher_samples")
    return count, facts.seconds - count * seconds


def _reasons(
    facts: Facts, settings: Mapping[str, Any], speed: Speed, why_network: str, batch: int, fitting: float
) -> dict[str, str]:
    """Return the plan in words, by topic."""

    def words(*names: str) -> str:
        chosen = [name for name in names if name in settings and name not in facts.fixed]
        return " ".join(command_line({name: settings[name] for name in chosen}))

    images, samples = settings["train_num_steps"] * batch, settings.get("teacher_samples", 0)
    parts = _uses_of_time(facts, images, 0 if facts.drawn is not None else samples, speed)
    why = _why_so_long(facts, images, facts.seconds - sum(parts.values()) + facts.spent, fitting)
    network = words("dim", "dim_mults", "network", "init_from")
    rates = words("optimizer", "learning_rate", "lr_decay", "lr_warmup_steps", "ema_decay", "augment")
    why += f"; a step trains on {settings['batch_size']} at once, to save memory" if "batch_size" in settings else ""
    few = f"{images:,} images are too few for samples that look like pictures: {facts.remedy}"
    draws = f"draws {samples:,} samples before the training, {samples * facts.calls:,} network calls"
    texts = {
        "time": ", ".join(f"{duration(each)} {what}" for what, each in parts.items() if each >= 1) + " and saving",
        "budget": f"{time_text(facts.budget)} (--budget changes it): {facts.processes} x {facts.device} trains {speed}",
        "length": f"{settings['train_num_steps']:,} steps of {batch} = {images:,} images, {why}",
        "network": f"{network}; {why_network}" if network else why_network,
        "training": f"{rates} {words('mixed_precision', 'time_distribution', 'flow')} (docs/budget.md)",
        "outputs": f"{words('sample_every', 'num_samples', 'save_every')}; intervals in steps",
        "teacher": draws if samples and facts.drawn is None else "",
        "warning": few if images < MIN_IMAGES and not facts.calls else "",
    }
    return {topic: text for topic, text in texts.items() if text}


def _uses_of_time(facts: Facts, images: int, samples: int, speed: Speed) -> dict[str, float]:
    """Return the parts of the time of a run by name [s]; a teacher draws so many samples before the training."""
    trained = images / speed.rate
    return {
        "to start and read": facts.spent,
        "for samples of the teacher": samples * facts.calls * FORWARD_SHARE / speed.rate,
        "to train": trained,
        "for previews": trained * (1 / TRAINED_SHARE - 1),
    }


def _why_so_long(facts: Facts, images: int, left: float, fitting: float) -> str:
    """Explain the planned number of images; ``left`` is the time that the run leaves unused [s]."""
    passes, is_limited = passes_of(facts.pictures, facts.augment, latents=facts.latents), fitting > 1.01 * facts.limit
    if not facts.calls and images > 1.01 * passes * facts.pictures:
        done = images / facts.pictures
        reason = f"{done:,.0f} passes; after {passes:,}, samples become copies of the pictures"
    else:
        reason = "since longer runs memorise the pictures" if is_limited else "as many as fit into the time"
    return f"{reason}; the run leaves {duration(left)} unused: {TOO_FEW_PICTURES}" if is_limited else reason
