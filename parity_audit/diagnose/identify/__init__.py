"""One file per knob family: `fit(evidence)` reads constants off one side's activations, its maths in the docstring."""
