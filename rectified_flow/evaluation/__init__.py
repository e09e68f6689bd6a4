"""Metrics that compare generated images with real ones."""

from typing import Literal

FeatureNetwork = Literal["inception", "efficientnet_lite0"]
