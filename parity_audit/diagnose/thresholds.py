"""Limits that several steps of a diagnosis share: when a law is better than another, or as good, and what is too little to read."""

CLEAR = 4.0
"""One law is better than another where the other leaves so many times more. A law with more freedom that is no better leaves about
as much, and a wrong place of rounding leaves many times what the right one does."""
TIED = 3.0
"""Laws that leave at most so many times what the best one leaves explain the component as well, and are reported beside it."""
FEWEST_TOKENS = 4
"""Tokens from which a number for each channel, or a value for each token, is read off: with one it would explain everything."""
ALIKE = 1e-3
"""Numbers of a description are one where they are no further apart than this, relative: what float32 leaves of them is a thousand
times less, and what programs lose, double or take from elsewhere moves them by far more."""
SAME_VALUE = 1e-4
"""Values that were read apart (in two layers, of two sites) are one where they are no further apart than this, relative: each is
known to five digits or six in float32."""
