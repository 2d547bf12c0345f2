"""Do an engine's log-probabilities agree with the trainer's? Sampled tokens, the same ids on every leg."""
