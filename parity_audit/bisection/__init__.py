"""Which release of an engine broke or repaired parity: releases run one after the other, each in its own environment."""
