"""Tests of the flags that the pictures of a folder decide, and of flags that would spoil a run in silence."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from accelerate import PartialState
from PIL import Image

from rectified_flow.cli.data import build_space, find_data
from rectified_flow.cli.planning import choices, facts, reading
from rectified_flow.cli.planning.framing import FramedFlags, _reason_not_to_mirror, framing_of
from rectified_flow.cli.planning.plan import Plan
from rectified_flow.cli.planning.sizes import SPOILED, choose_size
from rectified_flow.cli.record import with_record
from rectified_flow.cli.sample_request import load_mask
from rectified_flow.cli.settings import Settings, read_settings
from rectified_flow.cli.training_flags import TrainConfig
from rectified_flow.data.description import PictureData, Sources
from rectified_flow.data.open import Pictures, space_of_folder
from rectified_flow.data.sources.folder import FileFolder
from rectified_flow.errors import UsageError
from rectified_flow.load import reading_of
from rectified_flow.measurements.folder import FieldFolder
from rectified_flow.runs.training_config import TrainingConfig
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.training.speed import Speed

GENERATOR = np.random.default_rng(0)


def save(path: Path, *shape: int, most: int = 256, dtype: str = "uint8") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(GENERATOR.integers(0, most, shape).astype(dtype)).save(path)


def framed(folder: Path, words: str = "") -> tuple[Settings[TrainConfig], list[str]]:
    PartialState()
    settings = read_settings(TrainConfig, "", f"--dataset_path {folder} --image_size 16 {words}".split())
    values = settings.values
    data, found = find_data(values.data, values.source, values.columns)
    assert isinstance(data, PictureData)
    flags = FramedFlags(values.data, values.source, values.init, values.columns.condition_on, settings.given)
    chosen, notes = framing_of(flags, data, found)
    return settings.resolving(chosen), notes


@pytest.mark.parametrize("limited", [{}, {"max_train_samples": 1}])
def test_a_limit_of_the_plan_is_said(tmp_path: Path, limited: dict[str, int]) -> None:
    save(tmp_path / "pics/a.png", 16, 16, 3)
    settings, _ = framed(tmp_path / "pics")
    data, found = find_data(settings.values.data, settings.values.source, settings.values.columns)
    assert isinstance(data, PictureData)
    with (
        patch.object(reading, "readable", lambda *_: limited),
        patch.object(choices, "with_recipe", lambda given, *_: given),
    ):
        settings, notes = choices.with_pictures(settings, data, found, 3600.0)
    said = "the plan chose `limit`, as reading all pictures takes too much of the time"
    assert (said in notes) == bool(limited) == (settings.origin("max_train_samples") == "chosen")


@pytest.mark.parametrize(("words", "share"), [("", 0.05), ("--holdout 0.01", 0.01)])
def test_the_held_out_share_suits_the_pictures_that_are_read(tmp_path: Path, words: str, share: float) -> None:
    save(tmp_path / "pics/a.png", 16, 16, 3)
    settings, _ = framed(tmp_path / "pics", words)
    data, found = find_data(settings.values.data, settings.values.source, settings.values.columns)
    assert isinstance(data, PictureData)
    with (
        patch.object(reading, "readable", lambda *_: {"max_train_samples": 700}),
        patch.object(choices, "with_recipe", lambda given, *_: given.with_layer("chosen", {"holdout": 0.01})),
    ):
        settings, _ = choices.with_pictures(settings, data, found, 3600.0)
    assert settings.values.data.holdout == share


def test_grey_pictures_train_one_channel(tmp_path: Path) -> None:
    save(tmp_path / "pics/a.png", 16, 16)
    settings, [note] = framed(tmp_path / "pics")
    assert settings.values.data.framing.shape == build_space(settings.values.data).shape == (1, 16, 16)
    assert settings.origin("grey") == "chosen"
    assert note.startswith("all pictures are grey, so the samples are grey, too")


@pytest.mark.parametrize(
    "flags", ["--no_grey", "--alpha", "--init_from runs/other", "--degrade grey", "--source_path {}"]
)
def test_what_needs_colours_keeps_three_channels(flags: str, tmp_path: Path) -> None:
    save(tmp_path / "pics/a.png", 16, 16)
    settings, notes = framed(tmp_path / "pics", flags.format(tmp_path / "pics"))
    assert not settings.values.data.grey
    assert not any("grey" in note for note in notes)


def test_latents_of_grey_pictures_are_decoded_to_grey(tmp_path: Path) -> None:
    """The network of 128 px on latents stays affordable, and the samples have no colours."""
    save(tmp_path / "pics/a.png", 16, 16)
    settings, _ = framed(tmp_path / "pics", "--autoencoder small")
    space, stored = build_space(settings.values.data), torch.randint(256, (2, 1, 16, 16), dtype=torch.uint8)
    decoded = space.decode(space.encode(space.medium.stored(stored)))
    assert decoded.shape == (2, 1, 16, 16)
    coloured = build_space(read_settings(TrainConfig, "", ["--image_size", "16", "--autoencoder", "small"]).values.data)
    three = coloured.decode(coloured.encode(coloured.medium.stored(stored.expand(-1, 3, -1, -1))))
    assert (three.amax(dim=1) - three.amin(dim=1)).max() > 0.01, "the autoencoder makes colours"
    assert coloured.shape == space.shape


def test_the_bits_of_values(tmp_path: Path) -> None:
    save(tmp_path / "pics/a.png", 16, 16, most=4096, dtype="uint16")
    settings, notes = framed(tmp_path / "pics", "--space Pixels")
    assert settings.values.data.framing.bits == 12
    assert notes[-1].startswith("the values in files of 16 bits are at most 4,095, so this value becomes white")
    assert framed(tmp_path / "pics", "--space Pixels --bits 16")[0].values.data.framing.bits == 16


@pytest.mark.parametrize(("most", "bits"), [(4096, 12), (1024, 10), (65_536, 16)])
@pytest.mark.parametrize("photos_are_deep", [False, True])
def test_the_values_of_sources_decide_their_bits(most: int, bits: int, photos_are_deep: bool, tmp_path: Path) -> None:
    """Depth maps of 12 bits are not trained on almost black, whatever the pictures are."""
    if photos_are_deep:
        save(tmp_path / "pics/a.png", 16, 16, most=4096, dtype="uint16")
    else:
        save(tmp_path / "pics/a.png", 16, 16, 3)
    save(tmp_path / "depth/a.png", 16, 16, most=most, dtype="uint16")
    words = f"--space Pixels --source_path {tmp_path}/depth --paired"
    settings, notes = framed(tmp_path / "pics", words)
    data: Any = find_data(settings.values.data, settings.values.source, settings.values.columns)[0]
    assert data.sources.described(data.pictures).bits == bits
    assert data.open().source.entries["images"].max() > 200
    said = f"sources: the values in files of 16 bits are at most {most - 1:,}, so this value becomes white (--source_"
    assert any(note.startswith(said) for note in notes) == (bits != (12 if photos_are_deep else 16) and bits < 16)
    asked = framed(tmp_path / "pics", f"{words} --source_bits 16")[0].values.source
    assert asked.source_bits == 16


def test_pictures_and_their_sources_are_resized_apart(tmp_path: Path) -> None:
    save(tmp_path / "pics/a.png", 8, 8, 3)
    (tmp_path / "maps").mkdir()
    label_map = Image.new("P", (8, 8))
    label_map.putpalette([0, 0, 0, 255, 0, 0])
    label_map.paste(1, (0, 0, 4, 4))
    label_map.save(tmp_path / "maps/a.png")
    settings, [note] = framed(tmp_path / "pics", f"--source_path {tmp_path}/maps --paired")
    assert (settings.values.data.resize, settings.values.source.source_resize) == (None, "nearest")
    assert "source_resize" in note
    opened: Any = find_data(settings.values.data, settings.values.source, settings.values.columns)[0].open()
    assert opened.source.entries["images"][0, 0].flatten().tolist().count(255) == 64
    assert {*opened.source.entries["images"].flatten().tolist()} == {0, 255}
    settings, [note] = framed(tmp_path / "maps")
    assert settings.values.data.framing.resize == "nearest"
    assert framed(tmp_path / "maps", "--resize lanczos")[0].values.data.framing.resize == "lanczos"


@pytest.mark.parametrize(
    ("classes", "flags", "mirrored"),
    [
        (("left", "ahead"), "", False),
        (("0", "1"), "--use_cfg", False),
        (("cat", "dog"), "", True),
        (("left", "ahead"), "--horizontal_flip", True),
        (("cat", "dog"), "--condition_on text", False),
    ],
)
def test_pictures_whose_words_name_sides_are_not_mirrored(
    classes: tuple[str, ...], flags: str, mirrored: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in classes:
        save(tmp_path / f"pics/{name}/a.png", 16, 16, 3)
        (tmp_path / f"pics/{name}/a.txt").write_text("seen from the left")
    assert framed(tmp_path / "pics", flags)[0].values.data.horizontal_flip is mirrored
    assert ("--no_horizontal_flip, as" in capsys.readouterr().out) is not mirrored


def test_single_channels_are_said(tmp_path: Path) -> None:
    for name in ("A_C0", "A_C1"):
        save(tmp_path / f"pics/{name}.tif", 16, 16, dtype="uint16", most=60_000)
    [said, _] = FieldFolder(tmp_path / "pics").notes
    assert said.startswith("the files come in groups whose names differ in one part (C0, C1), such as A_C0.tif and")


def drawing(side: int) -> Image.Image:
    image = Image.new("RGB", (side, side), "white")
    for x in range(0, side, side // 16):
        image.paste((0, 0, 0), (x, 0, x + side // 64, side))
        image.paste((0, 0, 0), (0, x, side, x + side // 64))
    return image


def test_an_autoencoder_that_spoils_the_pictures_is_not_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Thin lines come back 1/6 of white wrong, and soft colours do not."""
    for name in ("soft", "drawn", "art"):
        (tmp_path / name).mkdir()
    soft = Image.fromarray(GENERATOR.integers(0, 256, (5, 5, 3)).astype(np.uint8))
    soft.resize((128, 128), Image.Resampling.BICUBIC).save(tmp_path / "soft/a.png")
    drawing(128).save(tmp_path / "drawn/a.png")
    art = Image.fromarray(GENERATOR.choice([0, 85, 255], (32, 32, 3)).astype(np.uint8))
    art.resize((128, 128), Image.Resampling.NEAREST).save(tmp_path / "art/a.png")
    errors = dict[str, float]()
    for name in ("soft", "drawn", "art"):
        words = f"--dataset_path {tmp_path}/{name} --image_size 128 --autoencoder small".split()
        values = read_settings(TrainConfig, "", words).values
        source = find_data(values.data, values.source, values.columns)[1]
        errors[name] = reading.round_trip_error(source, values.data)
    assert 0 < errors["soft"] < SPOILED < min(errors["drawn"], errors["art"])
    framed(tmp_path / "drawn", "--image_size 128 --autoencoder small")
    warning = f"warning     the autoencoder changes these pictures by {errors['drawn']:.0f} of 255; pass "
    assert warning in capsys.readouterr().out

    def chosen(error: float) -> Plan:
        return choose_size(1000, 256, 3600.0, lambda *_: Speed(1000.0, 1.0), lambda *_: error)

    assert chosen(errors["soft"]).settings["autoencoder"] == ("small",)
    assert chosen(errors["drawn"]).settings == {"image_size": 64, "autoencoder": ()}
    said = f", as --autoencoder small changes these pictures by {errors['drawn']:.0f} of 255; --image_size overrides"
    assert said in chosen(errors["drawn"]).reasons["size"]


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ("--train_num_steps 200", 50),
        ("--train_num_steps 2000", None),
        ("--train_num_steps 3", 1),
        ("--num_epochs 2 --batch_size 10", 5),
        ("--train_num_steps 200 --lr_warmup_steps 500", None),
    ],
)
def test_the_warm_up_of_a_short_run(flags: str, steps: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    settings = read_settings(TrainConfig, "", flags.split())
    PartialState()
    made = facts.short_warm_up(settings.values.run, 100, settings.given)
    assert made == ({} if steps is None else {"lr_warmup_steps": steps})
    assert (f"--lr_warmup_steps {steps}, since the run has" in capsys.readouterr().out) == bool(made)


@pytest.mark.parametrize(
    ("colour", "alpha", "expected"),
    [
        (255, None, [True] * 4 + [False] * 4),  # black and white
        (255, 255, [True] * 4 + [False] * 4),
        (255, 0, [True] * 4 + [False] * 4),  # white strokes on nothing
        (200, 0, [True] * 4 + [False] * 4),
        (0, 0, "has transparent parts beside dark ones"),
        (0, None, "has no white pixels"),
    ],
)
def test_the_transparent_parts_of_a_mask_are_not_white(
    colour: int, alpha: int | None, expected: list[bool] | str, tmp_path: Path
) -> None:
    """The left half is painted; the right half is black, or transparent white."""
    right = [0, 0, 0, 255] if alpha is None else [255 - alpha] * 3 + [alpha]
    pixels = np.full((8, 8, 4), right, np.uint8)
    pixels[:, :4] = (colour, colour, colour, 255)
    Image.fromarray(pixels).save(tmp_path / "mask.png")
    medium = Pixels((3, 8, 8)).medium
    if isinstance(expected, str):
        with pytest.raises(UsageError, match=expected):
            load_mask(tmp_path / "mask.png", [], medium)
    else:
        assert load_mask(tmp_path / "mask.png", [], medium)[0, 0, 3].tolist() == expected


@pytest.mark.parametrize(("extra", "is_field"), [(0, True), (1, False), (2, False)])
def test_a_fourth_channel_that_is_no_transparency_is_a_measurement(extra: int, is_field: bool, tmp_path: Path) -> None:
    tifffile = pytest.importorskip("tifffile")
    names = {0: "unspecified", 1: "assocalpha", 2: "unassalpha"}
    values = GENERATOR.integers(0, 255, (8, 8, 4)).astype(np.uint8)
    tifffile.imwrite(tmp_path / "a.tif", values, photometric="rgb", extrasamples=[names[extra]])
    assert (space_of_folder(tmp_path) == "Fields") is is_field


def test_weights_for_a_run_that_has_begun_are_said_to_have_no_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    PartialState()
    monkeypatch.setattr("rectified_flow.cli.record.begun_flags", lambda *_, **__: {"init_from": Path("one")})
    words = f"--output_dir {tmp_path} --init_from"
    with_record(read_settings(TrainConfig, "", f"{words} one".split()))
    assert "has no effect" not in capsys.readouterr().out
    with_record(read_settings(TrainConfig, "", f"{words} two".split()))
    said = f"--init_from two has no effect, as the run in {tmp_path} has begun from one: choose another --output_dir"
    assert said in capsys.readouterr().out


def test_a_precision_of_the_launcher_that_is_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    from rectified_flow.training import trainer

    monkeypatch.setattr(trainer, "is_initialized", lambda: False)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(UsageError, match="the launcher asks for the precision fp8, which is not supported: pass"):
        trainer.choose_precision(TrainingConfig(), torch.device("cpu"))


def test_the_margins_of_a_padded_mask_are_kept(tmp_path: Path) -> None:
    """White on transparent is clear, and a run on whole pictures pads mask and pictures alike."""
    mask = np.zeros((8, 24, 4), np.uint8)
    mask[:, :12] = 255
    Image.fromarray(mask).save(tmp_path / "mask.png")
    medium = Pixels((3, 16, 16)).medium
    padded = load_mask(tmp_path / "mask.png", [], medium, pad=True)[0, 0]
    assert padded[7].tolist() == [True] * 8 + [False] * 8
    assert not padded[0].any(), "above the picture"
    assert load_mask(tmp_path / "mask.png", [], medium)[0, 0].shape == (16, 16)


def test_pictures_for_sampling_are_framed_as_those_of_the_run() -> None:
    pictures = Pictures("", Path("x"), 16, crop="none", bits=12)
    data = PictureData(pictures, sources=Sources(Path("y"), resize="nearest", bits=10))
    flow = SimpleNamespace(space=Pixels((3, 16, 16)))
    trained: Any = SimpleNamespace(data=data, flow=flow)
    assert reading_of(trained) == {"bits": 10, "pad": True, "resize": "nearest"}
    trained = SimpleNamespace(data=replace(data, sources=None), flow=flow)
    assert reading_of(trained) == {"bits": 12, "pad": True, "resize": "lanczos"}
    assert reading_of(SimpleNamespace(data=None, flow=flow)) == {}  # type: ignore[arg-type]


def test_excluded_pictures_choose_neither_the_mirror_nor_the_size(tmp_path: Path) -> None:
    hands = [f"{side}_hand_{number}.png" for side in ("left", "right") for number in range(8)]
    for name, side in {"a.png": 16, "b.png": 16, "sheet.png": 256, **dict.fromkeys(hands, 16)}.items():
        save(tmp_path / "pics" / name, side, side)
    folder = FileFolder(tmp_path / "pics", exclude=["sheet.png", *hands])
    assert reading.sides_of(folder, "center") == [16, 16]
    assert _reason_not_to_mirror((), folder) is None
    assert _reason_not_to_mirror((), FileFolder(tmp_path / "pics")) is not None
