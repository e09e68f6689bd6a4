"""Tests of captions: vectors of encoders, masks, and networks with captions."""

import json
from pathlib import Path

import pytest
import torch
from torch.func import jvp

from rectified_flow.condition import LARGEST, Labels, all_none
from rectified_flow.errors import UsageError
from rectified_flow.networks.unet import Unet
from rectified_flow.registry import build, describe
from rectified_flow.text.caption import Caption
from rectified_flow.text.encoders import BagOfWords, PretrainedTextEncoder, words_of
from tests.text.tiny_encoder import write_encoder

TEXTS = ["a red heart", "the blue star", "a RED, red heart!"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> PretrainedTextEncoder:
    return PretrainedTextEncoder(str(write_encoder(tmp_path_factory.mktemp("encoder"))))


def test_a_bag_of_words_counts_them() -> None:
    bag = BagOfWords.of(TEXTS)
    assert bag.words == ("red", "a", "heart", "blue", "star", "the"), "the most frequent first"
    counts = torch.tensor([[1.0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1], [2, 1, 1, 0, 0, 0]])
    torch.testing.assert_close(bag.encode(TEXTS)[:, 0], counts / counts.norm(dim=1, keepdim=True))
    assert bag.encode(["purple"]).isnan().all()


def test_scripts_without_spaces_are_split_into_characters() -> None:
    assert words_of("Red花、2本。") == ["red", "花", "2", "本"]
    bag = BagOfWords.of(["一朵红花", "一朵蓝花"])
    assert not bag.encode(["红"]).isnan().any(), "a part of a caption is known"
    assert words_of("แมว") == [each for each in "แมว" if each.isalnum()]


def test_a_text_is_encoded_alike_alone_and_beside_longer_ones(encoder: PretrainedTextEncoder) -> None:
    """Padding does not change the mean over tokens, nor the tokens."""
    together, alone = encoder.encode(TEXTS, 6), encoder.encode(TEXTS[:1], 6)
    torch.testing.assert_close(together[:1], alone, equal_nan=True)
    assert alone.shape == (1, 7, 16)
    assert alone[0, 0].norm().item() == pytest.approx(1, abs=1e-5)
    tokens = alone[0, 1:]
    assert tokens[:5].isfinite().all()
    assert tokens[5:].isnan().all(), "padding"
    mean = tokens[:5].mean(dim=0)
    torch.testing.assert_close(alone[0, 0], mean / mean.norm())
    assert encoder.encode(["a " * 99], 20)[0, 1:].isfinite().all(dim=1).sum() == encoder.most_tokens == 12


def test_a_tokenizer_that_pads_at_the_left_pads_at_the_right_here(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path)
    known = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(known | {"padding_side": "left"}))
    encoder = PretrainedTextEncoder(str(folder))
    together, alone = encoder.encode(["a big red heart and two", "a cat"], 3), encoder.encode(["a cat"], 3)
    torch.testing.assert_close(together[1:], alone, equal_nan=True)


def test_another_encoder_than_that_of_the_training_is_refused(encoder: PretrainedTextEncoder, tmp_path: Path) -> None:
    known = build(describe(encoder))
    assert torch.equal(known.encode(TEXTS), encoder.encode(TEXTS))
    other = PretrainedTextEncoder(encoder.source, "another")
    with pytest.raises(UsageError, match="differs from the one used in training"):
        other.encode(TEXTS)
    with pytest.raises(UsageError, match="cannot be loaded as a text encoder"):
        PretrainedTextEncoder(str(tmp_path)).encode(TEXTS)


def test_captions_that_cannot_be_told_from_none() -> None:
    kind = Caption(BagOfWords.of(TEXTS), 6)
    values = kind.parse(["red", " "])
    assert all_none({"text": kind}, {"text": values}).tolist() == [False, True]
    with pytest.raises(UsageError, match="no word of 'purple' occurs in the training captions"):
        kind.parse(["red", "purple"])


@pytest.fixture
def conditional(encoder: PretrainedTextEncoder) -> tuple[Unet, Caption]:
    torch.manual_seed(0)
    kind = Caption(encoder, encoder.size, tokens=6)
    unet = Unet(8, (1, 2), conditions={"text": kind}, image_size=8, attention_sides=(4,), blocks_per_level=1)
    for parameter in unet.parameters():  # none of the layers that start as zero may hide an input
        torch.nn.init.normal_(parameter, std=0.2)
    return unet.eval(), kind


def test_the_network_reads_the_vector_and_the_tokens(conditional: tuple[Unet, Caption]) -> None:
    unet, kind = conditional
    x, t, values = torch.randn(3, 3, 8, 8), torch.full((3,), 0.5), kind.parse(TEXTS)
    result = unet(x, t, text=values)
    for part in (slice(0, 1), slice(1, None)):
        changed = values.clone()
        changed[:, part] = changed[:, part].flip(-1)
        assert not torch.allclose(unet(x, t, text=changed), result), part


def test_padding_and_none_are_not_attended_to(conditional: tuple[Unet, Caption]) -> None:
    unet, kind = conditional
    x, t, values = torch.randn(2, 3, 8, 8), torch.full((2,), 0.5), kind.parse(TEXTS[:2])
    longer = torch.cat((values, torch.full((2, 3, 16), torch.nan)), dim=1)
    torch.testing.assert_close(unet(x, t, text=longer), unet(x, t, text=values))
    none = kind.none(2, torch.device("cpu"))
    torch.testing.assert_close(unet(x, t, text=none), unet(x, t))
    torch.testing.assert_close(unet(x, t, text=torch.full_like(none, LARGEST)), unet(x, t))
    torch.testing.assert_close(unet(x, t, text=values.nan_to_num(LARGEST)), unet(x, t, text=values))


def test_the_forward_derivative_is_that_of_differences(conditional: tuple[Unet, Caption]) -> None:
    unet, kind = conditional
    unet = unet.double()
    x, t, values = torch.randn(2, 3, 8, 8).double(), torch.full((2,), 0.5).double(), kind.parse(TEXTS[:2])
    direction = torch.randn_like(x)
    _, derivative, *_ = jvp(lambda x: unet(x, t, text=values), (x,), (direction,))
    step = 1e-4
    difference = (unet(x + step * direction, t, text=values) - unet(x - step * direction, t, text=values)) / (2 * step)
    torch.testing.assert_close(derivative, difference, rtol=1e-3, atol=1e-3)


def test_tokens_need_attention(encoder: PretrainedTextEncoder) -> None:
    kind = Caption(encoder, encoder.size, tokens=6)
    with pytest.raises(ValueError, match="need a level with attention"):
        Unet(8, (1, 2), conditions={"text": kind}, image_size=8, attention_sides=())


def test_columns_that_differ_by_an_s() -> None:
    kinds = {"labels": Labels(2), "label": Labels(3), "colors": Labels(4), "color": Labels(5)}
    names = {name.split(".")[0] for name in Unet(8, (1, 2), conditions=kinds, image_size=8).state_dict()}
    assert {"label_embedding", "label_value_embedding", "color_embedding", "color_value_embedding"} <= names
