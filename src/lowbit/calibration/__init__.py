"""Calibration: statistics of the inputs of every weight of a JAX program."""
