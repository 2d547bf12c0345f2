"""One audit from start to exit code: the reference's side, each candidate in turn, the report."""
