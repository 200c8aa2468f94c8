"""Calibration text to mapper."""

from .fit import fit_mapper


__all__ = ["fit_mapper"]
