"""Test whether an inference engine's log-probabilities of sampled tokens agree with the trainer's, on the same token ids."""
