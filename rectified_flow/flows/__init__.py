"""Flows: modules that hold a network, return a loss, and sample.

Here are the names of their choices, and a default that flags share with them. Nothing here imports torch.
"""

from typing import Annotated, Literal

from annotated_types import Interval

Share = Annotated[float, Interval(ge=0, le=1)]
"""Bounds in annotations are checked where a flag, a description or an argument has the value."""
Steps = Annotated[int, Interval(gt=0)]
Strength = Annotated[float, Interval(gt=0, le=1)]
Coupling = Literal["independent", "ot", "immiscible"]
Prediction = Literal["velocity", "clean", "noise"]
Distance = Literal["mse", "pseudo_huber"]
ObjectiveName = Literal["mean_flow", "improved_mean_flow"]
Solver = Literal["euler", "midpoint", "heun", "ab2", "dpmpp_2m", "stochastic"]
TimeGrid = Literal["uniform", "shifted", "edm"]
WEIGHT_POWER = 0.75  # the default exponent of the weights of rows
