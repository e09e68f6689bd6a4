"""How does one changed default setting move the samples of a short rectified flow?"""

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from rectified_flow import Pixels, RectifiedFlow, Unet
from rectified_flow.flows.times import LogitNormal, Uniform
from studies.harness import Case, Figures, Flags, Row, Study, run
from studies.training import grouped, load_trained, measure_samples, open_pictures, train_flow

Settings = Mapping[str, Any]
RUN = {"batch_size": 32, "learning_rate": 1e-3, "lr_warmup_steps": 50, "ema_decay": 0.99}


def train(row: Row, run: Settings, flow: Settings, network: Settings, space: Settings) -> None:
    """Train with settings that replace the base's."""
    size = row.image_size
    unet = Unet(**{"dim": 16, "dim_mults": (1, 2, 4), "image_size": size, "dropout": 0.0, **network})
    pixels = Pixels((3, size, size), **{"horizontal_flip": True, **space})
    data = open_pictures(row.data, size)
    train_flow(row, RectifiedFlow(unet, space=pixels, **flow), data, minutes=row.budget, **{**RUN, **run})


def measure(row: Row) -> Figures:
    """Return the figures of four midpoint steps."""
    return measure_samples(row, load_trained(row), {"8 calls": {"steps": 4}})


def case(**settings: Any) -> Case:
    """Return a case of settings, see :func:`studies.training.grouped`."""
    about = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in settings.items())
    return Case(about or "the reference", partial(train, **grouped(settings)), measure)  # type: ignore[arg-type]


STUDY = Study(
    __doc__ or "",
    {
        "base": case(),
        "times uniform": case(flow_time_distribution=Uniform()),
        "times logit-normal(-1.2, 1.2)": case(flow_time_distribution=LogitNormal(-1.2, 1.2)),
        "times logit-normal(0, 1)": case(flow_time_distribution=LogitNormal(0.0, 1.0)),
        "clean prediction": case(flow_prediction="clean"),
        "learning rate 3e-4": case(learning_rate=3e-4),
        "learning rate 3e-3": case(learning_rate=3e-3),
        "no warm-up": case(lr_warmup_steps=0),
        "no flips": case(space_horizontal_flip=False),
        "dropout 0.1": case(network_dropout=0.1),
        "coupling ot": case(flow_coupling="ot"),
        "coupling immiscible": case(flow_coupling="immiscible"),
    },
    Flags(budget=(4.0,)),
)

if __name__ == "__main__":
    sys.exit(run("studies.defaults"))
