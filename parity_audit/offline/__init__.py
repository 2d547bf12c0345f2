"""Functions that only read files on disk (captures, reports, the cache): no model is loaded, no engine is started."""
