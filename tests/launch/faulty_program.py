"""A program whose last rank fails after some steps."""

import os
from typing import Any

from torch import Tensor

from rectified_flow import RectifiedFlow, RectifiedFlowConfig, Trainer
from rectified_flow.cli.launch import run
from rectified_flow.cli.train import build_dataset, build_network


class Faulty(RectifiedFlow):
    progress = 0.0

    def forward(self, images: Tensor, labels: Tensor | None = None, *args: Any, **more: Any) -> Tensor:
        if self.progress > 0.5 and os.environ["RANK"] == "1":
            raise ValueError("this picture is too sad")
        return super().forward(images, labels)


def main(config: RectifiedFlowConfig) -> None:
    Trainer(Faulty(build_network(config, ())), build_dataset(config), config).train()


if __name__ == "__main__":
    run(main, RectifiedFlowConfig, __doc__ or "")
