"""Networks: tensors in, tensors out; and how they are put on a device."""

from rectified_flow.networks.placing import place
from rectified_flow.networks.unet import Unet

__all__ = ["Unet", "place"]
