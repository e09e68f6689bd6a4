"""Tests of the conditions of an exported page: texts, numbers and labels."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rectified_flow.condition import Labels, Number
from rectified_flow.flows.flow import Flow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.flows.solvers import Guidance
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.text.caption import Caption
from rectified_flow.text.encoders import BagOfWords
from tests.cli.browser import UNNAMED, Shown, drawn, page_of
from tests.cli.test_export import small
from tests.text.tiny_encoder import tiny_encoder

SHAPE = (3, 8, 8)
EXAMPLES = ("a red flower", "two blue flowers, and a cat")
QUANTILES = (0.0, 1.5, 3.0, 8.0, 20.0)
LATER = "document.body.dataset.drawn = ''"


def values_of(flow: Flow, **texts: str | None) -> dict[str, torch.Tensor]:
    """The values of a written condition; None is "none"."""
    kinds: Any = {name: flow.conditions[name.removesuffix("_")] for name in texts}
    return {
        name.removesuffix("_"): kinds[name].none(1, torch.device("cpu")) if text is None else kinds[name].parse([text])
        for name, text in texts.items()
    }


def differs(shown: Shown, flow: Flow, values: dict[str, torch.Tensor], **options: Any) -> int:
    return int(np.abs(shown.picture() - drawn(flow, 0, conditions=values, **options)[0]).max())


@pytest.mark.page
def test_a_text_a_number_and_a_label_are_chosen(tmp_path: Path, browser: Any) -> None:
    """The pictures are those of sample.py for the same values, and also where one has none."""
    encoder = BagOfWords.of(EXAMPLES)
    caption = Caption(encoder, encoder.size, 0, EXAMPLES)
    columns: dict[str, Any] = {"text": caption, "petal_length": Number(QUANTILES), "class": Labels(2, ("cat", "dog"))}
    flow = RectifiedFlow(small(**columns), space=Pixels(SHAPE))
    with page_of(flow, tmp_path, browser) as shown:
        shown.open()
        page = shown.page
        assert page.evaluate(UNNAMED) == []
        assert page.get_by_label("Text", exact=True).input_value() == EXAMPLES[0]
        chosen: dict[str, str | None] = {"text": EXAMPLES[0], "petal_length": "3"}
        assert differs(shown, flow, values_of(flow, **chosen)) <= 2, "the label is drawn by the seed"

        shown.set("condition-class", 1)
        shown.set("condition-petal_length", 12)
        assert shown.text("conditions").split("\n")[:2] == ["Petal length", "12"]
        page.evaluate(LATER)
        page.get_by_label("Text", exact=True).fill("Two cats and a CAT")
        shown.wait()
        chosen = {"text": "two cats and a cat", "petal_length": "12", "class_": "dog"}
        assert differs(shown, flow, values_of(flow, **chosen)) <= 2
        note = "Ignored, because the training captions do not contain them: cats."
        assert page.inner_text("#condition-text-note") == note

        before = shown.picture()
        page.get_by_label("Text", exact=True).fill("nothing known")
        page.keyboard.press("Enter")
        note = page.inner_text("#condition-text-note")
        assert note.startswith("The model knows no word of this text. It knows words such as ")
        assert note.endswith("The picture still shows “Two cats and a CAT”.")
        assert np.array_equal(shown.picture(), before)
        shown.set("condition-class", "2")
        assert differs(shown, flow, values_of(flow, **chosen | {"class_": None})) <= 2

        page.evaluate(LATER)
        page.get_by_label("Any Petal length").check()
        shown.wait()
        chosen |= {"class_": None, "petal_length": None}
        assert differs(shown, flow, values_of(flow, **chosen)) <= 2
        shown.page.evaluate(LATER)
        page.get_by_role("button", name="Example").click()
        shown.wait()
        chosen["text"] = EXAMPLES[1]
        assert page.get_by_label("Text", exact=True).input_value() == EXAMPLES[1]
        shown.set("guidance", 2.5)
        assert differs(shown, flow, values_of(flow, **chosen), guidance=Guidance(2.5)) <= 2


@pytest.mark.page
def test_a_text_is_encoded_by_a_pretrained_encoder(tmp_path: Path, browser: Any) -> None:
    """The network attends to its tokens, of which some texts have more and some have fewer than it takes."""
    encoder = tiny_encoder(tmp_path / "encoder")
    caption = Caption(encoder, encoder.size, 6, EXAMPLES)
    flow = RectifiedFlow(small(text=caption), space=Pixels(SHAPE))
    with page_of(flow, tmp_path, browser) as shown:
        shown.open()
        assert differs(shown, flow, values_of(flow, text=EXAMPLES[0])) <= 2
        for text in ("A cat.", "The red, blue flowers and the two dogs in the red flower, and a cat!", "unseen"):
            shown.page.evaluate(LATER)
            shown.page.get_by_label("Text", exact=True).fill(text)
            shown.wait()
            assert differs(shown, flow, values_of(flow, text=text)) <= 2
        assert shown.page.inner_text("#condition-text-note") == ""
