"""What knobs may be said to be: the names of choices, as specs and findings write them, with what each means."""

from __future__ import annotations

import re
from typing import Any

OWN, FULL, FLOAT32, MISSING = "the checkpoint's", "full", "float32", "missing"
USUAL_SIZE = "root mean square"
UNDIVIDED = "nothing"
NORM_SIZES = (
    USUAL_SIZE, "root of the squares over n - 1", "root of the sum of squares", "mean absolute value", "largest absolute value",
    UNDIVIDED,
)  # fmt: skip
"""What a norm divides by."""
INSIDE, OUTSIDE = "inside the root", "outside the root"
"""Where the eps of a norm stands."""
TIMES_OWN = "the checkpoint's times {}"
"""What may stand in place of a stored bias or sink."""
NONE, TWICE = "none", "the checkpoint's, applied twice"
"""What may stand in place of a norm's own weight, beside the weights of the other norms of its block."""
NARROW = ("bfloat16", "float16")
PLACES_IN_A_NORM = (
    "out", "before the weight", "weight", "in", "in and out", "but for the reductions", "throughout", "up to the weight",
)  # fmt: skip
"""Where a norm rounds: its output, the normalised input, weight and bias, its input, every tensor but in sums over components,
every step, or every step before the weight."""
IN_ITS_TABLE = "cos and sin"
PLACES_IN_A_ROTATION = (IN_ITS_TABLE, "angles", "frequencies", "positions", "throughout")
"""Where a rotation rounds: its table, the angles that it is made of, their factors, or all of these. A model in a narrow dtype
rounds its table too; in another place its rounding turns by other angles."""
PLACES_IN_A_PENALTY = ("positions", "distances", "penalties", "penalties of distances")
"""Where ALiBi rounds: the positions of keys, or their distances from the query, that slopes are multiplied by; or the products. What
is the same in exact numbers, since a softmax doesn't see a constant, rounds otherwise."""
PLACES_IN_A_HEAD = ("logits", "weights", "inputs", "inputs and weights", "throughout", "logits behind the cap")
"""Where the head rounds: the product, before a factor and a cap; the unembedding; the final norm's output; both; all of these; or
the logits that come of factor and cap."""
PLACES_IN_A_ROUTER = ("logits", "weights", "throughout")
"""Where a router rounds: its logits, the weights that it makes of them, or every step between."""
BELOW_TOP = ", below the row's largest"
PLACES_IN_A_SOFTMAX = ("pattern", "throughout", "scores", f"throughout{BELOW_TOP}", f"scores{BELOW_TOP}")
"""Where a softmax rounds: the pattern, the scores on their way in (as they are, or less each row's largest), or both: what says more
comes first, since scores alone show no difference."""
PLACES_IN_SCORES = ("products", "inputs", "throughout")
"""Where scores round: the products of queries and keys, in front of scale and cap; queries and keys on their way in; or both."""
LARGEST, SMALLEST, LARGEST_ABSOLUTE = "largest logits", "smallest logits", "largest absolute logits"
STEPS = {f"the experts {step} after those of the largest logits": step for step in range(1, 8)}
OTHERS = "not the largest logits"
EXPERT_CHOICES = (LARGEST, SMALLEST, LARGEST_ABSOLUTE, *STEPS, OTHERS)
"""Which experts a router takes; `STEPS`: those that stand so many places behind; `OTHERS`: as many as it should, any others."""
CURVES = (
    "gelu", "gelu_pytorch_tanh", "quick_gelu", "silu", "relu", "relu2", "leaky_relu", "elu", "mish", "softplus", "sigmoid",
    "tanh", "linear",
)  # fmt: skip
ACTIVATIONS = (*CURVES, "none", "swiglu_clamped", "swiglu_clamped without the 1 added")
SWISH, LEAKY, CLAMPED_WITH, TIMES = "swish({})", "leaky_relu({})", "swiglu_clamped({})", " * "
MEASURED_ACTIVATIONS = {SWISH: 1.0, LEAKY: 0.1, CLAMPED_WITH: 1.0, **{f"{{}}{TIMES}{name}": 1.0 for name in CURVES}}
"""Activations with a real number (a slope, or a factor on one of the others), each with that which a search starts from."""
IN_PLACE, POST, AFTER_SUM = "in its place", "post", "after the sum (post-norm)"
ON_ATTENTION, ON_MLP = "on what attention made", "on what the MLP made"
BEFORE_ATTENTION, BEFORE_MLP = "before attention", "before the MLP"
ORDERS = (IN_PLACE, POST, AFTER_SUM, ON_ATTENTION, ON_MLP, BEFORE_ATTENTION, BEFORE_MLP)
"""Where the norms of a block stand: before its sublayers (and behind them, where the checkpoint has such norms); behind them alone
(OLMo 2); behind each sum of the stream and a sublayer (the first transformers); or one norm at the place of another."""
OWN_NORM, FIRST_NORM = "its own norm", "the norm that attention reads"
GATE_UP = ("gate activated", "up activated", "every other row of both", "halves of interleaved rows")
"""The last two: a fused tensor of gate and up is cut into every other row, or cut in halves though its rows alternate."""
NO_TOKEN, SOME_SHARES = "no token", "one expert's share, or all, of some tokens"
"""What experts leave out that take only so many tokens."""
WEIGHTED = ("outputs", "inputs", "nothing")
"""Where the weights of a mixture stand: on what experts make, on what they are given (Llama 4), or nowhere."""
POS_HEAD, HEAD_POS = "pos head d_head", "head pos d_head"
"""The order of axes in which heads are cut out of a projection, or joined for one: the latter where a transposition is missing."""
CUT_WRONG: dict[str, str] = {
    HEAD_POS: "qkv",
    **{f"{HEAD_POS} of {words}": parts for words, parts in
       (("queries and keys", "qk"), ("queries", "q"), ("keys", "k"), ("values", "v"))},
}  # fmt: skip
"""Of which of queries, keys and values heads are cut out in that order."""
BY_TOKEN, BY_EXPERT = "rows of tokens", "as if rows were of experts"
"""How the table of weights of a mixture is read: a token's row, or rows of experts where a transposition is missing."""
RULES = ("gated delta", "delta without decay", "decay without correction")
"""What becomes of the state of a linear attention at each token."""
DELTA, UNDECAYED, DECAYED = RULES
GATE_ORDERS = ("behind the norm", "in front of the norm")
GATES = ("sigmoid", "silu", "tanh", "linear", "none")
CLAMPED_PARTS = ("gate from above and linear input", "gate from above", "linear input", "gate and linear input")
"""What a clamped MLP clamps; a gate that is not clamped from above alone is clamped on both sides."""
UNIT_LENGTH = ("queries and keys", "neither", "queries", "keys")
"""What a linear attention divides by its length."""
"""Where a linear attention is gated."""
TAPS = ("in order", "reversed")
"""The order in which the weights of a convolution stand: the last one is that of the token itself, or the first one."""
CAUSAL = "causal"
MASKS = (CAUSAL, "not causal", "sees one key ahead", "hides the query's own key", "sees padding", "no mask")
"""Masks that differ from the causal one by what they show or hide; the window comes on top. Without a mask a query sees what comes
behind it and padding."""
SHOW_PADDING = ("sees padding", "no mask")
WHOLE_PREFIX, HIDDEN_START = "a prefix of {} tokens sees itself whole", "hides the first {} tokens from the others"
"""Masks with a number: the first tokens of a text see what comes behind them too (a prefix language model), or the others do not
see the first ones."""
AT_DISTANCE = "distance "
"""Before the number of a distance between query and key, as parts of a bias by distance are called."""
LOST = (
    "every key", "not the token's own", "none of the prompt", "none but its own after the prompt",
    "as many of the first as tokens were decoded", "the first alone",
)  # fmt: skip
"""Which keys a cache shows. The last two are a causal mask that is aligned with the first key, where it belongs to the last one
(`is_causal` of torch): in a step of several tokens, and in steps of one."""
EVERY_KEY, NOT_OWN, NO_PROMPT, OWN_ALONE, AS_MANY_FIRST, FIRST_ALONE = LOST
NOT_FIRST_KEYS, LAST_KEYS = "not the first {}", "the last {}"
NOT_FIRST_REAL = "not the first {} behind the padding"
"""The same as the first ones in a row without padding; in a padded row, programs that have no padding lose other keys."""
MOVES = tuple(f"values moved by {places:+d} against their keys" for places in (1, -1, 2, -2))
"""Which keys a cache shows to a decoded token, and how far the values that it holds stand from their keys: where both are moved
together, the sum over keys is the same."""
NEXT_PROMPT, FIRST_PROMPT, NEXT_ROW, FIRST_ROW = OF_ROWS = (
    "the prompt of the next row", "the prompt of the first row", "those of the next row", "those of the first row",
)  # fmt: skip
"""Whose keys and values a cache shows to a row of a batch: cached ones of the next row (of the first, for the last one) or of the
first row for all, before the first decoded token or at every place. In a batch of two rows the next one is any other."""
OVERRUN = "an empty key for the oldest once the cache is full"
"""A cache that has as many places as tokens are run, or as the window is wide, and moves all keys by one when it fills the last of
them: the oldest is lost for a place that was still empty, whose key and value are zeros."""
CACHED = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
"""Dtypes in which a cache may keep keys and values."""
OTHER_ANGLES = (
    "half pairs, turned by the angles of adjacent ones",
    "adjacent pairs, turned by the angles of half ones",
)
PAIRINGS = ("half", "adjacent", "half, written as adjacent", "adjacent, written as halves", *OTHER_ANGLES)
"""Written in the order of the other, scores are those of what comes first. The last two join components as one convention has it and
read a table that is laid out for the other, so that the two components of a pair turn by different angles."""
BY_PART = ("q", "k")
"""The parts of a value that queries and keys have each for themselves."""
BOTH, Q_ONLY, K_ONLY, VALUES_TOO = "q and k", "q only", "k only", "q, k and v"
"""What is rotated."""
FACTORS = "factors"
AT_EVERY_LENGTH = ("short at every length", "long at every length")
"""The part of a scaling that says so, and which of LongRoPE's two lists a program takes that never looks at the length of a text."""
LONG_TEXT = 256
"""Tokens of a text beyond which a base that depends on the length may be another: short probes are no longer."""
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
BETAS = ((32.0, 1.0), (16.0, 1.0), (8.0, 1.0), (64.0, 1.0), (32.0, 2.0), (16.0, 2.0))
SCALINGS: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 2.0}, LLAMA3, {**LLAMA3, "low_freq_factor": 0.5, "high_freq_factor": 8.0},
    *({"rope_type": "yarn", "factor": 8.0, "beta_fast": fast, "beta_slow": slow, "truncate": whole,
       "original_max_position_embeddings": context} for context in (4096, 8192) for fast, slow in BETAS for whole in (True, False)),
    {"rope_type": "dynamic", "beyond": LONG_TEXT, "theta_there": 1e5},
)  # fmt: skip
"""Scalings of released models, from which the law behind a table of frequencies is searched. Only quotients of the original context
and the thresholds can be seen, so that it stays at that of Llama 3.1 or of the paper on YaRN;
where YaRN's thresholds are rounded to whole pairs, several betas make one table."""
NOT_REPEATED = "none"
OF_SECOND, OF_FIRST, OF_SECOND_WITHIN = (
    "this block, whose second run is shown", "this block, whose first run is shown",
    "this block, of whose second run all but the input is shown",
)  # fmt: skip
BLOCK_BEFORE = "the block before"
REPEATED = {OF_SECOND: 0, BLOCK_BEFORE: 1}
"""The block that is run once more between two blocks: how many places before the second one it stands.

What hooks keep of a block that is run twice is the first call or the second, and a hook around both runs shows the input of the
first beside the output of the second."""
FORWARD, INVERSE, EXCHANGED = "forward", "inverse", "cosines and sines exchanged"
NO_MINUS, BOTH_MINUS = "a minus sign on neither sine", "a minus sign on both sines"
NO_SINES, NO_COSINES = "without its sines", "without its cosines"
NO_SINE_OF_FIRST, NO_SINE_OF_SECOND = (
    "without the sine in the first of each pair",
    "without the sine in the second of each pair",
)
DIRECTIONS = (
    FORWARD,
    INVERSE,
    EXCHANGED,
    NO_MINUS,
    BOTH_MINUS,
    NO_SINES,
    NO_COSINES,
    NO_SINE_OF_FIRST,
    NO_SINE_OF_SECOND,
)
"""The sense of a rotation, a table whose two halves have changed places, or sines with signs that make no rotation; or one of which
terms are left out."""
ON_SCORES, ON_QUERIES = "on scores", "on queries"
"""Where q.k is divided: behind the product, or on the queries before it."""
PLACES = "places"
"""What a temperature by position may count instead of positions: places in a row, padding with them."""
CLAMPED = "clamped at {}"
"""A bound beyond which a number is cut off, where a soft-cap would bend it."""
WITH_MORE = "softmax with {} added to the sum"
"""A softmax of which a number is added to the sum that it divides by."""
WITH_MORE_BELOW_TOP = "softmax of scores less the largest, with {} added to the sum"
"""The same of a sum of numbers the largest of which is 1."""
LEFT_OUT, LESS, AS_MINUS = "left out", "kept, less {}", "kept as -{}"
"""What becomes of the score of a key that a query may not see: the latter two are masks of a finite number, taken from the score
or put in its place (as by a mask in front of a soft-cap, which makes minus its bound of it)."""
OTHER_LAWS = (CLAMPED, WITH_MORE, WITH_MORE_BELOW_TOP, LESS, AS_MINUS)
"""Words with a number that say another law than the usual one, and not a multiple of what the checkpoint holds."""
SOFTMAX, SOFTMAX_TWICE, SOFTMAX_WITH_ONE = "softmax", "softmax twice", WITH_MORE.format(1)
OVER_QUERIES, OVER_HEADS = "softmax over queries", "softmax over heads"
LAWS = (
    SOFTMAX, SOFTMAX_TWICE, SOFTMAX_WITH_ONE, OVER_QUERIES, OVER_HEADS,
    "sigmoid of the scores", "relu of the scores", "squared relu of the scores",
    "the scores themselves", "exp of the scores",
)  # fmt: skip
"""What makes the weights of the values from the scores."""
ZERO_SINKS = "0 in every head (softmax off by one)"
POSITIONS_PER_STEP = (4, 16, 64, 256, 1024, 4096, 8192)
"""Steps of a temperature by position that are tried; released models have 4096 and 8192."""
ROTATED_PARTS = (0.25, 0.5, 0.75)
"""Shares of a head that are rotated where the rest has frequency 0, which are tried; Gemma 4 has 0.25."""
EVERY_STREAM, NOT_FIRST, NOT_ACTIVE = "every stream", "every stream but the first", "every stream but the active one"
"""The streams that what a block makes of its own embeddings is added to."""
POPULATION, SAMPLE = "of all components", "of a sample"
"""The variance that divides by the number of components, and the one that divides by one less."""
FROM_PADDING, AGAIN = "counted from the padding", "counted again from the first decoded token"
AT_ZERO, AT_END = "0 at decoded tokens", "that of the last token of the prompt at decoded tokens"
STANDS = (FROM_PADDING, AGAIN, AT_ZERO, AT_END)
"""Where tokens may stand instead of their positions; in tokens that are decoded from a cache, all but the first."""
STOP_AT, START_AGAIN, JUMP, STAND_STILL = (
    "stop at {}", "start again after {}", "{} from token {} on", "all at {} from token {} on",
)  # fmt: skip
"""Where tokens of a whole run stand instead: up to a last position, which all others have too; from 0 again behind one; so many
positions further, or all at one position, from a token on."""
ROUNDED_TO = {f"rounded to {name}": name for name in NARROW}
"""Rows of a table of positions that are counted in a narrow dtype: bfloat16 holds every number up to 256, float16 up to 2048."""
AND_MORE = " + "
"""Before the number that a model adds to positions anyway (OPT adds 2), behind the words that say where tokens stand."""
TOKEN = "token "
"""Before the number of a token, as parts of positions that are said one by one are called."""
STEPS_ASIDE = (1.0, -1.0, 2.0, -2.0, 3.0, -3.0, 4.0, -4.0, 5.0, -5.0, 6.0, -6.0, 7.0, -7.0, 8.0, -8.0)
"""Offsets of positions that are tried one by one: a rotation that is several radians off has no slope towards the right one."""


def and_more(words: str, number: Any) -> str:
    """Words that say where tokens stand in a model that adds this number to positions anyway."""
    return f"{words}{AND_MORE}{number}" if number else words


def numbers_in(words: str, template: str) -> list[int] | list[None]:
    """The whole numbers that stand in the places of `{}`; None in each where these are other words."""
    found = re.fullmatch(re.escape(template).replace(r"\{\}", r"([+-]?\d+)"), words)
    return [None] * template.count("{}") if found is None else [int(number) for number in found.groups()]


def number_in(words: object, template: str) -> float | None:
    """The real number that stands in the place of `{}`; None where these are other words."""
    before, after = template.split("{}")
    said = str(words)
    own = said[len(before) : len(said) - len(after)]
    try:
        return float(own) if said == f"{before}{own}{after}" else None
    except ValueError:
        return None


def with_number_in(template: str, number: float) -> str:
    """The words with a real number in the place of `{}`, as short as it can be written."""
    return template.format(repr(float(number)).removesuffix(".0"))
