"""Whole steps of masked samplers on the device, in fixed shapes."""
