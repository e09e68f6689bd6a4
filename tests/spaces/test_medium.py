"""Tests of the contracts of a space and of its medium: what a kind of data need not implement."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from rectified_flow.data.framing import Framing
from rectified_flow.data.sources import PictureRows
from rectified_flow.errors import UsageError
from rectified_flow.spaces.medium import Medium
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.spaces.space import DataFacts, Space, dequantised
from rectified_flow.system.pictures import open_picture

MOST_MEMBERS = 12


class Plain(Space):
    """Data that are encoded already."""

    def encode(self, data: Tensor) -> Tensor:
        return data

    def decode(self, x: Tensor) -> Tensor:
        return x


class Squares(Medium):
    """Data in files of their own, with a grey picture each."""

    suffix = ".dat"

    def render(self, data: Tensor) -> Tensor:
        return torch.full((len(data), 3, 2, 2), 127, dtype=torch.uint8)

    def write(self, content: Tensor) -> bytes:
        return bytes(content.tolist())


def test_pictures_of_another_size_do_not_fit() -> None:
    trained, others = (Pixels((3, 8, width)).medium for width in (8, 12))
    assert trained.misfit(trained) is None
    assert "is read at 12x8 px, and the flow was trained at 8 px" in str(trained.misfit(others))


@pytest.mark.parametrize(
    "framing",
    [Framing(16, 16, bits=12, grey=True), Framing(16, 16, crop="none"), Framing(16, 16, resize="nearest")],
)
def test_a_picture_is_read_as_the_training_pictures_were(tmp_path: Path, framing: Framing) -> None:
    random = np.random.default_rng(0)
    colours, grey = random.integers(256, size=(8, 24, 3)), random.integers(4096, size=(8, 24))
    Image.fromarray(grey.astype(np.uint16) if framing.grey else colours.astype(np.uint8)).save(tmp_path / "1.png")
    medium = Pixels(framing.shape).medium
    how: dict[str, Any] = {"bits": framing.bits, "pad": framing.crop == "none", "resize": framing.resize}
    expected = PictureRows(framing).fit(open_picture(tmp_path / "1.png")).row
    assert np.array_equal(medium.read(tmp_path / "1.png", **how).numpy(), expected)
    assert not np.array_equal(medium.read(tmp_path / "1.png").numpy(), expected)


def test_the_contract_of_a_space_is_small() -> None:
    members = {name for name in [*vars(Space), *Space.__annotations__] if not name.startswith("_")}
    assert len(members) <= MOST_MEMBERS, sorted(members)


def test_what_a_kind_does_not_have_is_a_sentence() -> None:
    space = Plain()
    for call in (
        lambda: space.medium.render(torch.zeros(1)),
        space.medium.page,
        lambda: space.medium.prepare(torch.device("cpu"), "folder"),
        lambda: dequantised(space, torch.zeros(1)),
        lambda: Plain.of(DataFacts((2,))),
    ):
        with pytest.raises(UsageError):
            call()
    assert list(space.medium.input_suffixes) == []
    assert space.medium.ends == (".png",)


def test_a_file_of_its_own_has_a_picture_beside_it() -> None:
    files = Squares(Plain()).files(torch.tensor([1, 2]))
    assert [*files] == [".dat", "-preview.png"]
    assert files[".dat"] == b"\x01\x02"
    assert files["-preview.png"].startswith(b"\x89PNG")


def test_a_picture_is_the_file() -> None:
    medium = Pixels((4, 2, 2)).medium
    contents = medium.contents(torch.zeros(1, 4, 2, 2))
    assert [*medium.files(contents[0])] == [*medium.ends] == [".png"]
