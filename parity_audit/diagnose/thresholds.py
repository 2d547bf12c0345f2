"""Limits that several steps share: what rounding leaves, what is the same, what explains a difference, how much is written out."""

FEW_ROUNDINGS = 16.0
"""Roundings of the dtype that a value may be off by which one more operation, or one more block, has rounded."""
MANY_ROUNDINGS = 64.0
"""Roundings of the dtype that a sum over a thousand terms may be off by: it leaves some thirty."""
CLEAN = 2e-5
"""What float32 rounding may leave of a tensor, relative: sums of ten thousand terms leave a hundred roundings."""

CLEARLY_MORE = 4.0
"""One law is better than another where the other leaves so many times more. A law with more freedom that is no better leaves about
as much, and a wrong place of rounding leaves many times what the right one does. A run is told from rounding by as many floors."""
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
NEAR = 0.01
"""The same for values that few tokens show, or that are fitted beside others: each is known to two digits or three."""
NEARLY_ALL = 0.99
"""Share of the tokens or channels that a rule has to tell for it to be said of all of them: single ones may be right or wrong by
chance."""
MAJORITY = 0.5
"""Share from which most of a part (of a head's channels, of the wrong tokens) stand for all of it."""
LEFT_OUT = 0.25
"""Share of the tokens, or of the directions, of which a value or a description may say nothing: one that is compared with few of
them would explain everything."""
MOST_UNEXPLAINED = 0.1
"""Share of a difference, or of the numbers that are wrong, that a cause may leave where none leaves rounding. One that leaves more
explains nothing, however much worse the others are: factors for every row leave 0.4 of keys that are cut off at 1."""
SHOWN = 8
"""Ids, channels, rows or differences that are written out one by one; of more, their number is said."""
