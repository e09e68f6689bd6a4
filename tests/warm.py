"""Prepare the fork server of :mod:`tests.ranks`, which imports this module last.

What every rank would do first is done once: a command line is parsed, a figure is drawn, and the formats of pictures
are found. No objects of the server take part in garbage collection. Otherwise the first full collection in a rank
writes to nearly all memory shared with the server. Copying these pages takes a second.
"""

import gc
from io import BytesIO

from matplotlib.figure import Figure
from PIL import Image

from rectified_flow.cli.model_flags import EvaluateConfig, SampleConfig
from rectified_flow.cli.settings import read_settings
from rectified_flow.cli.training_flags import OneStepConfig, TrainConfig

for config in (TrainConfig, OneStepConfig, SampleConfig, EvaluateConfig):
    read_settings(config, "", [])

figure = Figure()
figure.subplots().set_title("title")
figure.savefig(BytesIO())

Image.init()

gc.freeze()
