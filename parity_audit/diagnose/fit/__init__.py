"""Fit knob values: compute a component from its captured inputs by a formula and compare the result with the
capture."""
