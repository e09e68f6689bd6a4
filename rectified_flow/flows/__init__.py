"""Flows: modules that hold a network, return a loss, and sample. Here are the names of their choices, without torch."""

from typing import Literal

Coupling = Literal["independent", "ot", "immiscible"]
Prediction = Literal["velocity", "clean", "noise"]
Distance = Literal["mse", "pseudo_huber"]
ObjectiveName = Literal["mean_flow", "improved_mean_flow", "so_flow"]
Solver = Literal["euler", "midpoint", "heun", "stochastic", "adaptive"]
TimeGrid = Literal["uniform", "shifted", "edm"]
