"""Safe evaluation of arithmetic expressions on config keys.

Examples: `sqrt(query_pre_attn_scalar)`, `hidden_size // num_attention_heads` and, with the layer number `l`, `l % 2 == 0`.
"""

from __future__ import annotations

import ast
import difflib
import math
import operator
import struct
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from parity_audit.core.errors import SpecError

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}


def _float32(number: float) -> float:
    """Return a number rounded to float32, for constants that programs store in that dtype."""
    rounded: float = struct.unpack("f", struct.pack("f", float(number)))[0]
    return rounded


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sqrt": math.sqrt,
    "floor": math.floor,
    "min": min,
    "max": max,
    "log": math.log,
    "float32": _float32,
}


LONGEST = 500
"""The most characters of an expression; the longest in a shipped spec has 120."""
MOST_BITS = 256
"""The most bits of an integer; constants of models have less than 64."""


class ExprError(SpecError):
    """An expression cannot be evaluated; the message names the part that fails.

    `of_config` is true if the expression reads keys of the config: then the cause may be the value or the absence of a
    key, and not the expression.
    """

    default_code = "spec-expression"
    of_config = False


class _Forbidden(ExprError):
    """The expression has a construct that is not allowed, so it is wrong for every config."""


def evaluate(text: str, names: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]] | None = None) -> Any:
    """Return the value of one expression, in which only arithmetic, comparisons and the given names and functions are allowed.

    Raises:
        ExprError: a syntax error, an unknown name, a forbidden construct, arithmetic on a value that is not a number,
            or a number larger than any constant of a model.
    """
    tree = _parsed(text)
    try:
        return _Evaluator(names, {**FUNCTIONS, **(functions or {})}).visit(tree.body)
    except ExprError as error:
        error.of_config = not isinstance(error, _Forbidden) and _names_config(tree)
        raise
    except (RecursionError, MemoryError) as error:
        raise ExprError(f"`{text[:40]}...` is nested too deeply") from error
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        wrong = ExprError(f"`{text}`: {error}")
        wrong.of_config = _names_config(tree)
        raise wrong from error


def check(text: str) -> None:
    """Raise an error if a text is not a valid expression for any config. Names and functions are not looked up.

    Raises:
        ExprError: a syntax error or a forbidden construct.
    """
    for node in ast.walk(_parsed(text)):
        if isinstance(node, ast.expr) and not hasattr(_Evaluator, f"visit_{type(node).__name__}"):
            raise _forbidden(node)


def names_layer(text: str) -> bool:
    """Return whether an expression uses the layer number `l`. Raises ExprError if the text is not an expression."""
    return any(isinstance(node, ast.Name) and node.id == "l" for node in ast.walk(_parsed(text)))


@cache
def _parsed(text: str) -> ast.Expression:
    """Return the syntax tree of an expression. It is cached because the expressions of a spec are evaluated for every layer."""
    if len(text) > LONGEST:
        raise ExprError(f"`{text[:40]}...` is longer than {LONGEST} characters")
    try:
        return ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        raise ExprError(f"`{text}` is not an expression: {error.msg}") from error
    except ValueError as error:  # a null byte
        raise ExprError(f"`{text!r}` is not an expression") from error
    except (RecursionError, MemoryError) as error:
        raise ExprError(f"`{text[:40]}...` is nested too deeply") from error


def _names_config(tree: ast.AST) -> bool:
    """Return whether an expression uses any name that is not a called function."""
    called = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return any(isinstance(node, ast.Name) and node not in called for node in ast.walk(tree))


def _number(value: Any, node: ast.AST) -> Any:
    """Return the value if it is a number that could be a constant of a model; otherwise raise ExprError."""
    if not isinstance(value, (int, float)):
        raise ExprError(f"`{ast.unparse(node)}`: {type(value).__name__} is no number")
    if not math.isfinite(value) if isinstance(value, float) else value.bit_length() > MOST_BITS:
        raise ExprError(f"`{ast.unparse(node)}` is beyond every constant of a model")
    return value


def _forbidden(node: ast.AST) -> _Forbidden:
    return _Forbidden(f"`{ast.unparse(node)}` is not allowed in an expression")


class _Evaluator(ast.NodeVisitor):
    def __init__(self, names: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]) -> None:
        self.names = names
        self.functions = functions

    def generic_visit(self, node: ast.AST) -> Any:
        raise _forbidden(node)

    def visit_Constant(self, node: ast.Constant) -> Any:
        return node.value if isinstance(node.value, (str, bool, type(None))) else _number(node.value, node)

    def visit_Name(self, node: ast.Name) -> Any:
        if node.id not in self.names:
            near = difflib.get_close_matches(node.id, self.names, 1)
            raise ExprError(f"unknown name `{node.id}`", hint=f"did you mean `{near[0]}`?" if near else "")
        return self.names[node.id]

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        if type(node.op) not in _BINARY:
            return self.generic_visit(node)
        left, right = (_number(self.visit(side), node) for side in (node.left, node.right))
        if isinstance(node.op, ast.Pow) and abs(right) * max(1.0, math.log2(abs(left) or 1.0)) > MOST_BITS:
            raise ExprError(f"`{ast.unparse(node)}` is beyond every constant of a model")
        return _number(_BINARY[type(node.op)](left, right), node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        value = self.visit(node.operand)
        if isinstance(node.op, ast.USub):
            return -_number(value, node)
        return not value if isinstance(node.op, ast.Not) else self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> Any:
        if len(node.ops) != 1 or type(node.ops[0]) not in _COMPARE:
            return self.generic_visit(node)
        return _COMPARE[type(node.ops[0])](self.visit(node.left), self.visit(node.comparators[0]))

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        return self.visit(node.body if self.visit(node.test) else node.orelse)

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        value: Any = None
        for item in node.values:
            value = self.visit(item)
            if bool(value) == isinstance(node.op, ast.Or):
                return value
        return value

    def visit_Call(self, node: ast.Call) -> Any:
        if not isinstance(node.func, ast.Name) or node.func.id not in self.functions or node.keywords:
            return self.generic_visit(node)
        return self.functions[node.func.id](*(self.visit(arg) for arg in node.args))

    def visit_Dict(self, node: ast.Dict) -> Any:
        if not all(isinstance(key, ast.Constant) and isinstance(key.value, str) for key in node.keys):
            return self.generic_visit(node)
        return {self.visit(key): self.visit(value) for key, value in zip(node.keys, node.values, strict=True) if key}

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        value, key = self.visit(node.value), self.visit(node.slice)
        return value.get(key) if isinstance(value, Mapping) else value[key]
