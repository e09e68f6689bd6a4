"""Latents: pictures as a frozen autoencoder encodes them, their store and their space."""

from rectified_flow.latents.autoencoders import Autoencoder, Small
from rectified_flow.latents.in_step import LatentsInStep
from rectified_flow.latents.space import LatentDataset, Latents, encode_pictures

__all__ = ["Autoencoder", "LatentDataset", "Latents", "LatentsInStep", "Small", "encode_pictures"]
