"""Scores, pattern and z: scale, cap, window, mask, biases, sinks, the law of the weights, which head reads which values."""
