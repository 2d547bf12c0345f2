"""What runs inside a worker: one small Protocol, one file per backend, no model names. Nobody imports this from the parent."""
