"""A short form of the soak test; ``make soak`` runs the long one."""

from tests.launch.soak import comparison, differences, leaks

SHORT = ("kill_worker", "fill_disk", "warn_one_rank", "kill_launcher", "corrupt_checkpoint", "preempt")


def test_a_run_that_is_killed_stopped_and_damaged_ends_like_one_left_alone() -> None:
    with comparison(steps=150) as (calm, soak):
        soak.disturb(iter(SHORT), seconds=200)
        assert differences(calm.run, soak.run) == []
        assert leaks(soak) == []
        assert soak.counts["times resumed"] >= 4, soak.counts
        assert soak.counts["checkpoints refused"] == 1, soak.counts
        assert soak.counts["writes that failed"] >= 1, soak.counts
