"""What suits the pictures and the time is chosen where no flag says otherwise, and stays on resuming."""

from pathlib import Path

import pytest
from accelerate import PartialState

from rectified_flow.cli.flags.data import DataConfig
from rectified_flow.cli.flags.training import (
    RectifiedFlowProgramConfig,
    TrainConfig,
    TrainMeanFlow,
    TrainRectifiedFlow,
    seconds_of,
)
from rectified_flow.cli.training.recipe import (
    CHOSEN,
    budget_of,
    check_length,
    for_pictures,
    with_recipe,
)
from rectified_flow.data.store import OriginalInfo
from rectified_flow.errors import UsageError
from rectified_flow.flags import flag_types, parse, recorded
from rectified_flow.runs import checkpoint
from rectified_flow.runs.config import TrainingConfig
from tests.programs import planned

FAST, SLOW = 1e6, 2e4
"""Images per second of a network of width 1 on two machines; the time of a step grows with the square of the width."""


def chosen(
    count: int,
    words: str = "",
    folder: str = "pictures",
    kind: type[TrainConfig] = TrainRectifiedFlow,
    rate: float = SLOW,
) -> dict[str, object]:
    """All flags of a run on so many pictures."""
    data = f"--dataset_path {folder} " if folder else "--dataset synthetic-flowers "
    config = parse(kind, "Train.", (data + words).split())
    check_length(config)
    config = with_recipe(config, count)
    return recorded(planned(config, count, lambda config: rate / config.network.dim**2))


@pytest.mark.parametrize("kind", [TrainRectifiedFlow, TrainMeanFlow])
def test_fewer_pictures_get_more_help(kind: type[TrainConfig]) -> None:
    few, some, more, many = (chosen(count, "--train_num_steps 9", kind=kind) for count in (100, 200, 2000, 40_000))
    assert few["augment"] == some["augment"] == more["augment"] == 0.15
    assert many["augment"] == 0
    assert [chosen(count, "--budget 12m", kind=kind)["augment"] for count in (100, 2000)] == [0.15, 0], "few passes"
    assert (few["holdout"], some["holdout"], more["holdout"], many["holdout"]) == (0, 0.15, 0.05, 0.01)
    for count in range(1, 30_000, 7):
        flags = for_pictures(count)
        assert flags.keys() <= set(flag_types(kind))
        assert count < 125 or flags["holdout"] * count >= 30, "fewer might be too few by chance, and refused"


@pytest.mark.parametrize(
    ("largest", "words", "side"),
    [
        *(((28, 28), "", 32), ((300, 20), "", 24), ((8, 8), "", 8), ((64, 64), "", 64), ((300, 65), "", 64)),
        *(((20, 20), "--dim_mults 1 1 1 1 1", 32), ((28, 28), "--image_size 64", 64)),
        *(((60, 20), "--crop none", 64), ((30, 20), "--crop none", 32), ((30, 20), "--crop center", 24)),
        *(((28, 28), "--autoencoder haar", 64), ((28, 28), "--aspect_ratio 3:2", 64)),
    ],
)
def test_small_pictures_are_not_enlarged(largest: tuple[int, int], words: str, side: int) -> None:
    """The side is a multiple of 8 that the levels can halve, unless a flag sets it."""
    originals = OriginalInfo(width=[4, largest[0]], height=[4, largest[1]], enlarged=0, duplicates=0)
    config = parse(TrainRectifiedFlow, "Train.", f"--dataset_path pictures {words}".split())
    assert with_recipe(config, 2000, originals).data.image_size == side


def test_a_config_built_in_python_is_trained_as_it_is() -> None:
    data, run = DataConfig(dataset_path=Path("pictures")), TrainingConfig(train_num_steps=7, learning_rate=1e-3)

    def trained(program: RectifiedFlowProgramConfig) -> TrainConfig:
        config = TrainRectifiedFlow(data, run=run, program=program)
        check_length(config)
        return planned(with_recipe(config, 2000), 2000, lambda config: 1e3)

    assert trained(RectifiedFlowProgramConfig()) == TrainRectifiedFlow(data, run=run)
    with pytest.raises(UsageError, match="--train_num_steps"):
        trained(RectifiedFlowProgramConfig(budget="1h"))
    run = TrainingConfig(learning_rate=1e-3)
    chosen = trained(RectifiedFlowProgramConfig(budget="1h")).run
    assert (chosen.learning_rate, chosen.optimizer) == (1e-3, "adamw"), "one group of flags"
    assert chosen.lr_decay == "cosine"


def test_without_a_length_a_run_on_ones_own_pictures_takes_an_hour(capsys: pytest.CaptureFixture[str]) -> None:
    assert chosen(2000) == chosen(2000, "--budget 60m")
    assert "budget      1h (--budget changes it): 1 x cpu trains" in capsys.readouterr().out
    given = chosen(2000, "--train_num_steps 30")
    assert (given["train_num_steps"], given["dim"], given["optimizer"]) == (30, 64, "adamw")
    assert (chosen(2000, "--num_epochs 3")["num_epochs"], chosen(2000, folder="")["train_num_steps"]) == (3, None)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--budget 1m --train_num_steps 5", "--budget and --train_num_steps exclude each other: pass one"),
        ("--one_step --num_epochs 3", "--one_step and --num_epochs exclude each other: pass one"),
        ("--budget 1m --extend 5m", "--budget and --extend exclude each other: pass one"),
        ("--extend 5m --num_epochs 3", "--extend and --num_epochs exclude each other: pass one"),
        ("--budget 1h --resume runs/old", "--budget excludes --resume PATH, which keeps the length of that run: pass"),
        ("--budget 2s", "--budget 2s is too short: a step of 8 images takes 32.0 s on this machine"),
        *(
            (f"--budget {each}", f"--budget is {each}; it must be a time such as")
            for each in ("5", "0m", "1e9h", "m", "nanh")
        ),
    ],
)
def test_a_budget_that_makes_no_sense(words: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        chosen(2000, words, rate=256.0)


@pytest.mark.parametrize(
    ("budget", "half"), [("1h", "0.5h"), ("10s", "5s"), ("3m", "1.5m"), ("2000d", "1000d"), ("0.1s", "0.05s")]
)
def test_each_of_two_generators_has_half_of_the_time(budget: str, half: str) -> None:
    words = f"--dataset synthetic-flowers --one_step --budget {budget}"
    assert budget_of(parse(TrainRectifiedFlow, "", words.split())) == half
    assert 2 * seconds_of(half) == pytest.approx(seconds_of(budget))


def test_a_generator_in_one_step_has_a_budget_for_any_data() -> None:
    assert budget_of(parse(TrainRectifiedFlow, "", ["--one_step"])) == "0.5h"


def test_flags_override_it() -> None:
    flags = chosen(800, "--augment 0 --stop_when_memorising")
    assert (flags["augment"], flags["stop_when_memorising"], flags["holdout"]) == (0, True, 0.05)
    assert chosen(800, "--holdout 0.2")["holdout"] == 0.2
    assert chosen(800, "--autoencoder haar")["augment"] == 0
    given = chosen(800, "--dim 40 --batch_size 24 --learning_rate 1e-4 --ema_decay 0.5 --sample_every 7")
    assert (given["dim"], given["dim_mults"]) == (40, [1, 2, 3, 4]), "one's own network is left as it is"
    assert (given["batch_size"], given["global_batch_size"]) == (24, None)
    assert (given["optimizer"], given["learning_rate"]) == ("adamw", 1e-4)
    assert (given["ema_decay"], given["sample_every"]) == (0.5, 7)


def test_it_is_for_ones_own_pictures_alone() -> None:
    flags = chosen(100, folder="")
    assert (flags["augment"], flags["train_num_steps"]) == (DataConfig().augment, None)
    flags = chosen(100, "--budget 1h", folder="")
    assert flags["train_num_steps"] is not None, "a budget is for any data"


def test_a_run_goes_on_as_it_began(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one of a version that had no recipes, and one with values that this version does not take."""
    run = f"--output_dir {tmp_path}"
    began = chosen(800, run)
    assert "recipe      --holdout 0.05, for 800" in capsys.readouterr().out
    save(tmp_path, 1, began)
    assert chosen(20_000, run, rate=FAST) == began
    assert chosen(20_000, f"{run} --budget 3d", rate=FAST) == began
    assert "the settings recorded at the start of the run" in capsys.readouterr().out
    longer = chosen(800, f"{run} --train_num_steps 20000")
    assert longer == began | {"train_num_steps": 20_000}
    assert chosen(800, f"{run} --learning_rate 1e-4") == began | {"learning_rate": 1e-4}, "and keeps the optimizer"
    save(tmp_path, 2, longer | {"log_with": "removed"})
    assert chosen(800, run) == longer, "it is extended once"
    save(tmp_path, 3, began | {"global_batch_size": 63})
    extended = chosen(800, f"{run} --num_epochs 2000")
    assert extended["global_batch_size"] == 63, "the batch stays"
    monkeypatch.setattr(PartialState(), "num_processes", 2)
    assert chosen(800, run)["global_batch_size"] == 62, "and is one that two processes can share"
    monkeypatch.undo()
    earlier = {name: value for name, value in began.items() if name not in CHOSEN}
    save(tmp_path, 4, earlier)
    capsys.readouterr()
    flags = chosen(800, run)
    assert (flags["augment"], flags["holdout"], flags["num_epochs"], flags["dim"]) == (0, 0, None, 64)


def test_a_run_that_resumes_another_goes_on_as_that_one_began(tmp_path: Path) -> None:
    began = chosen(800, "--augment 0 --train_num_steps 70")
    save(tmp_path, 60, began)
    flags = chosen(900, f"--resume {tmp_path} --output_dir {tmp_path / 'other'}")
    assert {name: flags[name] for name in CHOSEN if name in flags} == {
        name: began[name] for name in CHOSEN if name in began
    }
    missing = chosen(900, f"--resume {tmp_path / 'none'} --output_dir {tmp_path / 'other'}")
    assert missing["holdout"] == 0.05, "the run itself says that there is none"


def save(run: Path, step: int, flags: dict[str, object]) -> None:
    """A checkpoint of a run with these flags."""
    checkpoint.save(run / "checkpoints", step, {}, {checkpoint.CONFIG_FILE: {"run": {}, "flags": flags}})
