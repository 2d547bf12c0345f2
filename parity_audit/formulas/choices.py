"""The named values of knobs, as specs and findings write them, and what each of them means.

A name with `{}` is a template that has a number in this place.
"""

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
"""The sizes of the input that a norm may divide by."""
INSIDE, OUTSIDE = "inside the root", "outside the root"
"""Where the eps of a norm is added: to the mean square inside the root, or to the root."""
TIMES_OWN = "the checkpoint's times {}"
"""A stored bias or sink multiplied by a number."""
NONE, TWICE = "none", "the checkpoint's, applied twice"
"""What a program may use in place of a norm's own weight (it may also use the weight of another norm of the block)."""
NARROW = ("bfloat16", "float16")
PLACES_IN_A_NORM = (
    "out", "before the weight", "weight", "in", "in and out", "but for the reductions", "throughout", "up to the weight",
)  # fmt: skip
"""Where a norm rounds, in this order: its output; the normalised input before the weight; weight and bias; its input; input and
output; every tensor except inside the sums over components; every step; every step before the weight."""
IN_ITS_TABLE = "cos and sin"
PLACES_IN_A_ROTATION = (IN_ITS_TABLE, "angles", "frequencies", "positions", "throughout")
"""Where a rotation rounds: the table of cosines and sines, the angles, the two factors of the angles, or all of these. A model that
runs in a narrow dtype rounds its table anyway; rounding in another place changes the angles."""
PLACES_IN_A_PENALTY = ("positions", "distances", "penalties", "penalties of distances")
"""Where ALiBi rounds: the positions of keys or their distances from the query, which are multiplied by the slopes, or the products.
Positions and distances give the same softmax in exact arithmetic (they differ by a constant per query), but round differently."""
PLACES_IN_A_HEAD = ("logits", "weights", "inputs", "inputs and weights", "throughout", "logits behind the cap")
"""Where the unembedding rounds: the logits before factor and cap; its weight and bias; its input (the final norm's output); inputs
and weights; all of these; or the logits after factor and cap."""
PLACES_IN_AN_MLP = ("activation", "input and activation")
"""Where an MLP may round between its projections: what the activation gives, or what it reads as well."""
PLACES_IN_A_ROUTER = ("logits", "weights", "throughout")
"""Where a router rounds: its logits, the weights computed from them, or every step from the logits to the weights."""
BELOW_TOP = ", below the row's largest"
PLACES_IN_A_SOFTMAX = ("pattern", "throughout", "scores", f"throughout{BELOW_TOP}", f"scores{BELOW_TOP}")
"""Where a softmax rounds: the pattern, the scores that enter it (as they are, or after each row's largest was subtracted), or both.
A value that rounds both comes before the one that rounds the scores alone, because rounding scores that are rounded already changes
nothing."""
PLACES_IN_SCORES = ("products", "inputs", "throughout")
"""Where scores round: the products of queries and keys, before scale and cap; the queries and keys; or both."""
LARGEST, SMALLEST, LARGEST_ABSOLUTE = "largest logits", "smallest logits", "largest absolute logits"
STEPS = {f"the experts {step} after those of the largest logits": step for step in range(1, 8)}
OTHERS = "not the largest logits"
EXPERT_CHOICES = (LARGEST, SMALLEST, LARGEST_ABSOLUTE, *STEPS, OTHERS)
"""Which experts a router takes. `STEPS`: the experts whose index is higher by 1 to 7 (after the last comes the first). `OTHERS`: as
many experts as it should take, but others, which only a capture can show."""
CURVES = (
    "gelu", "gelu_pytorch_tanh", "quick_gelu", "silu", "relu", "relu2", "leaky_relu", "elu", "mish", "softplus", "sigmoid",
    "tanh", "linear",
)  # fmt: skip
ACTIVATIONS = (*CURVES, "none", "swiglu_clamped", "swiglu_clamped without the 1 added")
SWISH, LEAKY, CLAMPED_WITH, TIMES = "swish({})", "leaky_relu({})", "swiglu_clamped({})", " * "
MEASURED_ACTIVATIONS = {SWISH: 1.0, LEAKY: 0.1, CLAMPED_WITH: 1.0, **{f"{{}}{TIMES}{name}": 1.0 for name in CURVES}}
"""Activations with a real number (a slope, or a factor on one of `CURVES`), each with the number from which a search starts."""
IN_PLACE, POST, AFTER_SUM = "in its place", "post", "after the sum (post-norm)"
ON_ATTENTION, ON_MLP = "on what attention made", "on what the MLP made"
BEFORE_ATTENTION, BEFORE_MLP = "before attention", "before the MLP"
ORDERS = (IN_PLACE, POST, AFTER_SUM, ON_ATTENTION, ON_MLP, BEFORE_ATTENTION, BEFORE_MLP)
"""Where the norms of a block are applied: before its sublayers (and after them, if the checkpoint has such norms); only after them
(OLMo 2); after each sum of the stream and a sublayer's output (the first transformers); or one norm at the place of another."""
OWN_NORM, FIRST_NORM = "its own norm", "the norm that attention reads"
GATE_UP = ("gate activated", "up activated", "every other row of both", "halves of interleaved rows")
"""How gate and up are taken. The last two are errors of cutting a fused tensor of both: every second row is taken though the tensor
holds the gate first and then up, or the tensor is cut in halves though its rows alternate."""
NO_TOKEN, SOME_SHARES = "no token", "one expert's share, or all, of some tokens"
"""What is missing from the routed sum if each expert accepts a limited number of tokens: nothing, or for some tokens one expert's
share or all shares."""
WEIGHTED = ("outputs", "inputs", "nothing")
"""What the weights of a mixture multiply: the outputs of the experts, their inputs (Llama 4), or nothing."""
POS_HEAD, HEAD_POS = "pos head d_head", "head pos d_head"
"""The order of axes in which a projection is cut into heads, or heads are joined for a projection. `HEAD_POS` is the error of a
program that leaves out a transposition."""
CUT_WRONG: dict[str, str] = {
    HEAD_POS: "qkv",
    **{f"{HEAD_POS} of {words}": parts for words, parts in
       (("queries and keys", "qk"), ("queries", "q"), ("keys", "k"), ("values", "v"))},
}  # fmt: skip
"""Which of queries ("q"), keys ("k") and values ("v") are cut into heads in the order `HEAD_POS`, by value of `attention.cut`."""
BY_TOKEN, BY_EXPERT = "rows of tokens", "as if rows were of experts"
"""How the table of a mixture's weights is read: one row per token, or as if it had one row per expert because a transposition is
missing."""
RULES = ("gated delta", "delta without decay", "decay without correction")
"""How the state of a linear attention is updated at each token."""
DELTA, UNDECAYED, DECAYED = RULES
GATE_ORDERS = ("behind the norm", "in front of the norm")
"""Where the gate of a linear attention is applied."""
GATES = ("sigmoid", "silu", "tanh", "linear", "none")
CLAMPED_PARTS = ("gate from above and linear input", "gate from above", "linear input", "gate and linear input")
"""Which inputs a clamped MLP clamps. The linear input is clamped on both sides, the gate only from above if the name says so."""
UNIT_LENGTH = ("queries and keys", "neither", "queries", "keys")
"""Which vectors a linear attention normalises to unit length."""
TAPS = ("in order", "reversed")
"""The order of a convolution's weights: the last weight belongs to the token itself ("in order"), or the first one ("reversed")."""
CAUSAL = "causal"
MASKS = (CAUSAL, "not causal", "sees one key ahead", "hides the query's own key", "sees padding", "no mask")
"""The causal mask, and masks that show or hide other keys; a window is applied in addition. With "no mask" a query sees later tokens
and padding."""
SHOW_PADDING = ("sees padding", "no mask")
WHOLE_PREFIX, HIDDEN_START = "a prefix of {} tokens sees itself whole", "hides the first {} tokens from the others"
"""Masks with a number: the first tokens of a text also see the later ones among them (a prefix language model), or the later tokens
do not see the first ones."""
AT_DISTANCE = "distance "
"""The prefix of the keys of a bias by distance: "distance 3" is the bias for a query three tokens after the key."""
LOST = (
    "every key", "not the token's own", "none of the prompt", "none but its own after the prompt",
    "as many of the first as tokens were decoded", "the first alone",
)  # fmt: skip
"""Which keys a cache shows to a decoded token. The last two result from a causal mask that is aligned with the first key instead of
the last one (`is_causal` of torch), in a decode step of several tokens and in decode steps of one token."""
EVERY_KEY, NOT_OWN, NO_PROMPT, OWN_ALONE, AS_MANY_FIRST, FIRST_ALONE = LOST
NOT_FIRST_KEYS, LAST_KEYS = "not the first {}", "the last {}"
NOT_FIRST_REAL = "not the first {} behind the padding"
"""The same as `NOT_FIRST_KEYS` in a row without padding. In a padded row the two differ: a program that stores no padding loses the
first real tokens."""
MOVES = tuple(f"values moved by {places:+d} against their keys" for places in (1, -1, 2, -2))
"""By how many places a cache moves its values against their keys. Moving keys and values together would not change the sum over
keys."""
NEXT_PROMPT, FIRST_PROMPT, NEXT_ROW, FIRST_ROW = OF_ROWS = (
    "the prompt of the next row", "the prompt of the first row", "those of the next row", "those of the first row",
)  # fmt: skip
"""Whose keys and values a cache shows to a row of a batch: those of the next row (the last row gets those of the first) or those of
the first row, either for the prompt only or at every place. In a batch of two rows, the next row is the only other row."""
SHIFTED_WHEN_FULL = "an empty key for the oldest once the cache is full"
"""A cache that has one place per token of the run, or per token of the window, and moves all keys by one too early, in the step that
fills the last place: the oldest key is lost, and an empty place, whose key and value are zeros, is attended to instead."""
CACHED = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
"""Dtypes in which a cache may store keys and values."""
OTHER_ANGLES = (
    "half pairs, turned by the angles of adjacent ones",
    "adjacent pairs, turned by the angles of half ones",
)
PAIRINGS = ("half", "adjacent", "half, written as adjacent", "adjacent, written as halves", *OTHER_ANGLES)
"""Which components of a head form a pair, and in which order the rotated ones are written. The order of writing doesn't change the
scores: "half, written as adjacent" gives those of "half". The last two form pairs by one convention but read a table laid out for
the other, so that the two components of a pair turn by different angles."""
QUERY_KEY_PARTS = ("q", "k")
"""The keys of a value that differs between queries ("q") and keys ("k")."""
BOTH, Q_ONLY, K_ONLY, VALUES_TOO = "q and k", "q only", "k only", "q, k and v"
"""What is rotated."""
FACTORS = "factors"
AT_EVERY_LENGTH = ("short at every length", "long at every length")
"""Which of LongRoPE's two lists a program uses for texts of any length; a scaling has this value under the key `FACTORS`."""
LONG_TEXT = 256
"""The number of tokens beyond which a base that depends on the text's length may differ; no short probe is longer than this."""
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
BETAS = ((32.0, 1.0), (16.0, 1.0), (8.0, 1.0), (64.0, 1.0), (32.0, 2.0), (16.0, 2.0))
SCALINGS: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 2.0}, LLAMA3, {**LLAMA3, "low_freq_factor": 0.5, "high_freq_factor": 8.0},
    *({"rope_type": "yarn", "factor": 8.0, "beta_fast": fast, "beta_slow": slow, "truncate": whole,
       "original_max_position_embeddings": context} for context in (4096, 8192) for fast, slow in BETAS for whole in (True, False)),
    {"rope_type": "dynamic", "beyond": LONG_TEXT, "theta_there": 1e5},
)  # fmt: skip
"""Scalings of released models, from which a search for the scaling behind a measured table of frequencies starts. The table depends
only on the quotients of the original context and the thresholds, so the context is that of Llama 3.1 or of the YaRN paper. If YaRN's
thresholds are rounded to whole pairs, several betas give the same table."""
NOT_REPEATED = "none"
OF_SECOND, OF_FIRST, OF_SECOND_WITHIN = (
    "this block, whose second run is shown", "this block, whose first run is shown",
    "this block, of whose second run all but the input is shown",
)  # fmt: skip
BLOCK_BEFORE = "the block before"
REPEATED = {OF_SECOND: 0, BLOCK_BEFORE: 1}
"""Which block is run once more before a block: the number of blocks to go back from it (0: the block itself).

If a block is run twice, hooks capture the first call (`OF_FIRST`) or the second one (`OF_SECOND`), and a hook around both calls
captures the input of the first and the output of the second (`OF_SECOND_WITHIN`)."""
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
"""The direction of a rotation, or an error in its formula: cosines and sines exchanged, signs of the sines that give no rotation, or
terms left out."""
ON_SCORES, ON_QUERIES = "on scores", "on queries"
"""Where the scale divides: the product q.k, or the queries before the product."""
PLACES = "places"
"""A temperature by position may count places in the row, with padding, instead of positions, which leave padding out."""
CLAMPED = "clamped at {}"
"""A hard limit on a number, used in place of a soft-cap, which approaches its bound smoothly."""
WITH_MORE = "softmax with {} added to the sum"
"""A softmax with a number added to the sum in its denominator."""
WITH_MORE_BELOW_TOP = "softmax of scores less the largest, with {} added to the sum"
"""The same, but added after the largest score was subtracted, so that the largest term of the sum is 1."""
LEFT_OUT, LESS, AS_MINUS = "left out", "kept, less {}", "kept as -{}"
"""How the score of a hidden key is masked: the key is left out, or a finite number is subtracted from its score, or the score is
replaced by minus a finite number (a mask applied before a soft-cap, for example, leaves minus the bound of the cap)."""
OTHER_FORMULAS = (CLAMPED, WITH_MORE, WITH_MORE_BELOW_TOP, LESS, AS_MINUS)
"""Templates that name another formula than the usual one; a template like `TIMES_OWN` only multiplies what the checkpoint holds."""
SOFTMAX, SOFTMAX_TWICE, SOFTMAX_WITH_ONE = "softmax", "softmax twice", WITH_MORE.format(1)
OVER_QUERIES, OVER_HEADS = "softmax over queries", "softmax over heads"
LAWS = (
    SOFTMAX, SOFTMAX_TWICE, SOFTMAX_WITH_ONE, OVER_QUERIES, OVER_HEADS,
    "sigmoid of the scores", "relu of the scores", "squared relu of the scores",
    "the scores themselves", "exp of the scores",
)  # fmt: skip
"""How the weights of the values are computed from the scores."""
ZERO_SINKS = "0 in every head (softmax off by one)"
POSITIONS_PER_STEP = (4, 16, 64, 256, 1024, 4096, 8192)
"""The steps of a temperature by position that a search tries; released models have 4096 and 8192."""
ROTATED_PARTS = (0.25, 0.5, 0.75)
"""The shares of a head that a search tries as the rotated part, the rest having frequency 0; Gemma 4 has 0.25."""
EVERY_STREAM, NOT_FIRST, NOT_ACTIVE = "every stream", "every stream but the first", "every stream but the active one"
"""The streams to which a block adds the output of its per-layer embeddings."""
POPULATION, SAMPLE = "of all components", "of a sample"
"""The variance divided by the number of components, and the one divided by that number minus 1."""
FROM_PADDING, AGAIN = "counted from the padding", "counted again from the first decoded token"
AT_ZERO, AT_END = "0 at decoded tokens", "that of the last token of the prompt at decoded tokens"
WRONG_POSITIONS = (FROM_PADDING, AGAIN, AT_ZERO, AT_END)
"""Which positions a program may give tokens instead of the right ones. All but the first value apply to decoded tokens only."""
STOP_AT, START_AGAIN, JUMP, STAND_STILL = (
    "stop at {}", "start again after {}", "{} from token {} on", "all at {} from token {} on",
)  # fmt: skip
"""Wrong positions in a run without a cache: all later tokens have a last position; positions start again from 0 after a position;
from a token on, positions are higher by a number; from a token on, all tokens have one position."""
ROUNDED_TO = {f"rounded to {name}": name for name in NARROW}
"""Positions that are counted in a narrow dtype: bfloat16 holds every whole number up to 256, float16 up to 2048."""
AND_MORE = " + "
"""The separator between the words for wrong positions and the number that a model always adds to positions (OPT adds 2)."""
TOKEN = "token "
"""The prefix of the keys of positions that are given token by token: "token 5" holds the position of token 5."""
STEPS_ASIDE = (1.0, -1.0, 2.0, -2.0, 3.0, -3.0, 4.0, -4.0, 5.0, -5.0, 6.0, -6.0, 7.0, -7.0, 8.0, -8.0)
"""Position offsets that a search tries one by one: from a rotation that is several radians off, a gradient does not lead to the
right offset."""


def and_more(words: str, number: Any) -> str:
    """Return the words for wrong positions, followed by the number that the model always adds to positions unless it is 0."""
    return f"{words}{AND_MORE}{number}" if number else words


def numbers_in(words: str, template: str) -> list[int] | list[None]:
    """Return the whole numbers in the places of the template's `{}`, or a None for each if the words do not match the template."""
    found = re.fullmatch(re.escape(template).replace(r"\{\}", r"([+-]?\d+)"), words)
    return [None] * template.count("{}") if found is None else [int(number) for number in found.groups()]


def number_in(words: object, template: str) -> float | None:
    """Return the real number in the place of the template's one `{}`, or None if the words do not match the template."""
    before, after = template.split("{}")
    said = str(words)
    own = said[len(before) : len(said) - len(after)]
    try:
        return float(own) if said == f"{before}{own}{after}" else None
    except ValueError:
        return None


def with_number_in(template: str, number: float) -> str:
    """Return the template with a real number in the place of `{}`, in the shortest form that reads back as the same number."""
    return template.format(repr(float(number)).removesuffix(".0"))
