"""Checks beside the search for a cause: inputs and weights match, the reference agrees with itself, the smallest detectable
errors, and whether hooks show and accept the tensors that their names promise."""
