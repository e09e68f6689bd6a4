"""A program whose last rank fails after some steps."""

import os
from typing import Any

from torch import Tensor

from rectified_flow.cli.build import build_flow
from rectified_flow.cli.data import build_space, data_of
from rectified_flow.cli.programs import run
from rectified_flow.cli.training_flags import TrainConfig
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.training.trainer import Trainer


class Faulty(RectifiedFlow):
    progress = 0.0

    def forward(self, **batch: Any) -> Tensor:
        if self.progress > 0.5 and os.environ["RANK"] == "1":
            raise ValueError("this picture is too sad")
        return super().forward(**batch)


def main(values: TrainConfig) -> None:
    built = build_flow(values, {}, build_space(values.data))
    flow = Faulty(built.network, space=built.space)
    Trainer(flow, data_of(values.data, values.source, values.columns).open(), values.run).train()


if __name__ == "__main__":
    run("tests.launch.faulty_program:main", "rectified_flow.cli.training_flags:TrainConfig", __doc__ or "")
