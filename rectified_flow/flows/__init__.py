"""Flows: objectives that hold a network, return a loss, and sample."""

from rectified_flow.flows.mean import MeanFlow
from rectified_flow.flows.rectified import RectifiedFlow

__all__ = ["MeanFlow", "RectifiedFlow"]
