"""Limits that several fits share: when a law describes a component, when one is better than another, when values are the same."""

CLEAR = 4.0
"""One law is better than another where the other leaves so many times more. A law with more freedom that is no better leaves about
as much, and a wrong place of rounding leaves many times what the right one does."""
TIED = 3.0
"""Laws that leave at most so many times what the best one leaves explain the component as well, and are reported beside it."""
SIGMAS = 8.0
"""A value departs from another where it is so many of its standard errors away. Many heads and layers are compared, and rounding is
not independent from token to token: three or five would be met by chance."""
