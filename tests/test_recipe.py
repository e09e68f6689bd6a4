"""Recipes: what suits the number of pictures is chosen where no flag says otherwise, and stays on resuming."""

from pathlib import Path

import pytest

from rectified_flow.cli.command_line import parse, recorded
from rectified_flow.cli.flags import TrainMeanFlow, TrainRectifiedFlow
from rectified_flow.cli.recipe import recipe_for, with_recipe
from rectified_flow.data.config import DataConfig
from rectified_flow.flags import names
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
    assert (few["train_num_steps"], some["train_num_steps"]) == (3000, 3000), "a network needs so many"
    assert more["train_num_steps"] == 1000 * 1900 // 64, "passes over those that are trained on"
    assert many["train_num_steps"] is None, "never longer than the default"
    for count in range(1, 20_000, 7):
        flags = recipe_for(count, 64)
        assert flags.keys() <= set(names(kind))
        assert count < 125 or flags["holdout"] * count >= 30, "fewer might be too few by chance, and refused"


def test_fewer_passes_without_augmentation() -> None:
    whole = "--holdout 0"
    for flags in ("--augment 0", "--autoencoder haar"):
        assert chosen(800, f"{flags} {whole}")["train_num_steps"] == 400 * 800 // 64
    assert chosen(800, f"--augment 0.4 {whole}")["train_num_steps"] == chosen(800, whole)["train_num_steps"] == 12_500
    assert (chosen(12_800, whole)["train_num_steps"], chosen(16_000, whole)["train_num_steps"]) == (80_000, None)


def test_the_passes_do_not_depend_on_the_batch() -> None:
    assert chosen(800, "--holdout 0 --batch_size 16")["train_num_steps"] == 4 * 12_500
    assert chosen(800, "--holdout 0 --global_batch_size 256")["train_num_steps"] == 12_500 // 4


def test_flags_override_it() -> None:
    flags = chosen(800, "--augment 0 --stop_when_memorising")
    assert (flags["augment"], flags["stop_when_memorising"], flags["holdout"]) == (0, True, 0.05)
    assert chosen(800, "--holdout 0.2")["holdout"] == 0.2
    assert chosen(100, "--num_epochs 3")["train_num_steps"] is None
    assert chosen(800, "--autoencoder haar")["augment"] == 0


def test_it_is_for_ones_own_pictures_alone(tmp_path: Path) -> None:
    assert chosen(100, folder="")["augment"] == DataConfig().augment
    assert chosen(100, f"--reflow_from {tmp_path}")["augment"] == DataConfig().augment


def test_a_run_goes_on_as_it_began(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also one of a version that had no recipes, and one whose folder has more pictures now."""
    run = f"--output_dir {tmp_path}"
    began = chosen(800, run)
    assert "recipe      --augment 0.15 --holdout 0.05 --train_num_steps 11875, for 800" in capsys.readouterr().out
    document = {"run": {}, "flags": began}
    checkpoint.save(tmp_path / "checkpoints", 1, {}, {checkpoint.CONFIG_FILE: document})
    assert chosen(900, run) == began
    assert chosen(20_000, run) == began
    assert chosen(900, f"{run} --train_num_steps 20000")["train_num_steps"] == 20_000
    earlier = {name: value for name, value in began.items() if name not in ("augment", "holdout")}
    checkpoint.save(tmp_path / "checkpoints", 2, {}, {checkpoint.CONFIG_FILE: document | {"flags": earlier}})
    flags = chosen(800, run)
    assert (flags["augment"], flags["holdout"]) == (0, 0)
    assert "recipe" not in capsys.readouterr().out
