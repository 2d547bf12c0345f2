"""The components of a decoder, each a plain function of its inputs, weights and knob values, in the dtype of its inputs."""
