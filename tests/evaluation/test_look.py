"""The sheet of training pictures shows pictures of every class."""

import numpy as np

from rectified_flow.evaluation.look import spread


def test_a_sheet_shows_each_class() -> None:
    labels = np.repeat(np.arange(102), 20)
    chosen = spread(labels, 64)
    assert len(set(labels[chosen])) == 64
    assert max(labels[chosen]) > 98
    few = spread(np.array([0] * 100 + [1] * 3 + [2] * 100), 9)
    assert np.bincount(np.array([0] * 100 + [1] * 3 + [2] * 100)[few]).tolist() == [3, 3, 3]
    assert spread(np.array([-1] * 5), 64) == [0, 1, 2, 3, 4]
    assert np.bincount(np.array([0] * 100 + [1])[spread(np.array([0] * 100 + [1]), 64)]).tolist() == [63, 1]
