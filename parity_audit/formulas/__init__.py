"""The formulas of a decoder's components: plain functions of inputs, weights and knob values, in the dtype of their inputs."""
