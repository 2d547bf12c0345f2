"""The gate of a pull request: what a change touches, judged, each case with a status and a line to mend."""
