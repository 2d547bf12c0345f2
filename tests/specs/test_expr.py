"""Expressions: arithmetic on config keys and nothing else."""

import pytest

from parity_audit.specs.expr import ExprError, evaluate


@pytest.mark.parametrize(
    ("text", "names", "value"),
    [
        ("sqrt(query_pre_attn_scalar)", {"query_pre_attn_scalar": 256}, 16.0),
        ("hidden_size // num_attention_heads", {"hidden_size": 4096, "num_attention_heads": 32}, 128),
        ("l % 2 == 0", {"l": 3}, False),
        ('config["head_dim"] or 7', {"config": {}}, 7),
        ("x if x > 0 else null", {"x": -1.0, "null": None}, None),
        ("{'scale': a, 'step': 2 * b}", {"a": 0.1, "b": 4}, {"scale": 0.1, "step": 8}),
        ("float32(1 / 3)", {}, 0.3333333432674408),
        ("l not in moe_layers", {"l": 2, "moe_layers": [1, 3]}, True),
    ],
)
def test_values(text, names, value):
    assert evaluate(text, names) == value


@pytest.mark.parametrize(
    "text", ["__import__('os')", "(1).__class__", "[x for x in y]", "lambda: 1", "nobody", "1 +", "{y: 1}", "{**y}"]
)
def test_nothing_else_is_allowed(text):
    with pytest.raises(ExprError):
        evaluate(text, {"y": [1]})
