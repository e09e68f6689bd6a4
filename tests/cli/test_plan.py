"""The plan chooses settings that fit the time budget on this machine."""

from pathlib import Path

import pytest
from accelerate import PartialState

from rectified_flow.cli.flags.training import TrainConfig, TrainMeanFlow, TrainRectifiedFlow, seconds_of
from rectified_flow.cli.training.plan import expected_distances
from rectified_flow.cli.training.recipe import with_recipe
from rectified_flow.cli.training.sizes import SIZES, STARTER_DIM, flags_of
from rectified_flow.errors import UsageError
from rectified_flow.flags import parse
from tests.cli.test_recipe import FAST, SLOW, chosen, save
from tests.programs import planned


def test_a_longer_time_buys_a_wider_network_and_more_steps() -> None:
    widths, images = [], []
    for budget in ("2m", "12m", "1h", "4h", "1d"):
        flags = chosen(2000, f"--budget {budget}", rate=SLOW)
        widths.append(int(str(flags["dim"])))
        images.append(int(str(flags["train_num_steps"])) * int(str(flags["global_batch_size"])))
        assert images[-1] == pytest.approx(0.9 * seconds_of(budget) * SLOW / widths[-1] ** 2, rel=0.02)
    assert widths == sorted(widths)
    assert widths[0] < widths[-1]
    assert images == sorted(images)
    for words, smallest in (("", STARTER_DIM), ("--alpha", min(SIZES))):
        slow, fast = (chosen(2000, f"--budget 12m {words}", rate=rate) for rate in (500.0, FAST * 1e6))
        assert (slow["dim"], fast["dim"]) == (smallest, max(SIZES))
        assert (slow["init_from"], fast["init_from"]) == (None if words else "starter", None)


@pytest.mark.parametrize(
    ("gain", "words", "precision"), [(1.3, "", "bf16"), (1.05, "", "no"), (1.3, "--mixed_precision no", "no")]
)
def test_bf16_is_chosen_where_it_is_faster(gain: float, words: str, precision: str) -> None:
    config = with_recipe(parse(TrainRectifiedFlow, "", f"--dataset_path pictures --budget 1h {words}".split()), 2000)
    rates = {None: 10.0, "no": 10.0, "bf16": 10.0 * gain}
    fastest = planned(config, 2000, lambda config: rates[config.run.mixed_precision])
    assert fastest.run.mixed_precision == precision


@pytest.mark.parametrize(
    ("kind", "words", "precision", "batch"),
    [
        (TrainMeanFlow, "--teacher run", "bf16", 16),
        (TrainMeanFlow, "", None, 8),
        (TrainRectifiedFlow, "--reflow_from run", "bf16", 8),
    ],
)
def test_paths_are_learned_in_bf16_and_larger_batches(
    kind: type[TrainConfig], words: str, precision: str | None, batch: int
) -> None:
    """Mean flow on pictures stays in float32."""
    config = with_recipe(parse(kind, "", f"--dataset_path pictures --budget 2m {words}".split()), 2000)
    run = planned(config, 2000, lambda config: 13.0 if config.run.mixed_precision == "bf16" else 10.0).run
    assert (run.mixed_precision, run.global_batch_size) == (precision, batch)


def test_a_larger_batch_that_is_faster_buys_more_images() -> None:
    config = with_recipe(
        parse(TrainRectifiedFlow, "", ["--dataset_path", "pictures", "--budget", "1h", "--dim", "32"]), 20_000
    )
    run = planned(config, 20_000, lambda config: 60.0 if config.run.global_batch_size == 8 else 90.0).run
    assert run.train_num_steps == int(0.9 * 3600 * 90) // run.split_batch(1).total


def test_times_are_stratified_unless_a_flag_sets_the_flow_or_its_times() -> None:
    assert chosen(2000)["time_options"] == ["stratified=True"]
    for words in ("--time_distribution uniform", "--time_options shift=2.0", "--flow Guest"):
        assert "stratified=True" not in str(chosen(2000, words)["time_options"])
    assert chosen(2000, kind=TrainMeanFlow)["time_options"] == []


def test_the_distances_of_measured_runs_are_interpolated() -> None:
    assert expected_distances(25_904, (32, 32)).endswith("34 on drawn flowers and 93 on emoji")
    between = int((25_848 * 102_688) ** 0.5)
    assert f"{(34.3 * 10.8) ** 0.5:.0f} on drawn flowers" in expected_distances(between, (32, 32)), "a power law"
    assert expected_distances(115_000, (32, 32)).endswith("75 on emoji"), "no flowers were measured"
    assert expected_distances(1_000, (32, 32)) == expected_distances(25_904, (64, 32)) == ""


def test_only_a_run_like_the_measured_ones_has_an_expected_distance(capsys: pytest.CaptureFixture[str]) -> None:
    chosen(2000, "--budget 12m --image_size 32", rate=40.0 * 32**2)
    assert "compare     measured runs" in capsys.readouterr().out
    chosen(2000, "--budget 12m --image_size 32 --optimizer adamw", rate=40.0 * 32**2)
    assert "compare" not in capsys.readouterr().out


def test_few_pictures_are_not_memorised_in_a_long_time(capsys: pytest.CaptureFixture[str]) -> None:
    for words, passes in (("", 1000), ("--augment 0", 400), ("--autoencoder haar", 400)):
        flags = chosen(800, f"--budget 4d {words}", rate=FAST)
        seen = int(str(flags["train_num_steps"])) * int(str(flags["global_batch_size"]))
        assert seen == pytest.approx(passes * 800, rel=0.01)
        assert f"at most {passes:,} passes" in capsys.readouterr().out
    flags = chosen(10, "--budget 4d", rate=FAST)
    assert int(str(flags["train_num_steps"])) * int(str(flags["global_batch_size"])) == pytest.approx(192_000, rel=0.01)


def test_any_number_of_processes_divides_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    for processes in (1, 2, 3, 8):
        monkeypatch.setattr(PartialState(), "num_processes", processes)
        monkeypatch.setattr("rectified_flow.cli.training.plan.gather_object", lambda rates: rates * 3)
        flags = chosen(5000, "--budget 1h", rate=FAST)
        assert int(str(flags["global_batch_size"])) % processes == 0


def test_previews_take_a_small_share(capsys: pytest.CaptureFixture[str]) -> None:
    """16 calls of 0.35 of a training image each; the first preview comes within two minutes if the share allows."""
    for rate, budget in ((SLOW, "12m"), (SLOW, "1d"), (FAST, "1h"), (100.0, "1h")):
        flags = chosen(5000, f"--budget {budget}", rate=rate)
        speed = rate / int(str(flags["dim"])) ** 2
        interval = int(str(flags["sample_every"])) * int(str(flags["global_batch_size"])) / speed
        cost = int(str(flags["num_samples"])) * 16 * 0.35 / speed
        assert cost <= 0.051 * interval
        assert int(str(flags["save_every"])) <= 0.13 * int(str(flags["train_num_steps"])), "no early checkpoint"
        assert interval < 1.02 * max(120, cost / 0.05)


@pytest.mark.parametrize(
    ("sides", "mults", "attention"),
    [
        ((8, 8), [1], 8),
        ((32, 32), [1, 2, 3], 8),
        ((64, 96), [1, 1, 2, 3], 8),
        ((36, 36), [1, 2, 3], 9),
        ((30, 30), [1, 2], 15),
    ],
)
def test_the_levels_fit_the_sides(sides: tuple[int, int], mults: list[int], attention: int) -> None:
    flags = flags_of(16, sides)
    assert (list(flags["dim_mults"]), flags["network_options"][1]) == (mults, f"attention_sides=[{attention}]")


def test_a_step_that_does_not_fit_into_the_memory() -> None:
    with pytest.raises(UsageError, match="does not fit into the memory of the GPU: lower --image_size or --batch_size"):
        chosen(2000, rate=0.0)
    config = parse(TrainRectifiedFlow, "", ["--dataset_path", "pictures", "--budget", "1d"])
    run = planned(config, 2000, lambda config: FAST * ((config.run.global_batch_size or 0) <= 8)).run
    assert run.global_batch_size == 8, "a larger batch does not fit"


def test_a_finished_run_is_extended_by_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = f"--output_dir {tmp_path}"
    with pytest.raises(UsageError, match="--extend needs a run, and"):
        chosen(800, f"{run} --extend 30m")
    began = chosen(800, f"{run} --budget 1h")
    steps = int(str(began["train_num_steps"]))
    save(tmp_path, 10, began)
    assert chosen(800, f"{run} --extend 30m") == began
    assert f"the run is unfinished: training to its last step, {steps:,}, only" in capsys.readouterr().out
    save(tmp_path, steps, began)
    longer = int(str(chosen(800, f"{run} --extend 30m")["train_num_steps"]))
    assert longer == pytest.approx(1.5 * steps, rel=0.01)
    save(tmp_path, steps + 5, began | {"train_num_steps": longer})
    assert chosen(800, f"{run} --extend 30m")["train_num_steps"] == longer, "killed on the way, it is extended once"
