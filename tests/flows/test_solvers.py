"""Orders of accuracy of the solvers."""

from math import log2

import pytest
import torch

from rectified_flow.flows.solvers import SOLVERS, Solver, integrate
from tests.analytic import image_gaussian


@pytest.mark.parametrize("solver", SOLVERS)
def test_order(solver: Solver) -> None:
    """Halving the step divides the error by two to the order."""
    order = {"euler": 0.9, "midpoint": 1.9, "heun": 1.9}[solver]
    data = image_gaussian()
    torch.manual_seed(0)
    x = torch.randn(64, 3, 4, 4, dtype=torch.float64)
    exact = data.flow_map(x, 0.9, 0.1)

    def error(steps: int) -> float:
        times = torch.linspace(0.9, 0.1, steps + 1, dtype=torch.float64).tolist()
        end = integrate(lambda x, t: data.velocity(x, torch.tensor(t)), x, times, solver)
        return (end - exact).abs().mean().item()

    assert log2(error(40) / error(80)) > order
