"""Tests of the warning of copies among the samples of previews."""

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import torch
from PIL import Image, ImageOps

from rectified_flow.data.store import ImageDataset
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.training import trainer
from rectified_flow.training.copies import NEIGHBOURS, CopiesHook
from tests.ranks import run_on_ranks
from tests.training.runs import IMAGE_SIZE, tiny_config, train

SAMPLES = 20


def said(folder: Path, dataset: ImageDataset) -> str:
    """Train with previews that have one mirrored training picture of 20, then two; return what the run prints."""
    noise = torch.randint(256, (SAMPLES, 3, IMAGE_SIZE, IMAGE_SIZE), generator=torch.Generator().manual_seed(0)).byte()
    shown = (torch.cat((dataset.read_pictures(range(copies)).flip(-1), noise[copies:])) for copies in (1, 2))
    hook = CopiesHook(dataset, Pixels((3, IMAGE_SIZE, IMAGE_SIZE)).medium)
    preview = patch.object(trainer, "draw_preview", lambda *_: (next(shown), None, None, None))
    with preview, redirect_stdout(StringIO()) as output:
        train(tiny_config(folder, train_num_steps=2, lr_warmup_steps=2, sample_every=1), dataset, callbacks=[hook])
    return output.getvalue()


def test_copies_in_a_preview_are_reported(flowers: ImageDataset, tmp_path: Path) -> None:
    """More than 5% are too many."""
    [printed] = run_on_ranks(1, said, tmp_path / "run", flowers)
    assert "copies      previews are compared with the 46 training pictures" in printed
    assert "warning: 2 of the 20 samples of the preview are copies of training pictures at step 2; " in printed
    assert printed.count("warning") == 1
    with Image.open(tmp_path / "run" / NEIGHBOURS) as sheet:
        side = IMAGE_SIZE + 2
        assert sheet.size == (6 * side + 2, 8 * side + 2)
        first, near = (sheet.crop((2 + side * n, 2, side * (n + 1), side)) for n in range(2))
    assert ImageOps.mirror(first).tobytes() == near.tobytes(), "the likeliest copy comes first, beside its original"
