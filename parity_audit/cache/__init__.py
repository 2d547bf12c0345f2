"""The cache directory: where things are, who uses them, whether they are still what was written."""
