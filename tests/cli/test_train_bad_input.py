"""Bad input ends in one sentence, printed once, and exit code 2 in every process, on 1 and on 2 processes."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from torch import Tensor

from rectified_flow.cli.checks import check_sides
from rectified_flow.cli.config import TrainConfig
from rectified_flow.cli.data import build_space
from rectified_flow.data.store import ImageDataset
from rectified_flow.errors import UsageError
from rectified_flow.flags import parse
from rectified_flow.runs import checkpoint
from rectified_flow.runs.resume import choose_checkpoint, identify_run
from tests import programs
from tests.programs import program
from tests.ranks import run_on_ranks
from tests.training.runs import metrics, tiny_config, tiny_dataset, train

TINY = "--dataset synthetic-flowers --image_size 8 --dim 8 --dim_mults 1 2 --global_batch_size 16 --train_num_steps 4"


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for index in range(20):
        Image.new("RGB", (9, 12), (index * 10, 100, 200)).save(folder / f"{index:02}.png")
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one step, which no test changes."""
    folder = tmp_path_factory.mktemp("trained")
    flags = [*TINY.split(), "--train_num_steps", "1", "--output_dir", str(folder)]
    run_on_ranks(1, program, "train_oxford.py", flags)
    assert (folder / "checkpoints/step_00000001/manifest.json").exists()
    return folder


REFUSED: dict[str, str] = {
    "--dataset_path {tmp}/nowhere": "nowhere is not a folder",
    "--dataset_path {texts}": "holds no pictures",
    "--dataset_path {broken} --cache_dir {tmp}/cache": "holiday.JPG",
    "--image_size 9": "--image_size 9 gives pictures of 9, not divisible by 2",
    "--global_batch_size 15 --batch_size 4": "--global_batch_size 15 cannot be split evenly",
    # Pictures of one colour each are so alike that all are on one side.
    "--dataset_path {pictures} --holdout 0.1": "--holdout 0.1 leaves 0 pictures to train on, 20 held out; 8 held-out",
    "--batch_sise 4": "Perhaps you meant",
    "--mixed_precision fp16": "fp16 needs a GPU",
    "--output_dir {texts}/readme.txt/run": "cannot be written",
    "--checkpoint_dir /proc": "--checkpoint_dir /proc cannot",
    "--dim 16 --output_dir {trained}": "of another architecture",
}
"""What a user may type or have, and the refusal in each process of two."""
REFUSED_ALONE: dict[str, str] = {
    "--stop_when_memorising": "needs pictures to measure on: pass --holdout 0.05",
    "--num_epochs 2": "--num_epochs and --train_num_steps exclude each other",
    "--dataset some/where": "--dataset synthetic-flowers or your own --dataset_path",
    "--resume never --output_dir {trained}": "already holds checkpoints",
    "--dataset_path {pictures} --output_dir {trained}": "was trained on other data or at another size",
    "--dataset_path {pictures} --use_cfg": "--use_cfg needs labels",
    "--seed 5000000000": "--seed is 5000000000; it must be below 4294967296",
    "--global_batch_size 16000000": "a step of 16,000,000 images ",
    "--dataset_path {pictures} --global_batch_size 16000000": "a step of 16,000,000 images ",
}
REFUSED_BY_MEAN_FLOW: dict[str, str] = {
    "--guidance_scale 2": "guidance needs a network that takes conditions",
    "--init_from {tmp}/nothing": "there is no checkpoint at",
    "--init_from {trained} --dim 16": "of another architecture",
    "--flow_options objective=best": "objective",
}
CASES = [
    *(("train_oxford.py", 2, *case) for case in REFUSED.items()),
    *(("train_oxford.py", 1, *case) for case in REFUSED_ALONE.items()),
    *(("train_mean_flow.py", 2, *case) for case in REFUSED_BY_MEAN_FLOW.items()),
]


@pytest.mark.parametrize(("script", "world_size", "flags", "sentence"), CASES)
def test_bad_input_is_a_sentence(
    script: str, world_size: int, flags: str, sentence: str, trained: Path, pictures: Path, tmp_path: Path
) -> None:
    broken = shutil.copytree(pictures, tmp_path / "broken")
    (broken / "holiday.JPG").write_bytes(b"\xff\xd8\xff\xe0 this is no JPEG")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/readme.txt").write_text("no pictures here")
    places = {"tmp": tmp_path, "trained": trained, "pictures": pictures, "broken": broken, "texts": tmp_path / "texts"}
    words = f"{TINY} --output_dir {tmp_path}/run {flags.format(**places)}"
    programs.assert_refused(script, world_size, words, sentence)
    assert not list(tmp_path.glob("cache/*/")), "a store was left half-built"


@pytest.mark.parametrize(("world_size", "name"), [(2, "FSDP"), (1, "DEEPSPEED")])
def test_a_launcher_that_was_told_to_split_the_weights(world_size: int, name: str) -> None:
    variables, refusal = {f"ACCELERATE_USE_{name}": "true"}, "FSDP, DeepSpeed and Megatron-LM are not supported"
    programs.assert_refused("train_oxford.py", world_size, TINY, refusal, **variables)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--output_dir {tmp}/run --resume never", "run/checkpoints already holds checkpoints"),
        ("--output_dir {tmp}/new --resume {tmp}/old", "there is no checkpoint at"),
        ("--output_dir {tmp}/new --init_from {tmp}/old", "there is no checkpoint at"),
        ("--output_dir {tmp}/new --augment 1.5", "--augment is 1.5; it must be at most 1"),
        ("--output_dir {tmp}/new --holdout 1", "--holdout is 1.0; it must be below 1"),
        ("--output_dir {tmp}/new --augment 0.1 --autoencoder haar", "--autoencoder and --augment exclude each other"),
        (
            "--output_dir {tmp}/new --holdout 0.1 --method reflow --teacher {tmp}/run",
            "--teacher and --holdout exclude each other",
        ),
        ("--output_dir {tmp}/file/run", "cannot be written"),
        ("--output_dir {tmp}/new --checkpoint_dir {tmp}/file/run", "cannot be written"),
    ],
)
def test_what_can_be_refused_is_refused_before_pictures_are_decoded(tmp_path: Path, flags: str, sentence: str) -> None:
    """There is one to be decoded that is broken."""
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/1.png").write_bytes(b"no picture")
    (tmp_path / "file").touch()
    checkpoint.save(tmp_path / "run/checkpoints", 1, {}, {})
    data = f"--dataset_path {tmp_path}/pictures --cache_dir {tmp_path}/cache"
    words = f"{TINY} {data} {flags.format(tmp=tmp_path)}"
    programs.assert_refused("train_oxford.py", 1, words, sentence)


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path: Path) -> None:
    flags = [*TINY.split(), "--save_every", "2", "--num_samples", "0", "--output_dir", str(tmp_path)]
    run_on_ranks(1, program, "train_oxford.py", flags)
    weights = tmp_path / "checkpoints/step_00000004/model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    [(code, _)] = run_on_ranks(1, program, "train_oxford.py", flags)
    assert code == 0
    assert weights.read_bytes() != bytes(content), "step 4 was not trained again from step 2"
    content[-1] ^= 1
    assert weights.read_bytes() == bytes(content)


def test_another_seed_batch_or_precision_is_reported(
    tmp_path: Path, flowers: ImageDataset, capsys: pytest.CaptureFixture[str]
) -> None:
    def resume(batch: int, precision: str, **flags: Any) -> list[str]:
        config = tiny_config(tmp_path, **flags)
        run = identify_run(config, flowers.fingerprint, batch, precision)
        choose_checkpoint(config, run, None)
        return capsys.readouterr().out.splitlines()

    run_on_ranks(1, train, tiny_config(tmp_path, train_num_steps=1), flowers)
    assert resume(16, "float32") == []
    assert resume(8, "bf16", seed=3) == [
        "warning: the seed was 0 and is now 3: the run changes",
        "warning: the global batch was 16 and is now 8: the run changes",
        "warning: the precision was float32 and is now bf16: the run changes",
    ]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "--image_size 20",
            "20 gives pictures of 20, not divisible by 8, as the 4 levels of --dim_mults require: pass 16",
        ),
        ("--aspect_ratio 3:2 --image_size 72", "--image_size 72 gives pictures of 108x72, not divisible by 8"),
        ("--aspect_ratio 9:16 --image_size 63", "--image_size 63 gives pictures of 63x112, not divisible by 8"),
        ("--aspect_ratio 16:9 --image_size 63", "--dim_mults require: pass 72"),
    ],
)
def test_sides_that_the_levels_cannot_halve(words: str, sentence: str) -> None:
    config = parse(TrainConfig, "", words.split())
    with pytest.raises(UsageError, match=sentence):
        check_sides(config, build_space(config.data))


def test_a_full_disk_keeps_the_run_and_the_checkpoint_before(tmp_path: Path) -> None:
    """For some steps, writing a checkpoint, the metrics and the samples fails as it does on a full disk."""
    results = run_on_ranks(2, train_on_a_full_disk, tmp_path)
    assert results == [{"world_size": 2, "step": 8}] * 2
    kept = [path.name for path in sorted((tmp_path / "checkpoints").glob("[!.]*"))]
    assert kept == ["step_00000002", "step_00000008"]
    assert [row["step"] for row in metrics(tmp_path)] == [2, 4, 6, 8]
    assert [path.name for path in sorted((tmp_path / "samples").glob("*.png"))] == [
        "step_00000002.png",
        "step_00000008.png",
    ]


def train_on_a_full_disk(output_dir: Path) -> dict[str, int]:
    real_open = Path.open
    full = ("step_00000004", "step_00000006")

    def save_file(tensors: dict[str, Tensor], path: Path) -> None:
        if any(step in str(path) for step in full):
            path.write_bytes(b"half a file")
            raise OSError(28, "No space left on device")
        safetensors_save(tensors, path)

    def open_(path: Path, *args: Any, **settings: Any) -> Any:
        if path.name == "metrics.jsonl" and args == ("r+b",) and steps.pop(0) in (4, 6):
            with real_open(path, "ab") as file:
                file.write(b'{"step": 4, "los')
            raise OSError(28, "No space left on device")
        if path.suffix == ".tmp" and any(step in path.name for step in full):
            raise OSError(28, "No space left on device")
        return real_open(path, *args, **settings)

    steps = [2, 4, 4, 6, 6, 8]  # a line that failed is tried again when a checkpoint is saved
    safetensors_save = checkpoint.save_file  # type: ignore[attr-defined]
    checkpoint.save_file = save_file  # type: ignore[attr-defined,assignment]
    Path.open = open_  # type: ignore[method-assign,assignment]
    config = tiny_config(output_dir, train_num_steps=8, save_every=2, sample_every=2, log_every=2)
    return train(config, tiny_dataset(output_dir / "cache"))
