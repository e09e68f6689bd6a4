"""Tests of flags: their names, their ranges, and the arithmetic of batches."""

import json
from pathlib import Path
from typing import Any

import pytest

from rectified_flow.cli.data import data_of
from rectified_flow.cli.settings import parse
from rectified_flow.cli.training_flags import OneStepConfig, TrainConfig
from rectified_flow.errors import UsageError
from rectified_flow.flags import flag_types, plain
from rectified_flow.registry import build, describe
from rectified_flow.runs.training_config import TrainingConfig

FLAGS = """
dataset dataset_path image_size aspect_ratio crop alpha grey resize bits space
autoencoder horizontal_flip augment holdout data_seed
skip_broken_images exclude max_train_samples image_column label_column cache_dir
network dim dim_mults dropout use_cfg gradient_checkpointing init_from
method flow prediction coupling time_distribution guidance_scale
teacher teacher_samples teacher_steps teacher_dir autoguidance
source_path paired source_resize source_bits degrade source_as source_noise
condition_on text_encoder text_tokens
batch_size global_batch_size gradient_accumulation_steps train_num_steps num_epochs optimizer
learning_rate lr_warmup_steps lr_decay max_grad_norm mixed_precision ema_decay seed compile output_dir
checkpoint_dir resume resume_from_checkpoint save_every
keep_checkpoints sample_every num_samples sample_steps log_every log_with rank_timeout num_workers
evaluate_every evaluate_metric evaluation_samples feature_network stop_when_memorising
import config budget one_step dry_run
"""


def parsed(words: str) -> TrainConfig:
    return parse(TrainConfig, "Train a flow.", words.split())


@pytest.mark.parametrize("config_class", [TrainConfig, OneStepConfig])
def test_the_flags_are_these(config_class: type[Any]) -> None:
    """A flag that goes, or changes its name, breaks somebody's scripts."""
    assert sorted(flag_types(config_class)) == sorted(FLAGS.split())
    assert list(plain(config_class())) == list(flag_types(config_class))


def test_underscores_and_hyphens() -> None:
    config = parsed("--batch-size 3 --dim_mults 1 2 --no-horizontal-flip --num_epochs 2")
    assert (config.run.batch_size, config.network.dim_mults, config.run.num_epochs) == (3, (1, 2), 2)
    assert not config.data.horizontal_flip


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--image_size -1", "`image_size` is -1; it must be greater than or equal to 0"),
        ("--image_size 100000", "`image_size` is 100000; it must be less than or equal to 16384"),
        ("--dim 1000000", "`dim` is 1000000; it must be less than or equal to 4096"),
        ("--alpha --autoencoder small", "--alpha and --autoencoder exclude each other: pass one"),
        ("--one_step --prediction noise", "--prediction and --one_step exclude each other: pass one"),
        ("--one_step --flow Guest", "--one_step and --flow exclude each other: pass one"),
        ("--degrade grey --coupling ot", "--degrade and --coupling exclude each other: pass one"),
        ("--resume_from_checkpoint runs/a", "it must be latest: the same command resumes its run"),
        ("--resume_from_checkpoint latest --resume never", "--resume_from_checkpoint and --resume exclude each other"),
        ("--gradient_accumulation_steps 0", "`gradient_accumulation_steps` is 0; it must be greater than 0"),
        ("--learning_rate -1", "`learning_rate` is -1.0; it must be greater than 0"),
        ("--log_every 0", "`log_every` is 0; it must be greater than 0"),
        ("--save_every -1", "`save_every` is -1; it must be greater than or equal to 0"),
        ("--dropout 1", "`dropout` is 1.0; it must be less than 1"),
        ("--ema_decay 1", "`ema_decay` is 1.0"),
        ("--dim_mults", "`dim_mults` is ()"),
        ("--evaluation_samples 1", "`evaluation_samples` is 1; it must be greater than or equal to 2"),
        ("--guidance_scale nan --use_cfg", "`guidance_scale` is nan; it must be a finite number"),
        ("--rank_timeout 1e15", "`rank_timeout` is 1000000000000000.0; it must be less than"),
        ("--learning_rate inf", "`learning_rate` is inf; it must be a finite number"),
    ],
)
def test_what_makes_no_sense_is_refused(words: str, sentence: str) -> None:
    with pytest.raises(UsageError) as refusal:
        parsed(words)
    assert sentence in str(refusal.value)


@pytest.mark.parametrize(
    ("flags", "world_size", "expected"),
    [
        ({}, 1, "64 per process x 1 process = 64"),
        ({"batch_size": 16}, 8, "16 per process x 8 processes = 128"),
        ({"global_batch_size": 128}, 8, "16 per process x 8 processes = 128"),
        ({"global_batch_size": 128, "batch_size": 8}, 4, "8 per process x 4 processes x 4 accumulation = 128"),
        ({"gradient_accumulation_steps": 2}, 1, "64 per process x 1 process x 2 accumulation = 128"),
        (
            {"batch_size": 32, "gradient_accumulation_steps": 2},
            4,
            "32 per process x 4 processes x 2 accumulation = 256",
        ),
        (
            {"global_batch_size": 128, "gradient_accumulation_steps": 2},
            4,
            "16 per process x 4 processes x 2 accumulation = 128",
        ),
        (
            {"global_batch_size": 128, "batch_size": 8, "gradient_accumulation_steps": 8},
            2,
            "8 per process x 2 processes x 8 accumulation = 128",
        ),
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
        ({"global_batch_size": 128, "gradient_accumulation_steps": 3}, 4),
        ({"global_batch_size": 128, "batch_size": 8, "gradient_accumulation_steps": 2}, 2),
    ],
)
def test_a_batch_that_does_not_divide_is_refused(flags: dict[str, Any], world_size: int) -> None:
    with pytest.raises(UsageError, match=f"`global_batch_size` {flags['global_batch_size']} cannot be split evenly"):
        TrainingConfig(**flags).split_batch(world_size)


def test_a_batch_that_no_memory_holds_is_refused() -> None:
    flags = TrainingConfig(batch_size=2**20, gradient_accumulation_steps=2**20)
    with pytest.raises(
        UsageError, match="more than 16777216 items: lower `batch_size` or `gradient_accumulation_steps`"
    ):
        flags.split_batch(1)


def test_lengths() -> None:
    batch = TrainingConfig(batch_size=10).split_batch(1)
    assert TrainingConfig().total_steps(batch, 25) == 100_000
    assert TrainingConfig(num_epochs=2, train_num_steps=7).total_steps(batch, 25) == 5, "of a program with a default"
    assert TrainingConfig(num_epochs=0.5).total_steps(batch, 25) == 2


@pytest.mark.parametrize(
    "words",
    [
        "--dataset_path x --image_size 32 --condition_on a --space value_range=0,3",
        "--dataset_path x --source_path y --source_as start --cache_dir z",
    ],
)
def test_the_data_of_a_run_are_built_again_from_their_description(words: str) -> None:
    """JSON holds the paths as text, and the tuples as lists."""
    values = parsed(words)
    data = data_of(values.data, values.source, values.columns)
    built = build(json.loads(json.dumps(describe(data))))
    assert built.pictures.dataset_path == Path("x").absolute(), "the same folder in every working directory"
    assert describe(built) == describe(data)
