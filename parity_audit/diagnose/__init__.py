"""Turn a mismatch into findings: where an error starts, and which constants or choices explain it."""
