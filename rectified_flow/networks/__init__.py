"""Networks: tensors in, tensors out."""

from rectified_flow.networks.unet import Unet

__all__ = ["Unet"]
