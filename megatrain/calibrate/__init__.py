"""Calibration: this machine as a `HardwareProfile`, measured with the project's own kernels and copies."""

from megatrain.calibrate.calibrate import Progress, calibrate

__all__ = ["Progress", "calibrate"]
