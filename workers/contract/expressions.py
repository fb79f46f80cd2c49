"""Evaluation of Python expressions on plain data: a syntax tree is read, and no code runs.

The callers decide which nodes they accept, what names mean, and how large the results of arithmetic may be.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
}
_COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.eq,
    ast.IsNot: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
"""`is` compares as `==`: data that come from another process have no identity."""
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{function.__name__: function for function in (abs, round, len, sum, min, max, sorted, all, any)},
    **{kind.__name__: kind for kind in (set, frozenset, list, tuple, dict, str, int, float, bool)},
    **dict.fromkeys(("isclose", "math.isclose"), math.isclose),
}
"""Functions of data that an expression may call."""

Compute = Callable[[ast.operator, Any, Any], Any]
"""Applies a binary operator within the caller's bounds. Raises ValueError beyond them."""


def evaluate(node: ast.expr, compute: Compute, names: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """The value of an expression of literals, names, operators (`compute`), subscripts and calls of `FUNCTIONS`. Raises
    ValueError for any other expression, and whatever operators and functions raise."""

    def value(child: ast.expr) -> Any:
        return evaluate(child, compute, names)

    match node:
        case ast.Constant(constant):
            return constant
        case ast.Name(name) if name in names:
            return names[name]
        case ast.List(items):
            return [value(item) for item in items]
        case ast.Tuple(items):
            return tuple(value(item) for item in items)
        case ast.Set(items):
            return {value(item) for item in items}
        case ast.Dict(keys, values) if None not in keys:
            return {value(key): value(item) for key, item in zip(keys, values, strict=True) if key}
        case ast.UnaryOp(op, operand):
            return _UNARY[type(op)](value(operand))
        case ast.BinOp(left, op, right) if type(op) in BINARY:
            return compute(op, value(left), value(right))
        case ast.BoolOp(op, values):
            return (all if isinstance(op, ast.And) else any)(value(item) for item in values)
        case ast.Compare(left, ops, comparators):
            sides = [value(side) for side in (left, *comparators)]
            return all(_COMPARE[type(op)](a, b) for op, a, b in zip(ops, sides, sides[1:], strict=False))
        case ast.Subscript(container, index):
            return value(container)[value(index)]
        case ast.Call(func, args, keywords) if (function := ast.unparse(func)) in FUNCTIONS:
            named = {one.arg: value(one.value) for one in keywords if one.arg}
            return FUNCTIONS[function](*map(value, args), **named)
    raise ValueError(f"cannot evaluate {ast.unparse(node)[:80]}")
