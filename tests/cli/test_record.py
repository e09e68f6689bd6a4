"""Tests of reading the flags that a run has recorded."""

import pytest

from rectified_flow.cli.config import TrainConfig
from rectified_flow.cli.record import config_in


@pytest.mark.parametrize(("recorded", "expected"), [({}, 5), ({"data_seed": 0}, 0), ({"data_seed": 7}, 7)])
def test_the_seed_of_the_held_out_pictures(recorded: dict[str, int], expected: int) -> None:
    """A run of the first version, which recorded no --data_seed, held pictures out by --seed."""
    document = {"data": {}, "flow": {}, "training": {"seed": 5, **recorded}}
    assert config_in(document, "run", TrainConfig).data.data_seed == expected
