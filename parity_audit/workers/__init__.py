"""The parent's end of the wire: spawn a worker, ask, time out, kill."""
