"""Run one audit: capture the reference and its judge, judge every candidate in turn, and build the report and the exit code."""
