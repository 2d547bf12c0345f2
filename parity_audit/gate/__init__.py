"""The gate of a pull request: judge what a change touches, as cases that each have a status and a line to repair."""
