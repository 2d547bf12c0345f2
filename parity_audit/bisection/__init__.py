"""Find the release of an engine that broke or repaired parity, by running releases one after the other in environments
of their own."""
