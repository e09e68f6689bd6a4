"""Runs on columns: the same on 1 and 2 processes, resumed, distilled, sampled; and bad input."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rectified_flow.cli.sample_request import cells_of
from rectified_flow.load import load_flow
from rectified_flow.runs.folder import read_config
from tests import programs
from tests.programs import program
from tests.ranks import run_on_ranks
from tests.text.tiny_encoder import write_encoder
from tests.training.runs import losses

COUNT = 40
TINY = (
    "--image_size 8 --dim 8 --dim_mults 1 --global_batch_size 8 --augment 0 --holdout 0.5 --train_num_steps 8"
    " --save_every 4 --log_every 1 --num_samples 4 --sample_steps 2 --evaluate_every 0"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder ``pictures`` with columns, and a text encoder."""
    folder = tmp_path_factory.mktemp("columns")
    (folder / "pictures").mkdir()
    rows = ["file_name,text,size,parity"]
    for seed in range(COUNT):
        values = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(values).save(folder / f"pictures/{seed:02}.png")
        rows.append(
            f"{seed:02}.png,a {'red' if seed % 3 else 'blue'} heart,{seed},{'even' if seed % 2 == 0 else 'odd'}"
        )
    (folder / "pictures/metadata.csv").write_text("\n".join(rows))
    write_encoder(folder / "encoder")
    return folder


def flags_of(folder: Path, output_dir: Path) -> list[str]:
    encoder = f"--text_encoder {folder}/encoder --text_tokens 4 --condition_types text=caption"
    pictures = f"--dataset_path {folder}/pictures --cache_dir {folder}/cache"
    return f"{pictures} --condition_on all {encoder} {TINY} --output_dir {output_dir}".split()


def train(folder: Path, output_dir: Path) -> None:
    from rectified_flow.cli.config import TrainConfig
    from rectified_flow.cli.train import train
    from rectified_flow.flags import parse

    assert train(parse(TrainConfig, "", flags_of(folder, output_dir)))


@pytest.fixture(scope="module")
def runs(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Straight to step 8 on two processes, resumed from step 4 there, and on one process."""
    runs = tmp_path_factory.mktemp("runs")
    run_on_ranks(2, train, folder, runs / "two")
    shutil.copytree(runs / "two", runs / "resumed")
    shutil.rmtree(runs / "resumed/checkpoints/step_00000008")
    run_on_ranks(2, train, folder, runs / "resumed")
    run_on_ranks(1, train, folder, runs / "one")
    return runs


def test_the_same_run_on_one_process_and_on_two(runs: Path) -> None:
    assert losses(runs / "one") == pytest.approx(losses(runs / "two"), rel=1e-3)
    assert len(set(losses(runs / "one").values())) == 8
    items = [read_config(runs / run / "config.json")["items"] for run in ("one", "two", "resumed")]
    measured = json.loads((runs / "one/heldout.jsonl").read_text().splitlines()[0])["losses"]
    assert items[0] == items[1] == items[2]
    assert (len(measured), sum(items[0].values()) <= COUNT) == (min(items[0]["training"], items[0]["held_out"]), True)


def test_a_resumed_run_is_the_same_to_the_byte(runs: Path) -> None:
    for name in ("model.safetensors", "ema.safetensors", "optimizer.safetensors"):
        straight, resumed = (runs / run / "checkpoints/step_00000008" / name for run in ("two", "resumed"))
        assert straight.read_bytes() == resumed.read_bytes(), name


def test_the_network_has_learned_from_every_column(runs: Path) -> None:
    flow = load_flow(runs / "one")
    assert list(flow.conditions) == ["text", "size", "parity"]
    weights = flow.network.state_dict()
    for name in ("text_embedding.outer.weight", "text_sequence.linear.weight", "size_embedding.linear.weight"):
        assert weights[name].std() > 0


def test_the_preview_has_the_held_out_captions_below(runs: Path) -> None:
    grid = Image.open(runs / "one/samples/step_00000008.png")
    assert grid.size == (2 * (112 + 2) + 2, 2 * (112 + 42 + 2) + 2)
    strip = np.asarray(grid)[114:156, 2:114]
    assert (strip < 100).any(), "black letters"
    assert (strip > 250).mean() > 0.5


def sample(flags: list[str]) -> None:
    from rectified_flow.cli.flags.sampling import SampleConfig
    from rectified_flow.cli.sample import sample as draw_samples
    from rectified_flow.flags import parse

    draw_samples(parse(SampleConfig, "", flags))


def test_prompts_are_the_names_of_their_pictures(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a red heart\n\na blue star\na red heart\n")
    flags = f"--checkpoint {runs}/one --steps 2 --prompts {tmp_path}/prompts.txt --set size=3 --set parity=odd"
    for world_size in (1, 2):
        run_on_ranks(world_size, sample, [*flags.split(), "--output_dir", str(tmp_path / str(world_size))])
    names = ["00000-a-red-heart.png", "00001-a-blue-star.png", "00002-a-red-heart.png", "grid.png"]
    for world_size in (1, 2):
        assert sorted(file.name for file in (tmp_path / str(world_size)).glob("*.png")) == names
    for name in names[:3]:
        one, two = (np.asarray(Image.open(tmp_path / f"{n}/{name}")).astype(int) for n in (1, 2))
        assert np.abs(one - two).max() <= 1


def test_cells_of_a_grid_differ_in_its_axes_alone(runs: Path, tmp_path: Path) -> None:
    """Rows of the grid over a number and seeds: column 0 has the draws of sample 0, whatever the number."""
    common = [*f"--checkpoint {runs}/one --steps 2 --prompt".split(), "a red heart"]
    sample([*common, *f"--grid size=1,30 seed=2 --output_dir {tmp_path}/grid".split()])
    sample([*common, *f"--num_samples 2 --set size=30 --output_dir {tmp_path}/alone".split()])
    cells = [np.asarray(Image.open(tmp_path / f"grid/{number:05}.png")).astype(int) for number in range(4)]
    alone = [np.asarray(Image.open(tmp_path / f"alone/{number:05}.png")).astype(int) for number in range(2)]
    assert np.abs(cells[2] - alone[0]).max() <= 1
    assert np.abs(cells[3] - alone[1]).max() <= 1
    assert Image.open(tmp_path / "grid/grid.png").size == (2 * (112 + 2) + 2, 2 * (112 + 42 + 2) + 2)


def test_the_cells_of_a_grid_row_by_row() -> None:
    rows, columns = {"size": ["1", "30"]}, {"seed": ["0", "1", "2"]}
    cells, draws = cells_of(rows | columns, {"text": ["a"]})
    assert cells == {"text": ["a"] * 6, "size": ["1"] * 3 + ["30"] * 3}
    assert draws == [0, 1, 2, 0, 1, 2]
    cells, draws = cells_of({"text": ["a", "b"]} | rows, {})
    assert cells == {"text": ["a", "a", "b", "b"], "size": ["1", "30", "1", "30"]}
    assert draws == [0] * 4


def test_guidance_of_one_condition(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"--checkpoint {runs}/one --steps 2 --num_samples 1 --set size=3 --set parity=odd --output_dir {tmp_path}"
    sample([*flags.split(), "--guidance", "size=3", "parity=2"])
    assert "6 of the network for each picture" in capsys.readouterr().out, "three times as many as without"


def test_a_map_of_one_call_takes_every_condition(runs: Path, tmp_path: Path) -> None:
    flags = f"--teacher {runs}/one --teacher_samples 16 --teacher_steps 2 --guidance_scale 2 --global_batch_size 8"
    more = f"--train_num_steps 3 --num_samples 2 --output_dir {tmp_path}/map"
    [(code, errors)] = run_on_ranks(1, program, "train_mean_flow.py", [*flags.split(), *more.split()])
    assert code == 0, errors
    assert list(load_flow(tmp_path / "map").conditions) == ["text", "size", "parity"]
    assert [*tmp_path.rglob("text.float16")], "captions are stored in half precision"
    sample(
        [*f"--checkpoint {tmp_path}/map --num_samples 2 --output_dir {tmp_path}/made --prompt".split(), "a red heart"]
    )


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--set colour=3", "--set colour=3: "),
        ("--set parity=off", "parity: off does not exist"),
        ("--set size=large", "size: large is not a number"),
        ("--guidance colour=3", "--guidance colour: "),
        ("--guidance size=x", "must be NAME=SCALE"),
        ("--grid colour seed", "--grid colour: "),
        ("--grid size seed=0", "--grid seed=0 must be seed=COUNT"),
        ("--prompts nowhere.txt", "--prompts nowhere.txt cannot be read"),
        ("--prompt a --prompts b", "--prompts and --prompt exclude each other"),
        ("--grid size parity --num_samples 3", "--grid and --num_samples exclude each other"),
        ("--grid size=1,2 size=3", "--grid size has one axis twice"),
        ("--grid size parity --set size=3", "--grid size parity has one axis twice, or one that another flag sets"),
        ("--grid parity seed --set size=3,4", "--grid needs a single value of size"),
        ("--set size=3 --set size=4", "--set size=4 is the second value of size"),
        ("--set size=1e400", "1e400 is not a number"),
    ],
)
def test_bad_values_are_named(runs: Path, tmp_path: Path, flags: str, sentence: str) -> None:
    programs.assert_refused("sample.py", 1, f"--checkpoint {runs}/one --output_dir {tmp_path} {flags}", sentence)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--condition_types text=label", "--condition_types needs --condition_on: pass both"),
        ("--condition_on text --text_tokens 4", "--text_tokens needs --text_encoder"),
        ("--condition_on text --condition_types text", "--condition_types text must be COLUMN=caption"),
        ("--condition_on size --coupling ot", "--coupling ot pairs only rows with equal conditions, and size differs"),
    ],
)
def test_flags_that_do_not_go_together(folder: Path, tmp_path: Path, flags: str, sentence: str) -> None:
    start = f"--dataset_path {folder}/pictures --output_dir {tmp_path}"
    programs.assert_refused("train_oxford.py", 1, f"{start} {flags}", sentence)
