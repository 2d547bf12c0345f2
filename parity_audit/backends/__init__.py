"""Code that runs inside a worker: one small Protocol and one file per backend, without model names.

The rest of the package does not import it. The one exception is `parity_audit.workers.live`: the worker of a live model is the
process that holds the model.
"""
