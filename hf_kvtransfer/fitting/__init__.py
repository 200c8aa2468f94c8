"""Calibration text to mapper."""

from .distill import distill_mapper
from .fit import fit_mapper
from .readout import calibrate_readout
from .residual import train_residuals


__all__ = ["calibrate_readout", "distill_mapper", "fit_mapper", "train_residuals"]
