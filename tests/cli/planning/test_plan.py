"""Tests of the plan as a function of counted facts and measured speeds."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from rectified_flow.cli.budget import seconds_of
from rectified_flow.cli.planning.limits import AUGMENT, for_pictures
from rectified_flow.cli.planning.plan import (
    FORWARD_SHARE,
    MEMORY_SHARE,
    STARTER_DIMS,
    Facts,
    Plan,
    Starter,
    Trial,
    network_flags,
    plan,
)
from rectified_flow.cli.planning.sizes import choose_size
from rectified_flow.cli.settings import command_line, read_settings
from rectified_flow.cli.training_flags import Method, TrainConfig
from rectified_flow.errors import UsageError
from rectified_flow.flags import recorded
from rectified_flow.networks.unet import Unet
from rectified_flow.training.speed import Speed

EMOJI = Facts("rectified", 1400, 720.0, (32, 32), augment=AUGMENT, starter="suited", precisions=("no", "bf16"))
FLOWERS = replace(EMOJI, pictures=8192, starter="unsuited")
HOUR = replace(FLOWERS, pictures=1400, budget=3600.0)
DISTILL = replace(HOUR, method="distill", why_network="the network of the teacher", samples=5000, calls=8)


class Machine:
    """The speeds of a machine: ``rate`` images/s at dim 32 and batch 8, faster in bf16 and in large batches."""

    def __init__(self, rate: float, *, gain: float = 1.2, batch: float = 0.1, dim: int = 32, memory: float = 0) -> None:
        self.rate, self.gain, self.batch, self.dim, self.memory = rate, gain, batch, dim, memory

    def __call__(self, trial: Trial) -> Speed:
        rate = self.rate * (32 / (trial.width or self.dim)) ** 1.5 * (trial.batch / 8) ** self.batch
        memory = self.memory * (trial.width or self.dim) * trial.batch
        return Speed(rate * (self.gain if trial.precision == "bf16" else 1), memory)


def images(made: Plan, batch: int = 0) -> int:
    return int(made.settings["train_num_steps"]) * (batch or int(made.settings["global_batch_size"]))


RUNS = {
    "few pictures": (EMOJI, Machine(33)),
    "many pictures on GPUs": (
        replace(HOUR, pictures=60_000, augment=0, processes=8, device="cuda", precisions=(None,)),
        Machine(4000 / 8**0.5, batch=0.5),
    ),
    "few pictures on GPUs": (
        replace(EMOJI, pictures=500, processes=8, device="cuda", precisions=(None,)),
        Machine(9000),
    ),
    "three processes": (replace(FLOWERS, processes=3), Machine(90)),
    "latents": (replace(EMOJI, sides=(16, 16), latents=True, augment=0), Machine(60)),
    "mean flow": (replace(FLOWERS, method="mean_flow", precisions=(None,)), Machine(20)),
    "distill": (DISTILL, Machine(30, dim=64)),
    "reflow": (replace(DISTILL, method="reflow", calls=32), Machine(30, dim=64)),
}
TIMES = ("2m", "12m", "1h", "7h", "2d", "90d")


@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize("run", RUNS)
def test_the_laws_of_a_plan(run: str, time: str) -> None:
    """The run uses its time or ends where it would memorise, and its intervals fit into it."""
    facts, machine = replace(RUNS[run][0], budget=seconds_of(time)), RUNS[run][1]
    settings = plan(facts, machine).settings
    batch, steps = settings["global_batch_size"], settings["train_num_steps"]
    assert batch % facts.processes == 0
    assert batch < 256 + facts.processes
    trial = Trial(settings.get("dim"), batch, settings.get("mixed_precision"))
    training = batch * steps / machine(trial).rate
    drawing = settings.get("teacher_samples", 0) * facts.calls * FORWARD_SHARE / machine(trial).rate
    least = (15_000 if facts.augment else 6_000) if facts.latents else 192_000
    passes = (1000 if facts.augment else 400) // (2 if facts.latents and facts.pictures < 400 else 1)
    most = max(least, passes * facts.pictures) if not facts.calls else inf
    assert drawing < 0.5 * facts.seconds
    assert batch * steps <= most
    assert training <= 0.91 * (facts.seconds - 0.9 * drawing)
    assert training >= 0.8 * (facts.seconds - 1.1 * drawing) or batch * (steps + 1) > most, "time is left"
    assert 1 <= settings["log_every"] <= 50
    assert 1 <= settings["save_every"] <= max(1, steps // 7)
    assert 1 <= settings["sample_every"] <= 0.5 * steps, "no preview before the end"
    assert 10 <= settings["lr_warmup_steps"] <= max(10, steps // 50)
    assert 1 / (1 - settings["ema_decay"]) == pytest.approx(max(10, steps / 20), rel=0.05 + steps / 1e5)


@pytest.mark.parametrize("run", RUNS)
def test_more_time_or_speed_gives_no_smaller_run(run: str) -> None:
    """Neither a narrower network nor a smaller batch, and of the same network no fewer images."""
    facts, machine = RUNS[run]
    faster = [Machine(machine.rate * gain, batch=machine.batch, dim=machine.dim) for gain in (1, 3, 10, 100)]
    for plans in (
        [plan(replace(facts, budget=seconds_of(time)), machine).settings for time in TIMES],
        [plan(facts, each).settings for each in faster],
    ):
        sizes = [(made.get("dim", 0), made["global_batch_size"]) for made in plans]
        assert [width for width, _ in sizes] == sorted(width for width, _ in sizes)
        for (dim, batch), (next_dim, next_batch), one, other in zip(sizes, sizes[1:], plans, plans[1:], strict=False):
            if dim == next_dim:
                assert next_batch >= batch
                assert next_batch * (other["train_num_steps"] + 1) > batch * one["train_num_steps"]


@pytest.mark.parametrize("run", RUNS)
def test_a_plan_is_written_in_flags_of_the_program(run: str) -> None:
    """The settings, written as a command line, are read as themselves."""
    settings = plan(*RUNS[run]).settings
    teacher = ["--teacher", "runs/teacher"] if "teacher_samples" in settings else []
    read = recorded(read_settings(TrainConfig, "", [*command_line(settings), *teacher]).values)
    written = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
    assert {name: read[name] for name in settings} == written


@pytest.mark.parametrize(
    ("run", "calls", "optimizer", "rate"),
    [
        ("few pictures", 16, ("muon",), 2e-3),
        ("reflow", 16, ("muon",), 2e-3),
        ("distill", 1, ("muon",), 2e-3),
        ("mean flow", 1, None, 1e-3),
    ],
)
def test_each_method_has_its_optimizer_and_its_network_calls(
    run: str, calls: int, optimizer: tuple[str] | None, rate: float
) -> None:
    settings = plan(*RUNS[run]).settings
    assert (settings["sample_steps"], settings.get("optimizer"), settings["learning_rate"]) == (calls, optimizer, rate)
    assert settings["lr_decay"] == "cosine", "the length is known"


def test_a_plan_names_the_speeds_that_it_needs_and_no_others() -> None:
    asked: list[Trial] = []

    def measure(trial: Trial) -> Speed:
        asked.append(trial)
        return Machine(33)(trial)

    assert plan(EMOJI, measure) == plan(EMOJI, Machine(33))
    expected = [Trial(dim, 8, precision) for dim in (48, 32) for precision in ("bf16", "no")]
    assert asked == expected, "64 cannot be better than 48"


def test_a_longer_time_buys_a_wider_network_and_more_steps() -> None:
    plans = [plan(replace(FLOWERS, budget=float(seconds)), Machine(33)) for seconds in (120, 720, 3600, 14400, 86400)]
    widths = [made.settings["dim"] for made in plans]
    assert widths == sorted(widths)
    assert widths[0] < widths[-1]
    assert [images(made) for made in plans] == sorted(images(made) for made in plans)
    starters: list[tuple[Starter, int]] = [("suited", STARTER_DIMS[False]), ("unsuited", min(Unet.widths))]
    for starter, narrowest in starters:
        facts = replace(EMOJI, starter=starter)
        slow, fast = (plan(facts, Machine(rate)).settings for rate in (0.6, 1e5))
        assert (slow["dim"], fast["dim"]) == (narrowest, max(Unet.widths))
        assert (slow.get("init_from"), fast.get("init_from")) == ("starter" if starter == "suited" else None, None)
    assert plan(replace(EMOJI, starter="requested"), Machine(1e5)).settings["dim"] == STARTER_DIMS[False]


@pytest.mark.parametrize(
    ("facts", "passes", "dim"),
    [
        (replace(EMOJI, pictures=760), 1000, 64),
        (replace(EMOJI, pictures=760, augment=0), 400, 64),
        (replace(EMOJI, pictures=5), 38_400, 48),  # 192,000 images are too few for 64
        (replace(EMOJI, pictures=100, augment=0, latents=True), 200, 48),
        (replace(EMOJI, pictures=10, augment=0, latents=True), 600, 48),
        (replace(EMOJI, pictures=10, latents=True), 1500, 48),
        (replace(EMOJI, pictures=399, augment=0, latents=True), 200, 48),
        (replace(EMOJI, pictures=400, augment=0, latents=True), 400, 48),
        (replace(EMOJI, pictures=400, latents=True), 1000, 48),
    ],
)
def test_few_pictures_limit_the_length_and_the_width(facts: Facts, passes: int, dim: int) -> None:
    """The width depends on the images that are processed, and the passes on the number of pictures."""
    made = plan(replace(facts, budget=30 * 86400.0), Machine(500))
    assert images(made) == pytest.approx(passes * facts.pictures, rel=0.01)
    assert made.settings["dim"] == dim
    most = (1000 if facts.augment else 400) // (2 if facts.latents and facts.pictures < 400 else 1)
    copies = f"{images(made) / facts.pictures:,.0f} passes; after {most:,}, samples become copies of the pictures"
    assert (copies if passes > most else "since longer runs memorise the pictures") in made.reasons["length"]
    assert "; the run leaves 30 days unused: add pictures, or pass --train_num_steps" in made.reasons["length"]


def test_the_parts_of_the_time_are_those_of_the_run() -> None:
    """Both runs of ``--one_step`` need the pictures: each has half of the time that reading took, and the line all."""
    facts = replace(FLOWERS, budget=600.0, spent=120.0, precisions=(None,))
    alone, shared = (plan(replace(facts, runs=runs), Machine(33)).reasons["time"] for runs in (1, 2))
    assert alone == "2.0 minutes to start and read, 7.2 minutes to train, 48 s for previews and saving"
    assert shared == "2.0 minutes to start and read, 8.1 minutes to train, 54 s for previews and saving"
    few = replace(facts, pictures=60, augment=0, latents=True, budget=3600.0, spent=0.0, why_network="set by flags")
    ended = plan(few, Machine(50, batch=0)).reasons["time"]
    assert ended == "4.0 minutes to train, 27 s for previews and saving", "it has 200 passes"
    drawn = plan(replace(DISTILL, budget=600.0), Machine(30, gain=1, batch=0)).reasons["time"]
    assert drawn.startswith("2.5 minutes for samples of the teacher, ")


@pytest.mark.parametrize(
    ("gain", "facts", "precision"),
    [
        (1.3, EMOJI, "bf16"),
        (1.05, EMOJI, "no"),
        (1.3, replace(EMOJI, precisions=("no",)), "no"),
        (1.3, replace(EMOJI, precisions=(None,)), None),
        (0.5, replace(DISTILL, precisions=("bf16",)), "bf16"),
    ],
)
def test_bf16_is_chosen_where_it_is_faster(gain: float, facts: Facts, precision: str | None) -> None:
    assert plan(facts, Machine(33, gain=gain)).settings.get("mixed_precision") == precision


@pytest.mark.parametrize(
    ("memory", "dim", "part"), [(800, 48, None), (400, 48, 8), (200, 48, 4), (50, 48, 1), (45, 32, 1)]
)
def test_a_step_that_does_not_fit_into_the_memory_is_split(memory: float, dim: int, part: int | None) -> None:
    """An image on the machine of this test needs as much memory as the network has channels."""
    made = plan(replace(HOUR, memory=memory / MEMORY_SHARE["cpu"], precisions=(None,)), Machine(100, batch=0, memory=1))
    settings = made.settings
    assert (settings["dim"], settings.get("batch_size")) == (dim, part)
    assert ("a step with the width 48 does not fit into the memory" in made.reasons["network"]) == (dim == 32)
    assert (f"a step trains on {part} at once" in made.reasons["length"]) == (part is not None)


@pytest.mark.parametrize(("at_once", "part"), [(inf, None), (24, 16), (12, 8), (1, 1)])
def test_a_batch_that_ran_out_of_memory_is_split(at_once: float, part: int | None) -> None:
    facts = replace(HOUR, device="cuda", memory=8e9, precisions=(None,))
    made = plan(facts, lambda trial: Speed(10.0, 1e8 * trial.batch, at_once=at_once)).settings
    assert (made["global_batch_size"], made.get("batch_size")) == (32, part)


def test_a_step_that_does_not_fit_in_parts_is_refused() -> None:
    with pytest.raises(UsageError, match=r"a step of 8 images does not fit into the memory \(about 128\.0 GB\): lower"):
        plan(replace(FLOWERS, memory=1e10), Machine(33, memory=1e9))
    with pytest.raises(UsageError, match="a step of 24 images does not fit into the memory"):
        plan(replace(FLOWERS, memory=500, batch=24, fixed=frozenset({"global_batch_size"})), Machine(33, memory=2))
    fixed = replace(FLOWERS, why_network="set by flags", precisions=(None,), budget=999_999.0)
    full = {Trial(None, 8, None): Speed(10.0), Trial(None, 8, None, AUGMENT): Speed(10.0)}
    full |= {Trial(None, 256, None, AUGMENT): Speed(0.0, inf)}
    assert plan(fixed, full.__getitem__).settings["global_batch_size"] == 8, (
        "on a GPU, whose memory a larger batch exceeds"
    )
    with pytest.raises(UsageError, match="a step of 8 images does not fit into the memory"):
        plan(fixed, lambda _: Speed(0.0, inf))


def test_too_few_images_are_announced() -> None:
    large = replace(EMOJI, sides=(512, 512), starter="unsuited")
    made = plan(large, Machine(0.0455))
    assert images(made) == 96
    assert "96 images are too few" in made.reasons["warning"]
    assert made.reasons["warning"].endswith("pass a smaller --image_size, or a longer --budget")
    wide = plan(replace(large, fixed=frozenset({"network", "dim"}), why_network="wide"), Machine(0.25))
    assert wide.reasons["warning"].endswith("lower --dim, or pass a smaller --image_size, or a longer --budget")
    assert "warning" in plan(replace(EMOJI, budget=30.0), Machine(3)).reasons
    assert "warning" not in plan(EMOJI, Machine(33)).reasons
    sentence = r"--budget 1m40s is too short: a step of 8 images takes 32\.0 s on this machine; pass a smaller"
    with pytest.raises(UsageError, match=sentence):
        plan(replace(large, why_network="set by flags", precisions=(None,), budget=100.0), Machine(0.25))


@pytest.mark.parametrize("rate", [4.0, 2.7, 2.6, 1.0])
def test_the_first_of_two_runs_is_refused_if_the_second_would_be(rate: float) -> None:
    """Leave the second run, of 100 s like the first, time to draw the samples of its teacher."""
    first = replace(FLOWERS, runs=2, budget=100.0, why_network="set by flags", precisions=(None,))
    second = replace(DISTILL, budget=100.0, precisions=(None,))
    machine = Machine(rate, gain=1, batch=0)
    if rate < 2.65:
        with pytest.raises(UsageError, match=r"--budget 3m20s is too short: a step of 8 images takes"):
            plan(first, machine)
    else:
        assert images(plan(first, machine)) > images(plan(second, machine)) > 0


def test_a_teachers_samples_take_at_most_a_share_of_the_budget() -> None:
    facts = replace(DISTILL, budget=600.0)
    made = plan(facts, Machine(10, dim=32, gain=1, batch=0))
    assert made.settings["teacher_samples"] == int(150 / (8 * FORWARD_SHARE / 10)), "8 calls, 0.35 of an image each"
    assert images(made) == pytest.approx(0.9 * 450 * 10, rel=0.02)
    assert plan(facts, Machine(1000)).settings["teacher_samples"] == 5000, "no more than the flag asks for"
    drawn = plan(replace(facts, drawn=300), Machine(10, dim=32, gain=1, batch=0))
    assert drawn.settings["teacher_samples"] == 300
    assert images(drawn) == pytest.approx(0.9 * 600 * 10, rel=0.02), "they are there already"
    assert plan(replace(facts, drawn=5), Machine(10)).settings["global_batch_size"] == 5
    fixed = replace(facts, fixed=frozenset({"teacher_samples"}), samples=7000, budget=60.0)
    with pytest.raises(UsageError, match="would take all of --budget 1m: lower --teacher_samples"):
        plan(fixed, Machine(10))


@pytest.mark.parametrize(("method", "calls"), [("rectified", 16), ("mean_flow", 1)])
def test_previews_take_a_small_share(method: Method, calls: int) -> None:
    """The first preview comes within two minutes if the share allows."""
    for rate, seconds in ((20, 720), (20, 86400), (1000, 3600), (0.1, 3600)):
        facts = replace(FLOWERS, method=method, why_network="set by flags", precisions=(None,), budget=float(seconds))
        settings = plan(facts, Machine(rate, batch=0)).settings
        step = settings["global_batch_size"] / rate
        interval, cost = settings["sample_every"] * step, settings["num_samples"] * calls * FORWARD_SHARE / rate
        assert settings["sample_steps"] == calls
        assert cost <= 0.051 * (interval + step / 2)
        assert interval < 1.02 * max(120, cost / 0.05) + step
        assert settings["save_every"] <= max(1, 0.13 * settings["train_num_steps"]), "no early checkpoint"


@pytest.mark.parametrize(
    "given", [{"num_samples": 256}, {"sample_steps": 100}, {"num_samples": 200, "sample_steps": 1}]
)
def test_given_previews_take_a_small_share(given: dict[str, Any]) -> None:
    facts = replace(FLOWERS, why_network="set by flags", precisions=(None,), fixed=frozenset(given), **given)
    settings = plan(facts, Machine(20, batch=0)).settings
    count, calls = (given.get(name) or settings[name] for name in ("num_samples", "sample_steps"))
    step = settings["global_batch_size"] / 20
    assert count * calls * FORWARD_SHARE / 20 <= 0.051 * (settings["sample_every"] + 1) * step


@pytest.mark.parametrize(("rate", "augment"), [(11.0, None), (17.0, 0.15)])
def test_latents_are_augmented_by_the_speed_of_steps_that_encode(rate: float, augment: float | None) -> None:
    """On 60 pictures, 2.5 times 12,000 images must fit into the time."""

    def measure(_size: int, _autoencoder: tuple[str, ...], augment: float) -> Speed:
        return Speed(rate if augment else 33.0)

    assert choose_size(60, 128, 37 * 60.0, measure).settings.get("augment") == augment


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_any_number_of_processes_divides_the_batch(processes: int) -> None:
    made = plan(replace(EMOJI, processes=processes, budget=3600.0), Machine(2000))
    assert made.settings["global_batch_size"] % processes == 0


@pytest.mark.parametrize("processes", [2, 3, 8])
@pytest.mark.parametrize(("pictures", "latents"), [(30, True), (64, False), (500, False)])
def test_more_processes_give_a_small_set_about_as_many_steps(processes: int, pictures: int, latents: bool) -> None:
    """Its number of images is limited, so that larger batches are fewer steps."""
    facts = replace(EMOJI, pictures=pictures, latents=latents, device="cuda", precisions=(None,))
    one, more = (plan(replace(facts, processes=each), Machine(9000)).settings for each in (1, processes))
    assert more["train_num_steps"] >= 0.9 * one["train_num_steps"]


def test_flags_are_never_changed() -> None:
    everything = frozenset(plan(EMOJI, Machine(33)).settings)
    assert plan(replace(EMOJI, fixed=everything, batch=24, why_network="set by flags"), Machine(33)).settings == {}
    batch = plan(replace(EMOJI, batch=24, fixed=frozenset({"global_batch_size"})), Machine(33)).settings
    assert "global_batch_size" not in batch
    assert batch["train_num_steps"] * 24 == pytest.approx(0.9 * 720 * 33 * 1.2 * 3**0.1, rel=0.01)


@pytest.mark.parametrize(
    ("sides", "mults", "attention"),
    [
        ((8, 8), [1], 8),
        ((32, 32), [1, 2, 3], 8),
        ((64, 96), [1, 1, 2, 3], 8),
        ((36, 36), [1, 2, 3], 9),
        ((30, 30), [1, 2], 15),
        ((250, 250), [1, 2], ""),
        ((333, 500), [1], ""),
    ],
)
def test_the_levels_fit_the_sides(sides: tuple[int, int], mults: list[int], attention: int | str) -> None:
    """Attention is on at most 32 x 32 positions, as its memory grows with the fourth power of the side."""
    flags = network_flags(Unet, 16, sides)
    assert (list(flags["dim_mults"]), flags["network"][2]) == (mults, f"attention_sides=[{attention}]")


def test_fewer_pictures_get_more_help() -> None:
    assert [for_pictures(count).get("augment", 0) for count in (100, 2000, 40_000)] == [0.15, 0.15, 0]
    assert [for_pictures(count).get("holdout", 0) for count in (100, 200, 2000, 40_000)] == [0, 0.15, 0.05, 0.01]
    for count in range(125, 30_000, 7):
        assert for_pictures(count)["holdout"] * count >= 30, "fewer might be too few by chance, and refused"


@pytest.mark.parametrize(("rate", "seconds", "measured"), [(50.0, 3600.0, {128}), (200.0, 36e3, {128, 256})])
def test_a_size_is_measured_only_if_a_smaller_one_is_fast_enough(
    rate: float, seconds: float, measured: set[int]
) -> None:
    """The time of a step is in proportion to the pixels; 256 px need 400,000 images."""
    sizes = list[int]()

    def measure(size: int, _autoencoder: tuple[str, ...], _augment: float) -> Speed:
        sizes.append(size)
        return Speed(rate * (128 / size) ** 2)

    made = choose_size(20_000, 500, seconds, measure)
    assert made.settings["image_size"] == max(measured)
    assert sorted(sizes) == sorted(measured), "each once"
