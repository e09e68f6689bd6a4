"""A short form of the soak test; ``make soak`` runs the long one."""

import pytest

from rectified_flow.cli.config import TrainConfig
from rectified_flow.cli.train import train
from rectified_flow.flags import parse
from tests.launch.soak import FLAGS, differences, leaks, two_runs
from tests.patience import PATIENCE
from tests.ranks import run_on_ranks

SHORT = ("fill_disk", "kill_launcher", "corrupt_checkpoint")


@pytest.mark.slow
@pytest.mark.timeout(8 * PATIENCE)
def test_a_run_that_is_killed_stopped_and_damaged_ends_like_one_left_alone() -> None:
    with two_runs(rank_timeout=PATIENCE) as (calm, soak):  # none hangs
        soak.disturb(SHORT)
        steps = soak.last_step() + 20
        soak.finish(steps)
        flags = f"{FLAGS} --output_dir {calm.run} --train_num_steps {steps}"
        run_on_ranks(2, train, parse(TrainConfig, "", flags.split()))
        assert differences(calm.run, soak.run) == []
        assert leaks(soak) == []
        assert soak.counts["times resumed"] >= len(SHORT) - 1, soak.counts  # a full disk ends nothing
        assert soak.counts["checkpoints refused"] == 1, soak.counts
        assert soak.counts["writes that failed"] >= 1, soak.counts
