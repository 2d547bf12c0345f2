"""One file per knob family: `fit(evidence)` reads a constant off one side's activations; the maths is in each docstring."""
