"""Networks: tensors in, tensors out."""

from rectified_flow.networks.placing import place
from rectified_flow.networks.unet import Unet

__all__ = ["Unet", "place"]
