"""What no formula explains: other tensors, other inputs, other rows; read off the inputs and outputs of one component."""
