"""Runs from pictures to pictures: the same on 1 and 2 processes, resumed, distilled, sampled, judged; and bad input."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rectified_flow.cli.data import add_source, open_pictures
from rectified_flow.data.config import DataConfig, SourceConfig
from rectified_flow.load import load_flow
from tests import programs
from tests.programs import program
from tests.ranks import run_on_ranks

COUNT, SIDE = 16, 8
TINY = (
    "--image_size 8 --dim 8 --dim_mults 1 --global_batch_size 8 --augment 0 --holdout 0 --train_num_steps 8"
    " --save_every 4 --log_every 1 --num_samples 4 --sample_steps 2"
)
KINDS = {
    "paired": "--paired --source_noise 0.1",
    "unpaired": "--coupling ot",
    "mask": "--degrade mask:box",
    "latents": "--paired --skip_unpaired --source_as condition --autoencoder haar",
}
"""Flags of the runs; those of a degradation have no folder to start from."""


def draw(seed: int, *, inverted: bool = False) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    return Image.fromarray(255 - values if inverted else values)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders ``from`` and ``to``: a picture of one is that of the same name of the other with inverted colours."""
    folder = tmp_path_factory.mktemp("pictures")
    for name in ("from", "to"):
        (folder / name).mkdir()
        for seed in range(COUNT):
            draw(seed, inverted=name == "to").save(folder / name / f"{seed:02}.png")
    return folder


def flags_of(kind: str, folders: Path, output_dir: Path) -> list[str]:
    source = "" if "--degrade" in KINDS[kind] else f"--source_path {folders}/from"
    return f"--dataset_path {folders}/to {source} {KINDS[kind]} {TINY} --output_dir {output_dir}".split()


def train(kind: str, folders: Path, output_dir: Path) -> None:
    """Train on this rank; the program must not end well on several ranks, so the function that it calls does."""
    from rectified_flow.cli.config import TrainConfig
    from rectified_flow.cli.train import train
    from rectified_flow.flags import parse

    assert train(parse(TrainConfig, "", flags_of(kind, folders, output_dir)))


@pytest.fixture(scope="module", params=KINDS)
def runs(request: pytest.FixtureRequest, folders: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A kind and its runs: straight to step 8 on two processes, resumed from step 4 there, and on one process."""
    folder = tmp_path_factory.mktemp(request.param)
    run_on_ranks(2, train, request.param, folders, folder / "two")
    shutil.copytree(folder / "two", folder / "resumed")
    shutil.rmtree(folder / "resumed/checkpoints/step_00000008")
    run_on_ranks(2, train, request.param, folders, folder / "resumed")
    run_on_ranks(1, train, request.param, folders, folder / "one")
    return request.param, folder


def losses(run: Path) -> list[float]:
    return [json.loads(row)["loss"] for row in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_same_run_on_one_process_and_on_two(runs: tuple[str, Path]) -> None:
    _, folder = runs
    assert losses(folder / "one") == pytest.approx(losses(folder / "two"), rel=1e-3)
    assert len(set(losses(folder / "one"))) == 8


def test_a_resumed_run_is_the_same_to_the_byte(runs: tuple[str, Path]) -> None:
    _, folder = runs
    for name in ("model.safetensors", "ema.safetensors", "optimizer.safetensors"):
        straight, resumed = (folder / run / "checkpoints/step_00000008" / name for run in ("two", "resumed"))
        assert straight.read_bytes() == resumed.read_bytes(), name


def test_the_preview_shows_sources_beside_samples(runs: tuple[str, Path], folders: Path) -> None:
    kind, folder = runs
    grid = np.asarray(Image.open(folder / "one/samples/step_00000008.png"))
    assert grid.shape == (SIDE + 4, 8 * (SIDE + 2) + 2, 3), "four pairs in a row"
    shown = grid[2 : 2 + SIDE, 2 : 2 + SIDE].astype(int)
    source = np.asarray(Image.open(folders / "from/00.png")).astype(int)
    if kind in ("paired", "latents"):
        assert np.abs(shown - source.astype(int)).max() <= (kind == "latents")


@pytest.mark.parametrize(
    "runs",
    [pytest.param(kind, marks=() if kind in ("paired", "mask") else pytest.mark.slow) for kind in KINDS],
    indirect=True,
    scope="module",
)
def test_a_map_of_one_call_learns_from_it(runs: tuple[str, Path], folders: Path, tmp_path: Path) -> None:
    kind, folder = runs
    flags = f"--teacher {folder}/one --teacher_samples 16 --teacher_steps 2 --global_batch_size 8 --num_samples 4"
    more = f"--train_num_steps 3 --output_dir {tmp_path}/map"
    [(code, errors)] = run_on_ranks(1, program, "train_mean_flow.py", [*flags.split(), *more.split()])
    assert code == 0, errors
    flow = load_flow(tmp_path / "map")
    assert (flow.takes_source, flow.from_source) == (True, kind in ("paired", "unpaired"))
    there = f"--checkpoint {tmp_path}/map --from_images {folders}/from --num_samples 3 --output_dir {tmp_path}/made"
    [(code, errors)] = run_on_ranks(1, program, "sample.py", there.split())
    assert code == 0, errors
    back = [*there.split(), "--reverse"]
    programs.assert_refused("sample.py", 1, " ".join(back), "--reverse has no effect on ")


def test_results_have_the_names_of_their_sources(runs: tuple[str, Path], folders: Path, tmp_path: Path) -> None:
    kind, folder = runs
    flags = f"--checkpoint {folder}/one --from_images {folders}/from --num_samples 3 --steps 2 --output_dir {tmp_path}"
    if kind == "unpaired":
        programs.assert_refused("sample.py", 1, f"{flags} --variants 2", "--variants has no effect on ")
        return
    [(code, errors)] = run_on_ranks(1, program, "sample.py", [*flags.split(), "--variants", "2"])
    assert code == 0, errors
    names = {file.name for file in tmp_path.glob("*.png")}
    assert names == {"grid.png", *(f"{seed:02}-{variant}.png" for seed in range(3) for variant in (1, 2))}
    grid = np.asarray(Image.open(tmp_path / "grid.png"))
    if kind == "paired":
        assert np.array_equal(grid[2 : 2 + SIDE, 2 : 2 + SIDE], np.asarray(Image.open(folders / "from/00.png")))
    first, second = (np.asarray(Image.open(tmp_path / f"00-{variant}.png")) for variant in (1, 2))
    assert not np.array_equal(first, second), "of the same source, with other noise"


def test_pictures_on_two_processes_are_those_of_one(runs: tuple[str, Path], folders: Path, tmp_path: Path) -> None:
    kind, folder = runs
    if kind != "paired":
        pytest.skip("sampling is the same for all kinds")
    flags = f"--checkpoint {folder}/one --from_images {folders}/from --num_samples 5 --steps 2".split()
    for world_size in (1, 2):
        run_on_ranks(world_size, sample, [*flags, "--output_dir", str(tmp_path / str(world_size))])
    for seed in range(5):
        one, two = (np.asarray(Image.open(tmp_path / f"{n}/{seed:02}.png")).astype(int) for n in (1, 2))
        assert np.abs(one - two).max() <= 1


def sample(flags: list[str]) -> None:
    from rectified_flow.cli.flags.sampling import SampleConfig
    from rectified_flow.cli.sample import sample as draw_samples
    from rectified_flow.flags import parse

    draw_samples(parse(SampleConfig, "", flags))


def test_it_is_judged_beside_its_source_and_a_training_picture(runs: tuple[str, Path], tmp_path: Path) -> None:
    kind, folder = runs
    if kind in ("mask", "latents"):
        pytest.skip("judged as pairs are")
    flags = f"--checkpoint {folder}/one --num_samples {2 * COUNT} --steps 1 --feature_network efficientnet_lite0"
    [(code, errors)] = run_on_ranks(1, program, "evaluate.py", [*flags.split(), "--output_dir", str(tmp_path)])
    assert code == 0, errors
    [result] = json.loads((tmp_path / "evaluation.json").read_text())
    scores = result["distances"]
    assert scores["copy_efficientnet_lite0_frechet_distance"] > 0
    if kind == "unpaired":
        assert 0 <= scores["structure_found"] <= 1
        assert "partner_distance" not in scores
    else:
        assert scores["neighbour_partner_distance"] >= 0
        assert scores["best_of_2_partner_distance"] < scores["partner_distance"], "with noise"


def test_the_way_back_leads_to_the_sources(runs: tuple[str, Path], folders: Path, tmp_path: Path) -> None:
    kind, folder = runs
    flags = f"--checkpoint {folder}/one --from_images {folders}/to --num_samples 2 --steps 2 --reverse"
    if kind in ("mask", "latents"):
        programs.assert_refused("sample.py", 1, flags, "--reverse has no effect on ")
        return
    [(code, errors)] = run_on_ranks(1, program, "sample.py", [*flags.split(), "--output_dir", str(tmp_path)])
    assert code == 0, errors
    assert (tmp_path / "01.png").exists()


def test_what_is_not_masked_stays_to_the_bit(runs: tuple[str, Path], folders: Path, tmp_path: Path) -> None:
    """Check a run that was trained on holes; the next test checks a run from noise."""
    kind, folder = runs
    keeps_the_rest(folder / "one", folders, tmp_path, refused=kind != "mask")


def test_a_run_from_noise_fills_a_part_of_pictures(folders: Path, tmp_path: Path) -> None:
    flags = f"--dataset_path {folders}/to {TINY} --num_samples 0 --output_dir {tmp_path}/run".split()
    [(code, errors)] = run_on_ranks(1, program, "train_oxford.py", flags)
    assert code == 0, errors
    keeps_the_rest(tmp_path / "run", folders, tmp_path, refused=False)


def keeps_the_rest(run: Path, folders: Path, tmp_path: Path, *, refused: bool) -> None:
    """Generate the right half of pictures with a run."""
    mask = np.zeros((SIDE, SIDE), dtype=np.uint8)
    mask[:, SIDE // 2 :] = 255
    Image.fromarray(mask).save(tmp_path / "mask.png")
    flags = f"--checkpoint {run} --from_images {folders}/to --mask {tmp_path}/mask.png --num_samples 2 --steps 2"
    flags += f" --variants 2 --output_dir {tmp_path}/made"
    if refused:
        programs.assert_refused("sample.py", 1, flags, "--mask has no effect")
        return
    [(code, errors)] = run_on_ranks(1, program, "sample.py", flags.split())
    assert code == 0, errors
    known = np.asarray(Image.open(folders / "to/01.png"))
    made = [np.asarray(Image.open(tmp_path / f"made/01-{variant}.png")) for variant in (1, 2)]
    for each in made:
        assert np.array_equal(each[:, : SIDE // 2], known[:, : SIDE // 2])
    assert not np.array_equal(made[0], made[1])
    Image.new("L", (SIDE, SIDE + 1), 255).save(tmp_path / "other.png")
    other = flags.replace("mask.png", "other.png").replace("/made", "/other")
    programs.assert_refused("sample.py", 1, other, f"8x{SIDE + 1} px", "pass a mask of the same size")


def test_unpaired_items_have_each_source_once_in_an_epoch(folders: Path) -> None:
    data = DataConfig(dataset_path=folders / "to", image_size=SIDE)
    pictures = add_source(open_pictures(data), data, SourceConfig(source_path=folders / "from"))
    assert pictures.varies
    epochs = [pictures.read_batch(range(COUNT * epoch, COUNT * (epoch + 1))) for epoch in (0, 1)]
    assert all(np.array_equal(epochs[0]["images"], epoch["images"]) for epoch in epochs)
    first, second = ([tuple(row.flatten().tolist()) for row in epoch["source"]] for epoch in epochs)
    assert first != second
    assert set(first) == set(second)
    assert len(set(first)) == COUNT
    paired = add_source(open_pictures(data), data, SourceConfig(source_path=folders / "from", paired=True))
    batch = paired.read_batch(range(COUNT, COUNT + 5))
    assert np.array_equal(batch["source"], 255 - batch["images"])
    assert len({pictures.fingerprint, paired.fingerprint, open_pictures(data).fingerprint}) == 3


def test_pictures_without_a_partner_are_named_and_left_out(folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / "from", tmp_path / "from")
    for name in ("03.png", "05.png"):
        (tmp_path / "from" / name).unlink()
    (tmp_path / "from/07.png").write_bytes(b"broken")
    (tmp_path / "from/more").mkdir()
    (tmp_path / "from/more/08.png").write_bytes(b"broken")
    draw(99).save(tmp_path / "from/extra.png")
    data = DataConfig(dataset_path=folders / "to", image_size=SIDE, skip_broken_images=True)
    flags = SourceConfig(source_path=tmp_path / "from", paired=True, skip_unpaired=True)
    pictures = add_source(open_pictures(data), data, flags)
    assert len(pictures) == COUNT - 3
    batch = pictures.read_batch(range(len(pictures)))
    assert np.array_equal(batch["source"], 255 - batch["images"])
    refused = f"--dataset_path {folders}/to --source_path {tmp_path}/from --paired --skip_broken_images {TINY}"
    programs.assert_refused("train_oxford.py", 1, refused, "4 pictures in", "no partner, such as 03", "--skip_unpaired")


def test_other_sources_are_another_run(runs: tuple[str, Path], folders: Path, tmp_path: Path) -> None:
    kind, folder = runs
    if kind not in ("paired", "unpaired"):
        pytest.skip("without a folder to start from")
    shutil.copytree(folders / "from", tmp_path / "from")
    draw(99).save(tmp_path / "from/00.png")
    flags = [str(tmp_path / "from") if word == f"{folders}/from" else word for word in flags_of(kind, folders, folder)]
    shutil.copytree(folder / "one", tmp_path / "run")
    flags = [*flags[:-1], str(tmp_path / "run"), "--train_num_steps", "9"]
    programs.assert_refused("train_oxford.py", 1, " ".join(flags), "was trained on other data")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--source_path {0}/nowhere", "--source_path {0}/nowhere is not a folder"),
        ("--source_path {0}/to", "--source_path {0}/to lies in --dataset_path {0}/to"),
        ("--source_path {0}/from --degrade grey", "--source_path and --degrade exclude each other"),
        ("--source_path {0}/from --output_dir {0}/from/run", "lies inside --source_path"),
        ("--source_path {0}/from --source_as condition --source_noise 0.2", "--source_noise has no effect"),
        ("--paired", "--paired needs --source_path"),
        ("--source_path {0}/from --skip_unpaired", "--skip_unpaired needs --paired"),
        ("--source_as start", "--source_as needs --source_path or --degrade"),
        ("--source_path {0}/from --paired --coupling ot", "--paired and --coupling exclude each other"),
        ("--source_path {0}/from --coupling immiscible", "coupling immiscible is for noise"),
        ("--source_path {0}/from --source_as condition --coupling ot", "coupling ot is for noise"),
        ("--degrade sepia", "--degrade sepia is not registered: choose Blur or"),
        ("--degrade downsample:3", "--degrade downsample:3 does not suit --image_size: the sides 8 and 8"),
        ("--degrade grey --autoencoder haar", "--degrade and --autoencoder exclude each other"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags: str, expected: str, folders: Path, tmp_path: Path) -> None:
    output_dir = "" if "--output_dir" in flags else f"--output_dir {tmp_path}"
    words = f"--dataset_path {folders}/to {TINY} {output_dir} {flags.format(folders)}"
    programs.assert_refused("train_oxford.py", 1, words, expected.format(folders))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", "translates pictures: pass some with --from_images"),
        ("--from_images {0}/from --strength 0.5", "--strength has no effect"),
        ("--from_images {0}/from --degrade", "--degrade has no effect"),
        ("--from_images {0}/from --reverse --solver stochastic", "--solver stochastic cannot be inverted"),
        ("--from_images {0}/from --reverse --path strip", "--path has no effect"),
        ("--from_images {0}/from --output_dir {0}/from", "has the pictures of --from_images"),
        ("--variants 2", "--variants needs --from_images: pass both"),
        ("--from_images {0}/nowhere", "neither a file nor a folder of files"),
    ],
)
def test_flags_of_samples_that_do_not_fit_are_refused(
    flags: str, expected: str, runs: tuple[str, Path], folders: Path, tmp_path: Path
) -> None:
    kind, folder = runs
    if kind != "paired":
        pytest.skip("the sentences are those of a run from a folder")
    output_dir = "" if "--output_dir" in flags else f"--output_dir {tmp_path}"
    words = f"--checkpoint {folder}/one {output_dir} {flags.format(folders)}"
    programs.assert_refused("sample.py", 1, words, expected)
