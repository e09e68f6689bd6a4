"""Measurements: values of any number of channels and of any type in files, their space, and their scores."""

from rectified_flow.measurements.folder import FieldFolder
from rectified_flow.measurements.scores import spectra
from rectified_flow.measurements.space import Fields

__all__ = ["FieldFolder", "Fields", "spectra"]
