"""Recipes: what suits the number of pictures is chosen where no flag says otherwise, and stays on resuming."""

from itertools import pairwise
from pathlib import Path

import pytest
from accelerate import PartialState

from rectified_flow.cli.recipe import CHOSEN, recipe_for, taught_recipe, with_recipe
from rectified_flow.cli.train_flags import DataConfig, TrainMeanFlow, TrainRectifiedFlow
from rectified_flow.flags import flag_types, parse, recorded
from rectified_flow.runs import checkpoint


def chosen(count: int, words: str = "", folder: str = "pictures", kind: type = TrainRectifiedFlow) -> dict[str, object]:
    """All flags of a run on so many pictures."""
    data = f"--dataset_path {folder} " if folder else "--dataset synthetic-flowers "
    return recorded(with_recipe(parse(kind, "Train.", (data + words).split()), count))


@pytest.mark.parametrize("kind", [TrainRectifiedFlow, TrainMeanFlow])
def test_fewer_pictures_get_more_help(kind: type) -> None:
    few, some, more, many = (chosen(count, kind=kind) for count in (100, 200, 2000, 40_000))
    assert few["augment"] == some["augment"] == more["augment"] == 0.15
    assert many["augment"] == 0
    assert (few["holdout"], some["holdout"], more["holdout"], many["holdout"]) == (0, 0.15, 0.05, 0.01)
    assert (more["num_epochs"], many["num_epochs"]) == (1000, 162), "never longer than the default"
    for count in range(1, 30_000, 7):
        flags = recipe_for(count)
        assert flags.keys() <= set(flag_types(kind))
        assert count < 125 or flags["holdout"] * count >= 30, "fewer might be too few by chance, and refused"


def test_the_length_never_shrinks_with_the_number_of_pictures() -> None:
    lengths = []
    for count in range(1, 30_000, 7):
        flags = recipe_for(count)
        lengths.append(flags["num_epochs"] * count * (1 - flags.get("holdout", 0)))
    assert lengths[0] == 192_000, "a network needs so many"
    assert all(now > 0.99 * before for before, now in pairwise(lengths)), "up to the share that is held out"
    assert max(lengths) == pytest.approx(6_400_000, rel=3e-3)
    assert recipe_for(10_000_000)["num_epochs"] == 1


def test_the_length_is_in_pictures_whatever_the_batch() -> None:
    for count in (500, 8000, 20_000):
        assert chosen(count, "--global_batch_size 512")["num_epochs"] == chosen(count)["num_epochs"] is not None


def test_a_run_on_several_processes_has_steps_enough() -> None:
    """The batch is smaller where the default one would leave too few steps, and any number of processes divides it."""
    assert "global_batch_size" not in recipe_for(10)
    for count, processes, batch in ((50, 8, 64), (50, 3, 63), (500, 8, 152), (1000, 2, None), (5000, 8, None)):
        flags = recipe_for(count, processes)
        assert flags.get("global_batch_size") == batch
        images = flags["num_epochs"] * count * (1 - flags.get("holdout", 0))
        assert images / flags.get("global_batch_size", 64 * processes) > 2990
    assert taught_recipe(5000, 100, 8) == {"num_epochs": 1920, "global_batch_size": 64}
    assert taught_recipe(1_000_000, 5000) == {"num_epochs": 200}
    assert taught_recipe(10**9, 50_000, 8) == {"num_epochs": 128}


def test_fewer_passes_without_augmentation() -> None:
    for flags in ("--augment 0", "--autoencoder haar"):
        assert chosen(800, flags)["num_epochs"] == 400
    assert chosen(800, "--augment 0.4")["num_epochs"] == 1000
    assert chosen(100, "--augment 0")["num_epochs"] == 1920, "as many images as fewer pictures need"


def test_flags_override_it() -> None:
    flags = chosen(800, "--augment 0 --stop_when_memorising")
    assert (flags["augment"], flags["stop_when_memorising"], flags["holdout"]) == (0, True, 0.05)
    assert chosen(800, "--holdout 0.2")["holdout"] == 0.2
    for given in ("--num_epochs 3", "--train_num_steps 50"):
        flags = chosen(800, given)
        assert (flags["num_epochs"], flags["train_num_steps"]) in ((3, None), (None, 50))
    assert chosen(800, "--autoencoder haar")["augment"] == 0


def test_it_is_for_ones_own_pictures_alone(tmp_path: Path) -> None:
    flags = chosen(100, folder="")
    assert (flags["augment"], flags["num_epochs"]) == (DataConfig().augment, None)
    assert chosen(100, f"--reflow_from {tmp_path}")["augment"] == 0


def test_a_run_goes_on_as_it_began(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one of a version that had no recipes, and one with values that this version does not take."""
    run = f"--output_dir {tmp_path}"
    began = chosen(800, run)
    assert "recipe      --augment 0.15 --holdout 0.05 --num_epochs 1000, for 800" in capsys.readouterr().out
    save(tmp_path, 1, began)
    assert chosen(20_000, run) == began
    assert "--augment 0.15 --holdout 0.05 --num_epochs 1000, from the start of the run" in capsys.readouterr().out
    longer = chosen(800, f"{run} --train_num_steps 20000")
    assert longer == began | {"train_num_steps": 20_000, "num_epochs": None}
    save(tmp_path, 2, longer | {"lr_decay": "removed"})
    assert chosen(800, run) == longer, "it is extended once"
    save(tmp_path, 3, began | {"global_batch_size": 63})
    extended = chosen(800, f"{run} --num_epochs 2000")
    assert extended["global_batch_size"] == 63, "the batch stays"
    monkeypatch.setattr(PartialState(), "num_processes", 2)
    assert chosen(800, run)["global_batch_size"] == 62, "and is one that two processes can share"
    monkeypatch.undo()
    earlier = {name: value for name, value in began.items() if name not in ("augment", "holdout", "num_epochs")}
    save(tmp_path, 4, earlier)
    capsys.readouterr()
    flags = chosen(800, run)
    assert (flags["augment"], flags["holdout"], flags["num_epochs"]) == (0, 0, None)
    assert "recipe" not in capsys.readouterr().out


def test_a_run_that_resumes_another_goes_on_as_that_one_began(tmp_path: Path) -> None:
    began = chosen(800, "--augment 0 --train_num_steps 70")
    save(tmp_path, 60, began)
    flags = chosen(900, f"--resume {tmp_path} --output_dir {tmp_path / 'other'}")
    assert {name: flags[name] for name in CHOSEN} == {name: began[name] for name in CHOSEN}
    missing = chosen(900, f"--resume {tmp_path / 'none'} --output_dir {tmp_path / 'other'}")
    assert missing["augment"] == 0.15, "the run itself says that there is none"


def save(run: Path, step: int, flags: dict[str, object]) -> None:
    """A checkpoint of a run with these flags."""
    checkpoint.save(run / "checkpoints", step, {}, {checkpoint.CONFIG_FILE: {"run": {}, "flags": flags}})
