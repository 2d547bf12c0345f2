"""Knob values from what formulas leave: compute a component from its captured inputs, and compare with what was captured."""
