"""Tests of settings that the program chooses unless a flag sets them, and that a resumed run keeps."""

import time
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from accelerate import PartialState
from PIL import Image

from rectified_flow.cli import timing, train
from rectified_flow.cli.budget import seconds_of, time_text
from rectified_flow.cli.checks import check_flags
from rectified_flow.cli.data import build_space
from rectified_flow.cli.planning import choices, facts, plan, reading
from rectified_flow.cli.planning.choices import with_recipe
from rectified_flow.cli.settings import Settings, read_settings
from rectified_flow.cli.training_flags import DataConfig, OneStepConfig, TrainConfig
from rectified_flow.data.open import Pictures
from rectified_flow.data.sources.synthetic_flowers import SyntheticFlowers
from rectified_flow.errors import UsageError
from rectified_flow.flags import recorded
from rectified_flow.latents.autoencoders import Small
from rectified_flow.latents.space import encode_pictures
from rectified_flow.parts import name_of
from rectified_flow.runs import checkpoint
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.training.speed import Speed
from tests.extension import own_autoencoder, own_transformer  # noqa: F401 -- they are registered
from tests.programs import OwnPictures, Sizes, planned

FAST, SLOW = 1e6, 2e4
"""Images per second of a network of width 1 on two machines; the time of a step grows with the square of the width."""


def chosen(
    count: int, words: str = "", folder: str = "pictures", kind: type[TrainConfig] = TrainConfig, rate: float = SLOW
) -> dict[str, object]:
    """Return all flags of a run on ``count`` pictures."""
    data = f"--dataset_path {folder} " if folder else "--dataset synthetic-flowers "
    settings = read_settings(kind, "Train.", (data + words).split())
    return recorded(planned(settings, count, lambda config: rate / config.network.dim**2))


def recipe_of(words: str, source: Sizes) -> TrainConfig:
    """Return the flags of a new run on the pictures of a source, with its recipe."""
    words = f"--dataset_path pictures {words}"
    return with_recipe(read_settings(TrainConfig, "Train.", words.split()), source, budget_of(words)).values


def budget_of(words: str) -> float | None:
    settings = read_settings(TrainConfig, "", words.split())
    values, has_length = settings.values, "train_num_steps" in settings.fixed
    return timing.budget_of(values.program) if values.is_planned and not has_length else None


@pytest.mark.parametrize(
    ("largest", "words", "side"),
    [
        *(((28, 28), "", 32), ((300, 20), "", 24), ((8, 8), "", 8), ((64, 64), "", 64), ((300, 65), "", 64)),
        *(((20, 20), "--dim_mults 1 1 1 1 1", 32), ((28, 28), "--image_size 64", 64)),
        *(((60, 20), "--crop none", 64), ((30, 20), "--crop none", 32), ((30, 20), "--crop center", 24)),
        *(((28, 28), "--autoencoder small", 64), ((28, 28), "--aspect_ratio 3:2", 64)),
    ],
)
def test_small_pictures_are_not_enlarged(largest: tuple[int, int], words: str, side: int) -> None:
    """The side is a multiple of 8 that the levels can halve, unless a flag sets it."""
    assert recipe_of(words, Sizes([(4, 4), largest] * 80)).data.image_size == side


@pytest.mark.parametrize(
    ("side", "rate", "words", "chosen"),
    [
        *((128, 1e3, "", (128, "small")), (96, 1e3, "", (128, "small")), (95, 1e3, "", (64, ""))),
        *((300, 1e3, "", (256, "small")), (300, 1e2, "", (128, "small")), (96, 1, "", (128, "small"))),
        *((40, 1e3, "", (32, "")), (16, 1e3, "", (16, "")), (95, 1, "", (32, ""))),
        *((300, 1e3, "--image_size 32", (32, "")), (300, 1e3, "--autoencoder small", (64, "small"))),
        *((300, 1e3, "--alpha", (64, "")), (300, 1e3, "--train_num_steps 9", (64, ""))),
        (300, 1e3, "--augment 0.3", (256, "small")),
        *((300, 1e3, "--image_size 128", (128, "small")), (300, 1e3, "--image_size 128 --autoencoder", (128, ""))),
        *((300, 1e3, "--image_size 96 --aspect_ratio 3:2", (96, "small")), (300, 1e3, "--image_size 136", (136, ""))),
        *((300, 1e3, "--image_size 128 --dim 32", (128, "small")), (300, 1e3, "--image_size 64", (64, ""))),
        *((300, 1e3, "--dim 32 --dim_mults 1 2", (256, "small")), (300, 1e3, "--dim_mults 1 1 1 1 1 1 1", (64, ""))),
        *((300, 1e3, "--network Unet", (256, "small")), (300, 1e3, "--network Unet attention_sides=[32]", (64, ""))),
        (300, 1e3, "--image_size 240 --dim_mults 1 1 1", (240, "")),
        *((128, 1e3, f"--init_from {kind}", (128, "small")) for kind in ("none", "starter")),
        (128, 1e3, "--init_from runs/other", (64, "")),
        (100, 1e3, "--use_cfg --method mean_flow --guidance_scale 2 --batch_size 3", (128, "small")),
    ],
)
def test_the_size_of_the_pictures(side: int, rate: float, words: str, chosen: tuple[int, str]) -> None:
    """The largest size that the pictures have, if enough images fit into the time, and no flag sets it."""
    with patch.object(facts, "measure_speed", lambda *_: Speed(rate)):
        data = recipe_of(words, OwnPictures([(side, side + 10)] * 2000)).data
    assert (data.image_size, name_of(data.autoencoder)) == chosen


@pytest.mark.parametrize(
    ("count", "rate", "words", "augment"),
    [
        *((60, 40, "", 0.15), (60, 40, "--image_size 128", 0.15), (60, 8, "", 0)),  # 130,000 and 26,000 images
        *(
            (2000, 40, "", 0),
            (20_000, 1e3, "", 0),
            (30, 4.5, "", 0),
            (30, 5, "", 0.15),
            (20, 3, "", 0.15),
            (20, 1.2, "", 0),
        ),
        *((60, 40, "--autoencoder small --image_size 128", 0.15), (60, 40, "--augment 0", 0)),
        *((60, 40, "--autoencoder small --train_num_steps 9", 0), (60, 40, "--init_from runs/other", 0)),
    ],
)
def test_few_large_pictures_are_augmented_before_they_are_encoded(
    count: int, rate: float, words: str, augment: float
) -> None:
    """On 60 pictures, a run without augmentation ends after 12,000 images; an augmented one needs 2.5 times as many.

    On 20 pictures, a run of more than 4,000 images would copy them without augmentation.
    """
    with patch.object(facts, "measure_speed", lambda *_: Speed(rate)):
        assert recipe_of(words, OwnPictures([(300, 300)] * count)).data.augment == augment


@pytest.mark.parametrize(
    ("count", "side", "images"), [(9, 128, 15_000), (200, 128, 100_000), (399, 128, 199_500), (401, 256, 401_000)]
)
def test_the_size_depends_on_the_images_that_the_run_may_process(
    count: int, side: int, images: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run on augmented latents ends after 500 passes over the pictures, or 15,000 images; 256 px need 400,000.

    From 400 pictures on, it ends after 1,000 passes.
    """
    with patch.object(facts, "measure_speed", lambda *_: Speed(1e3)):
        assert recipe_of("", OwnPictures([(300, 300)] * count)).data.image_size == side
    assert f"about {images:,} images in 60 minutes" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "side"), [("", 256), ("--mixed_precision bf16", 256), ("--mixed_precision no", 128)])
def test_the_size_is_chosen_by_the_speed_in_the_faster_precision(words: str, side: int) -> None:
    """The 400,000 images that 256 px need fit into an hour in bf16, but not in float32."""

    def speed(tried: Settings[TrainConfig], *_: object) -> Speed:
        rate = 150.0 if tried.values.run.mixed_precision == "bf16" else 100.0
        return Speed(rate * (256 / tried.values.data.image_size) ** 2)

    with patch.object(choices, "speed_of", speed), patch.object(facts, "is_bf16_faster", lambda: True):
        assert recipe_of(words, OwnPictures([(256, 256)] * 2000)).data.image_size == side


def test_without_a_length_a_run_on_ones_own_pictures_takes_an_hour(capsys: pytest.CaptureFixture[str]) -> None:
    assert chosen(2000) == chosen(2000, "--budget 60m")
    assert "budget      1h (--budget changes it): 1 x cpu trains" in capsys.readouterr().out
    given = chosen(2000, "--train_num_steps 30")
    assert (given["train_num_steps"], given["dim"], given["optimizer"]) == (30, 64, ["adamw"])
    assert chosen(2000, "--num_epochs 3")["num_epochs"] == 3
    drawn = chosen(100, folder="")
    assert (drawn["augment"], drawn["train_num_steps"]) == (DataConfig().augment, None)
    assert chosen(100, "--budget 1h", folder="")["train_num_steps"] is not None, "a budget is for any data"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--budget 1m --train_num_steps 5", "--budget and --train_num_steps exclude each other: pass one"),
        ("--one_step --num_epochs 3", "--one_step and --num_epochs exclude each other: pass one"),
        ("--budget 2s", "--budget 2s is too short: a step of 8 images takes 32.0 s on this machine"),
        *(
            (f"--budget {each}", f"--budget is {each}; it must be a time such as")
            for each in ("5", "0m", "1e9h", "m", "nanh", "1h1h", "30m1h", "1:30", "-1h")
        ),
    ],
)
def test_a_budget_that_makes_no_sense(words: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        chosen(2000, words, rate=256.0)


def test_a_metric_of_rectified_flows_is_not_for_one_step() -> None:
    settings = read_settings(
        TrainConfig, "", ["--one_step", "--evaluate_every", "5", "--evaluate_metric", "likelihood"]
    )
    with pytest.raises(UsageError, match="--evaluate_metric likelihood is for rectified flows, not for --one_step"):
        check_flags(settings.values, settings.given)


@pytest.mark.parametrize(
    ("budget", "half"),
    [("1h", "30m"), ("10s", "5s"), ("3m", "1m30s"), ("2000d", "1000d"), ("0.1s", "0.05s"), ("0.0001h", "0.18s")],
)
def test_each_of_two_generators_has_half_of_the_time(budget: str, half: str) -> None:
    words = f"--dataset synthetic-flowers --one_step --budget {budget}"
    seconds = budget_of(words)
    assert seconds is not None
    assert time_text(seconds) == half
    assert 2 * seconds == pytest.approx(seconds_of(budget))
    assert budget_of("--one_step") == 1800


@pytest.mark.parametrize(
    ("words", "are_kept"),
    [
        ("--mixed_precision bf16 --num_samples 9 --save_every 7 --keep_checkpoints 2 --sample_every 5", True),
        ("--optimizer adamw --learning_rate 1e-4 --ema_decay 0.9 --batch_size 3 --compile", True),
        ("--evaluate_every 5 --evaluation_samples 10 --feature_network efficientnet_lite0", True),
        ("--num_workers 2 --log_with tensorboard --gradient_checkpointing --import math --resume never", True),
        ("--dataset x --max_train_samples 9 --autoencoder small --horizontal_flip --use_cfg --dropout 0.3", False),
        ("--dataset_path x --source_path y --cache_dir z", True),
        ("--dim 8 --network Unet --init_from none --time_distribution uniform --coupling ot --method rectified", False),
        ("--sample_steps 32 --holdout 0.1 --stop_when_memorising --augment 0.1 --one_step --budget 5m", False),
    ],
)
def test_the_second_run_of_a_command_has_the_flags_that_are_not_of_the_first_alone(words: str, are_kept: bool) -> None:
    given = read_settings(TrainConfig, "", words.split()).layers["given"]
    assert given
    second = train.one_step_of(TrainConfig().run, given, 300.0, spent=60.0).layers["given"]
    expected = {"teacher", "output_dir", "seed", "budget"} | (given.keys() if are_kept else set())
    assert second.keys() == expected
    assert second["budget"] == "5m"


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        *(("1h30m", 5400), ("90min", 5400), ("45 min", 2700), ("1.5h", 5400), ("2 hours", 7200), ("1d 2h", 93600)),
        *(("90 seconds", 90), ("1H", 3600), ("10mins", 600), ("1 day", 86400), ("0.5s", 0.5), ("1d2h3m4s", 93784)),
    ],
)
def test_a_budget_is_read_as_people_write_it(words: str, seconds: float) -> None:
    assert seconds_of(words) == seconds
    assert seconds_of(time_text(seconds)) == seconds


def test_a_long_budget_with_small_batches_keeps_an_average_of_the_weights() -> None:
    decay = chosen(10**6, "--budget 30d --batch_size 8", rate=1e4)["ema_decay"]
    assert isinstance(decay, float)
    assert 0.9999 < decay < 1


def test_flags_override_it() -> None:
    assert chosen(2000, "--train_num_steps 9")["augment"] == 0.15
    assert [chosen(count, "--budget 12m")["augment"] for count in (100, 2000)] == [0.15, 0], "few passes"
    flags = chosen(800, "--augment 0 --stop_when_memorising")
    assert (flags["augment"], flags["stop_when_memorising"], flags["holdout"]) == (0, True, 0.05)
    assert chosen(800, "--holdout 0.2")["holdout"] == 0.2
    assert chosen(800, "--autoencoder small")["augment"] == 0
    given = chosen(800, "--dim 40 --batch_size 24 --learning_rate 1e-4 --ema_decay 0.5 --sample_every 7")
    assert (given["dim"], given["dim_mults"]) == (40, [1, 2, 3, 4]), "one's own network is left as it is"
    assert (given["batch_size"], given["global_batch_size"]) == (24, None)
    assert (given["optimizer"], given["learning_rate"]) == (["adamw"], 1e-4)
    assert (given["ema_decay"], given["sample_every"]) == (0.5, 7)


def test_a_run_goes_on_as_it_began(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run keeps its flags, whatever the number of pictures or processes is now."""
    run = f"--output_dir {tmp_path}"
    began = chosen(800, run)
    assert "recipe      --holdout 0.05, for 800" in capsys.readouterr().out
    save(tmp_path, 1, began)
    assert chosen(20_000, run, rate=FAST) == began
    assert chosen(20_000, f"{run} --budget 3d", rate=FAST) == began
    longer = chosen(800, f"{run} --train_num_steps 20000")
    assert longer == began | {"train_num_steps": 20_000}
    assert chosen(800, f"{run} --learning_rate 1e-4") == began | {"learning_rate": 1e-4}, "and keeps the optimizer"
    save(tmp_path, 2, longer)
    assert chosen(800, run) == longer, "it is extended once"
    save(tmp_path, 3, began | {"global_batch_size": 63})
    extended = chosen(800, f"{run} --num_epochs 2000")
    assert extended["global_batch_size"] == 63, "the batch stays"
    monkeypatch.setattr(PartialState(), "num_processes", 2)
    assert chosen(800, run)["global_batch_size"] == 62, "and is one that two processes can share"
    save(tmp_path, 4, began | {"global_batch_size": 8, "batch_size": 2})
    assert [chosen(800, run)[name] for name in ("global_batch_size", "batch_size")] == [8, 2], "in two parts"
    monkeypatch.setattr(PartialState(), "num_processes", 3)
    assert [chosen(800, run)[name] for name in ("global_batch_size", "batch_size")] == [6, 2]
    monkeypatch.setattr(PartialState(), "num_processes", 8)
    assert [chosen(800, run)[name] for name in ("global_batch_size", "batch_size")] == [8, 1]
    monkeypatch.undo()


def save(run: Path, step: int, flags: dict[str, object]) -> None:
    """A checkpoint of a run with these flags."""
    checkpoint.save(
        run / "checkpoints", step, {}, {checkpoint.CONFIG_FILE: {"data": {}, "flow": {}, "training": flags}}
    )


def test_a_given_dropout_is_kept() -> None:
    assert chosen(800)["dropout"] == 0.0
    flags = chosen(800, "--dropout 0.3 --budget 1h")
    assert (flags["dropout"], flags["dim"]) == (0.3, chosen(800, "--budget 1h")["dim"])


def test_the_room_is_the_free_memory_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (7_000, 8_000))
    monkeypatch.setattr(facts, "free_memory", lambda: 90_000.0)
    for kind, room in (("cuda", 7_000), ("cpu", 90_000), ("mps", inf)):
        monkeypatch.setattr(facts, "PartialState", lambda kind=kind: SimpleNamespace(device=torch.device(kind)))
        assert facts.least_memory() == room


def test_a_batch_that_ran_out_of_memory_is_refused_without_a_plan() -> None:
    """Its flags give the batch, which the program does not split."""
    run = read_settings(TrainConfig, "", ["--batch_size", "16"]).values.run
    facts.print_speed(run, Speed(10.0, 1e9, at_once=16), 100)
    with pytest.raises(UsageError, match=r"a step of 16 images does not fit into the memory \(1.0 GB\): lower"):
        facts.print_speed(run, Speed(10.0, 1e9, at_once=8), 100)


def test_stratified_times_are_not_chosen_for_other_flows_or_times() -> None:
    assert chosen(2000)["time_distribution"] == ["stratified=True"]
    assert chosen(2000, "--flow distance=pseudo_huber")["time_distribution"] == ["stratified=True"]
    for words in ("--time_distribution uniform", "--time_distribution shift=2.0", "--flow Guest"):
        assert "stratified=True" not in str(chosen(2000, words)["time_distribution"])


@pytest.mark.parametrize(
    ("kind", "words", "expected"),
    [
        (TrainConfig, "", {"method": "rectified", "precisions": ("no", "bf16"), "starter": "suited", "batch": None}),
        (TrainConfig, "--mixed_precision no --batch_size 4", {"precisions": ("no",), "batch": 4}),
        (TrainConfig, "--image_size 24", {"starter": "unsuited", "sides": (24, 24), "augment": 0.15}),
        (TrainConfig, "--init_from starter --augment 0.3", {"starter": "requested", "augment": 0.3}),
        (TrainConfig, "--autoencoder Haar", {"starter": "unsuited", "augment": 0}),
        (TrainConfig, "--autoencoder small", {"starter": "suited", "latents": True, "augment": 0}),
        (TrainConfig, "--autoencoder small --init_from none", {"starter": "unsuited"}),
        (TrainConfig, "--autoencoder small --crop random", {"augment": 0}),  # it was not chosen with the size
        (TrainConfig, "--autoencoder small --image_size 256", {"starter": "unsuited", "sides": (32, 32)}),
        *(
            (TrainConfig, f"--dataset {name} --budget 1h --autoencoder small", {"starter": starter})
            for name, starter in (("me/cats", "suited"), ("synthetic-flowers", "unsuited"))
        ),
        *(
            (TrainConfig, words, {"starter": "unsuited"})
            for words in ("--alpha", "--prediction clean", "--init_from runs/other", "--init_from None")
        ),
        (OneStepConfig, "", {"method": "mean_flow", "precisions": (None,), "starter": "unsuited", "calls": 0}),
        (
            OneStepConfig,
            "--teacher run",
            {"method": "distill", "samples": 5000, "calls": 8, "precisions": ("no", "bf16")},
        ),
        (
            TrainConfig,
            "--method reflow --teacher run --teacher_samples 9",
            {"method": "reflow", "samples": 9, "calls": 32},
        ),
    ],
)
def test_the_facts_of_a_run(kind: type[TrainConfig], words: str, expected: dict[str, object]) -> None:
    PartialState()
    words = f"{'' if '--dataset' in words else '--dataset_path pictures'} {words}"
    settings: Settings[TrainConfig] = read_settings(kind, "", words.split())
    data = settings.values.data
    space = build_space(data) if data.starter in ("small", "Haar") else Pixels()
    with (
        patch.object(plan, "plan") as made,
        patch.object(facts, "network_of_origin", lambda *_: ({}, "")),
        patch.object(facts, "is_bf16_faster", lambda: True),
    ):
        made.return_value = plan.Plan({}, {})
        choices.with_plan(settings, 3600.0, 800, {}, space)
    known = made.call_args.args[0]
    assert {name: getattr(known, name) for name in expected} == expected
    assert known.seconds == pytest.approx(3600, abs=30)  # but for the time since the flags were read
    assert (known.processes, known.device) == (1, "cpu")


def test_bf16_is_not_tried_on_a_slow_processor() -> None:
    PartialState()
    for is_faster, precisions in ((False, ("no",)), (True, ("no", "bf16"))):
        with patch.object(facts, "is_bf16_faster", lambda is_faster=is_faster: is_faster):
            assert facts.precisions(TrainConfig().run, "rectified", ()) == precisions
    facts.is_bf16_faster.cache_clear()
    with patch("time.perf_counter", iter(range(100)).__next__):
        assert not facts.is_bf16_faster(), "equal times"
    facts.is_bf16_faster.cache_clear()


@pytest.mark.parametrize(("rate", "width"), [(1.0, 32), (1e3, 128)])
def test_a_transformer_of_ones_own_is_sized_by_the_budget(rate: float, width: int) -> None:
    """The class declares its widths; a name without arguments leaves the width to the plan."""
    flags = chosen(2000, "--network PatchTransformer --image_size 64 --autoencoder small --budget 1h", rate=rate * SLOW)
    layers = 2 + width // 32
    assert flags["network"] == ["PatchTransformer", f"width={width}", f"layers={layers}", "patch=2"]
    given = chosen(2000, "--network PatchTransformer width=48 --image_size 64 --budget 1h")
    assert given["network"] == ["PatchTransformer", "width=48"], "one's own size is left as it is"


class Slow(OwnPictures):
    """Pictures that take 50 ms each to decode, whatever the number of cores."""

    fingerprint = "slow"
    name = "slow"

    def load(self, index: int) -> tuple[Image.Image, int]:
        time.sleep(0.05)
        return super().load(index)


def test_stored_pictures_are_encoded_in_the_time_of_the_run(tmp_path: Path) -> None:
    """An earlier run on pixels has decoded them; an autoencoder that takes 2 s a picture allows few of them."""
    pictures = SyntheticFlowers(16, count=20)
    flags = DataConfig(image_size=16, cache_dir=tmp_path, autoencoder=("small",))
    pixels = Pictures(image_size=16, cache_dir=tmp_path).open(pictures)
    with patch.object(reading, "encoding_time", lambda *_: 2.0):
        assert reading.readable(pictures, flags, 12.0) == {"max_train_samples": 1}
        assert reading.readable(pictures, replace(flags, autoencoder=()), 12.0) == {}
        encode_pictures(pixels, Small(), mirrored=True)
        assert reading.readable(pictures, flags, 12.0) == {}, "the latents are stored, too"
        assert reading.readable(pictures, replace(flags, horizontal_flip=False), 12.0), "these latents are others"


@pytest.mark.parametrize(("budget", "is_limited"), [("1m", True), ("10h", False)])
def test_a_run_reads_what_a_third_of_its_time_allows(budget: str, is_limited: bool, tmp_path: Path) -> None:
    """Decoding 4,000 pictures takes 100 s or so on two cores, and less with more."""
    data = DataConfig(image_size=8, cache_dir=tmp_path)
    with patch.object(reading, "processors", lambda: 2):
        flags = reading.readable(Slow([(16, 16)] * 4000), data, seconds_of(budget))
    assert bool(flags) == is_limited
    count = flags.get("max_train_samples", 1)
    assert 1 <= count < 4000
    assert count in {int(1.25**each) for each in range(40)}, "so that a killed run mostly finds its pictures stored"
