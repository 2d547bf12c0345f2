"""Limits that several fits share: when a law describes a component, when one is better than another, when values are the same."""

EXPLAINED = 0.05
"""A law describes a component where it leaves at most this share of it (rms over rms). Its constants are then read although
something smaller is wrong as well; a law of another kind leaves a share of the order of one, and its constants mean nothing."""
CLEAR = 4.0
"""One law is better than another where the other leaves so many times more. A law with more freedom that is no better leaves about
as much, and a wrong place of rounding leaves many times what the right one does."""
TIED = 3.0
"""Laws that leave at most so many times what the best one leaves explain the component as well, and are reported beside it."""
SIGMAS = 8.0
"""A value departs from another where it is so many of its standard errors away. Many heads and layers are compared, and rounding is
not independent from token to token: three or five would be met by chance."""
ALIKE = 1e-3
"""Relative difference below which fitted values (of heads, lengths or layers) are one constant: configs differ by more, float32
tables and standard errors of short probes by less."""
