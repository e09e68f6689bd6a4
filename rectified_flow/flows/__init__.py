"""Flows: objectives that hold a network, return a loss, and sample."""

from rectified_flow.flows.flow import Flow
from rectified_flow.flows.mean import MeanFlow
from rectified_flow.flows.rectified import RectifiedFlow

__all__ = ["Flow", "MeanFlow", "RectifiedFlow"]
