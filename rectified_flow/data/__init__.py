"""Data: from a hub id, a folder or our own drawing to a uint8 memory map and a deterministic stream over it."""

from rectified_flow.data.catalog import open_dataset
from rectified_flow.data.image_store import ImageDataset
from rectified_flow.data.oxford_flowers import OxfordFlowersDataset

__all__ = ["ImageDataset", "OxfordFlowersDataset", "open_dataset"]
