"""Tests of parts chosen by their registered names, and of their options."""

from typing import Any

import pytest

from rectified_flow.cli.build import build_flow
from rectified_flow.cli.config import TrainConfig
from rectified_flow.errors import UsageError
from rectified_flow.flags import parse


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--network Vit", "--network Vit is not registered: choose "),
        ("--network MeanFlow", "--network MeanFlow is not registered: choose "),
        ("--network heads=3", "--network heads=3: Unet takes KEY=VALUE with the keys dim, "),
        ("--network Unet blocks_per_level", "--network blocks_per_level: Unet takes KEY=VALUE"),
        ("--network blocks_per_level=x", "--network blocks_per_level is x; it must be a valid integer"),
        (f"--network blocks_per_level={'9' * 5000}", "--network blocks_per_level is 9999"),
        (f"--network blocks_per_level={'[' * 5000}", "--network blocks_per_level is [[[["),
        ("--flow condition_dropout=2", "--flow condition_dropout is 2; it must be at most 1"),
        ("--flow Unet", "--flow Unet is not registered"),
        ("--space Sphere", "--space Sphere is not registered: choose "),
        ("--time_distribution stdev=1", "--time_distribution stdev=1: LogitNormal takes KEY=VALUE with the keys mean,"),
        ("--time_distribution uniform std=2", "--time_distribution std=2: Uniform takes KEY=VALUE"),
        (
            "--method reflow --teacher a --time_distribution mean=0",
            "--time_distribution mean=0: UShaped takes ",
        ),
        (
            "--method distill --teacher a --time_distribution uniform",
            "--time_distribution ",
        ),
        ("--method mean_flow --prediction clean", "--prediction has no effect: MeanFlow has no argument prediction"),
        ("--guidance_scale 2", "--guidance_scale has no effect: RectifiedFlow has no argument guidance_scale"),
    ],
)
def test_a_name_or_option_that_does_not_exist_is_one_sentence(words: str, sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        build_flow(parse(TrainConfig, "", f"--image_size 8 --dim 8 --dim_mults 1 {words}".split()), {})
    assert str(refused.value).startswith(sentence)


def test_have_the_types_of_the_annotations() -> None:
    words = "--image_size 8 --dim 8 --network dim_mults=[1,2] blocks_per_level=1 --time_distribution"
    words += " LogitNormal stratified=true --flow condition_dropout=0.5"
    flow: Any = build_flow(parse(TrainConfig, "", words.split()), {})
    network, times = flow.network, flow.time_distribution
    assert (network.dim, network.dim_mults, network.blocks_per_level) == (8, (1, 2), 1)
    assert (times.mean, times.stratified, flow.condition_dropout) == (-0.5, True, 0.5)
