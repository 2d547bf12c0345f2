"""Thresholds that several steps share: what counts as rounding, as equal, as an explanation, and how much is listed."""

FEW_ROUNDINGS = 16.0
"""Roundings of the dtype by which a value may be off after one more operation, or one more block, has rounded it."""
MANY_ROUNDINGS = 64.0
"""Roundings of the dtype by which a sum over a thousand terms may be off: such a sum causes some thirty."""
CLEAN = 2e-5
"""Relative residual of a tensor that float32 rounding may leave: sums of ten thousand terms cause a hundred roundings."""

CLEARLY_MORE = 4.0
"""A formula is better than another if the other's residual is more than this many times as large. A formula with more
freedom that is no better leaves about the same residual, and a wrong place of rounding leaves many times the residual
of the right one. A run is distinguished from rounding if its error is more than this many noise floors."""
TIED = 3.0
"""Formulas whose residual is at most this many times that of the best one explain the component as well, and are
reported beside it."""
FEWEST_TOKENS = 4
"""Number of tokens needed to fit a number for each channel, or a value for each token: with a single token, any such
fit would explain everything."""
ALIKE = 1e-3
"""Relative difference up to which the numbers of two descriptions are equal. Float32 rounding moves them by a thousand
times less, and programs that drop, double or misplace a value move them by far more."""
SAME_VALUE = 1e-4
"""Relative difference up to which values that were fitted separately (in two layers, at two sites) are equal: in
float32 each is known to five or six digits."""
NEAR = 0.01
"""The same for values that few tokens show, or that are fitted together with others: each is known to two or three
digits."""
NEARLY_ALL = 0.99
"""Share of the tokens or channels that a rule has to classify correctly to be reported for all of them: single ones may
be right or wrong by chance."""
MAJORITY = 0.5
"""Share from which on a part of a set (of a head's channels, of the wrong tokens) stands for all of it."""
LEFT_OUT = 0.25
"""Share of the tokens, or of the directions, that a value or a description may leave out: one that is compared with
only few of them would explain everything."""
MOST_UNEXPLAINED = 0.1
"""Share of a difference, or of the wrong numbers, that a cause may leave if no cause leaves only rounding. A cause that
leaves more explains nothing, however much worse the others are: for example, factors for every row leave 0.4 of keys
that are clipped at 1."""
SHOWN = 8
"""Number of ids, channels, rows or differences that are listed; of more, only their number is given."""
