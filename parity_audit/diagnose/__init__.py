"""From a mismatch to findings: where it starts, and which constants explain it."""
