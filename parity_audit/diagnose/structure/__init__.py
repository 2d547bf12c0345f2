"""Find causes outside the formulas (other weights, other inputs, other embedding rows) from the input and output of
one component."""
