"""Flags: the set is frozen, what they say is checked, and the batch arithmetic adds up."""

from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from rectified_flow.cli.flags.training import TrainMeanFlow, TrainRectifiedFlow
from rectified_flow.errors import UsageError
from rectified_flow.flags import flag_types, parse, plain
from rectified_flow.runs.config import TrainingConfig

SHARED = """
dataset dataset_options dataset_path image_size aspect_ratio crop alpha space space_options autoencoder
autoencoder_options horizontal_flip augment holdout skip_broken_images cache_dir num_workers multiprocessing_context
persistent_workers pin_memory network network_options dim dim_mults dropout use_cfg flow flow_options coupling
time_distribution time_options batch_size global_batch_size gradient_accumulation_steps train_num_steps num_epochs
optimizer optimizer_options learning_rate lr_warmup_steps lr_decay adam_betas weight_decay max_grad_norm max_bad_steps
mixed_precision use_ema ema_decay seed init_from gradient_checkpointing compile output_dir checkpoint_dir
resume save_every keep_checkpoints keep_every sample_every num_samples sample_steps log_every log_with rank_timeout
budget extend dry_run verbose look evaluate_every evaluation_samples feature_network stop_when_memorising config import
interrupted_exit_code source_path paired skip_unpaired degrade source_as source_noise
condition_on condition_types text_encoder text_tokens
native_size value_range transform show channels_last store_bits exclude
"""
RECTIFIED = (
    SHARED
    + "prediction loss time_mean time_std time_shift "
    + "reflow_from reflow_pairs reflow_steps pairs_dir one_step"
)
MEAN = SHARED + (
    "objective mean_fraction weight_power weight_epsilon time_mean time_std earlier_mean earlier_std guidance_scale "
    "method guidance_mixing teacher teacher_paths teacher_steps autoguidance whole_fraction paths_dir"
)
GROUPS = [
    "data options",
    "network options",
    "flow options",
    "teacher options",
    "source options",
    "columns options",
    "run options",
    "evaluation options",
    "program options",
]


def parse_rectified(words: str) -> TrainRectifiedFlow:
    return parse(TrainRectifiedFlow, "Train a flow.", words.split())


def parse_mean(words: str) -> TrainMeanFlow:
    return parse(TrainMeanFlow, "Train a flow.", words.split())


@pytest.mark.parametrize(("config_class", "flags"), [(TrainRectifiedFlow, RECTIFIED), (TrainMeanFlow, MEAN)])
def test_the_flags_are_these(config_class: type[Any], flags: str) -> None:
    """A flag that goes, or changes its name, breaks somebody's scripts."""
    assert sorted(flag_types(config_class)) == sorted(flags.split())
    assert list(plain(config_class())) == list(flag_types(config_class))


@pytest.mark.parametrize(
    ("config_class", "flags", "titles"),
    [
        (TrainRectifiedFlow, RECTIFIED, ["rectified flow's objective", "pairs of noise"]),
        (TrainMeanFlow, MEAN, ["objective of a mean flow", "paths from noise"]),
    ],
)
def test_help_is_grouped_and_names_every_flag(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    config_class: type[Any],
    flags: str,
    titles: list[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as end:
        parse(config_class, "Train a flow.", ["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    places = [text.index(title) for title in GROUPS]
    assert places == sorted(places)
    for title in titles:
        assert text.index("network options") < text.index(title) < text.index("run options")
    for flag in flags.split():
        assert f"--{flag}" in text
    for unit in ("[px]", "Optimizer steps", "Per-process", "(default: 100000)", "excludes --num_epochs"):
        assert unit in text
    assert "Train a flow." in text


def test_underscores_and_hyphens() -> None:
    config = parse_rectified("--batch-size 3 --dim_mults 1 2 --no_use_ema --no-horizontal-flip --num_epochs 2")
    assert (config.run.batch_size, config.network.dim_mults, config.run.num_epochs) == (3, (1, 2), 2)
    assert not config.run.use_ema
    assert not config.data.horizontal_flip


def test_a_typo_is_an_error_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_rectified("--learning_rat 1")
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert "Perhaps you meant" in error
    assert "--learning_rate FLOAT" in error


def test_it_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        TrainingConfig().seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--aspect_ratio 3", "--aspect_ratio is 3; it must be width:height, two whole numbers from 1 to 9999, such as"),
        ("--aspect_ratio 0:1", "--aspect_ratio is 0:1; it must be"),
        ("--aspect_ratio 3:-2", "--aspect_ratio is 3:-2; it must be"),
        ("--aspect_ratio 3:2 --autoencoder haar", "--aspect_ratio 3:2 excludes --autoencoder"),
        ("--crop random --autoencoder haar", "--crop random excludes --autoencoder"),
        ("--alpha --autoencoder haar", "--alpha excludes --autoencoder"),
        ("--image_size 0", "--image_size is 0; it must be above 0"),
        ("--train_num_steps 5 --num_epochs 1", "--train_num_steps and --num_epochs exclude each other"),
        ("--learning_rate -1", "--learning_rate is -1.0; it must be above 0"),
        ("--log_every 0", "--log_every is 0; it must be above 0"),
        ("--save_every -1", "--save_every is -1; it must be at least 0"),
        ("--dropout 1", "--dropout is 1.0; it must be below 1"),
        ("--ema_decay 1", "--ema_decay is 1.0"),
        ("--dim_mults", "--dim_mults is ()"),
        ("--persistent_workers", "need --num_workers above 0"),
        ("--adam_betas 0.9 1", "--adam_betas is 1.0; it must be below 1"),
        ("--lr_decay rsqrt --lr_warmup_steps 0", "--lr_decay rsqrt needs --lr_warmup_steps above 0"),
        ("--evaluation_samples 1", "--evaluation_samples is 1; it must be at least 2"),
        ("--mean_fraction 1.5", "--mean_fraction is 1.5; it must be at most 1"),
        ("--earlier_std 0", "--earlier_std is 0.0; it must be above 0"),
        ("--guidance_scale 2", "needs conditions: pass --use_cfg or --condition_on"),
        ("--guidance_mixing 1 --use_cfg", "--guidance_mixing is 1.0; it must be below 1"),
        ("--time_mean nan", "--time_mean is nan; it must be a finite number"),
        ("--earlier_mean -inf", "--earlier_mean is -inf; it must be a finite number"),
        ("--weight_power nan", "--weight_power is nan; it must be a finite number"),
        ("--weight_power -1", "--weight_power is -1.0; it must be at least 0"),
        ("--weight_epsilon 0", "--weight_epsilon is 0.0; it must be above 0"),
        ("--guidance_scale nan --use_cfg", "--guidance_scale is nan; it must be a finite number"),
        ("--weight_decay inf", "--weight_decay is inf; it must be a finite number"),
        ("--learning_rate inf", "--learning_rate is inf; it must be a finite number"),
        ("--adam_betas 0.9 nan", "--adam_betas is nan; it must be a finite number"),
    ],
)
def test_what_makes_no_sense_is_refused(words: str, sentence: str) -> None:
    with pytest.raises(UsageError) as refusal:
        parse_mean(words)
    assert sentence in str(refusal.value)


@pytest.mark.parametrize(
    ("flags", "world_size", "expected"),
    [
        ({}, 1, "64 per process x 1 process x 1 accumulation = 64"),
        ({"batch_size": 16}, 8, "16 per process x 8 processes x 1 accumulation = 128"),
        (
            {"batch_size": 16, "gradient_accumulation_steps": 2},
            4,
            "16 per process x 4 processes x 2 accumulation = 128",
        ),
        ({"global_batch_size": 128}, 8, "16 per process x 8 processes x 1 accumulation = 128"),
        ({"global_batch_size": 128, "batch_size": 8}, 4, "8 per process x 4 processes x 4 accumulation = 128"),
        ({"global_batch_size": 128, "gradient_accumulation_steps": 4}, 2, "16 per process x 2 processes x 4 accumu"),
    ],
)
def test_batch_arithmetic(flags: dict[str, Any], world_size: int, expected: str) -> None:
    assert str(TrainingConfig(**flags).split_batch(world_size)).startswith(expected)


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        ({"global_batch_size": 100}, 8),
        ({"global_batch_size": 100, "batch_size": 16}, 1),
        ({"global_batch_size": 4, "batch_size": 8}, 1),
        ({"global_batch_size": 4}, 8),
        ({"global_batch_size": 64, "batch_size": 16, "gradient_accumulation_steps": 2}, 1),
    ],
)
def test_a_batch_that_does_not_divide_is_refused(flags: dict[str, Any], world_size: int) -> None:
    with pytest.raises(UsageError, match=f"--global_batch_size {flags['global_batch_size']} cannot be split evenly"):
        TrainingConfig(**flags).split_batch(world_size)


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        ({"gradient_accumulation_steps": 10**9}, "lower --batch_size or --gradient_accumulation_steps"),
        ({"batch_size": 2**24, "gradient_accumulation_steps": 2}, "lower --batch_size or"),
        ({"global_batch_size": 2**24 + 1}, "lower --global_batch_size"),
    ],
)
def test_a_step_that_would_hardly_end_is_refused(flags: dict[str, Any], remedy: str) -> None:
    with pytest.raises(UsageError, match=f"a step would train on .* items; it must be at most 16777216: {remedy}"):
        TrainingConfig(**flags)
    assert TrainingConfig(batch_size=2**24).split_batch(1).total == 2**24


def test_lengths() -> None:
    batch = TrainingConfig(batch_size=10).split_batch(1)
    assert TrainingConfig().total_steps(batch, 25) == 100_000
    assert TrainingConfig(num_epochs=2).total_steps(batch, 25) == 5
    assert TrainingConfig(num_epochs=0.5).total_steps(batch, 25) == 2


def test_folders() -> None:
    assert TrainingConfig(output_dir=Path("a")).checkpoints == Path("a/checkpoints")
    assert TrainingConfig(checkpoint_dir=Path("b")).checkpoints == Path("b")
