"""Evaluation of Python expressions on plain data: a syntax tree is read, no code runs, and no result becomes large.

The callers decide which nodes they accept, and what names mean.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from datetime import date, timedelta
from decimal import Decimal
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
_INTEGER_BITS = 2**20
"""Bits of the largest integer that arithmetic may give."""
_ITEMS = 2**20
"""Most values in a sequence that is repeated, with those inside its items, and most that a sum of sequences copies."""
_CONTAINERS = (str, bytes, list, tuple, set, frozenset, dict)


def arithmetic(op: ast.operator, left: Any, right: Any) -> Any:
    """A binary operator on numbers, times, sequences or sets. Raises ValueError if the result would be too large."""
    match op, left, right:
        case ast.Pow(), int(), int() if left.bit_length() * abs(right) > _INTEGER_BITS:
            raise ValueError("a power that is too large")
        case ast.Mult(), int(), int() if left.bit_length() + right.bit_length() > _INTEGER_BITS:
            raise ValueError("a product that is too large")
        case _, int() | float() | complex() | Decimal(), int() | float() | complex() | Decimal():
            return BINARY[type(op)](left, right)
        case ast.Add() | ast.Sub() | ast.Div(), date() | timedelta(), date() | timedelta():
            return BINARY[type(op)](left, right)
        case ast.Add(), list() | tuple() | str() | bytes(), _ if type(left) is type(right):
            return left + right
        case ast.Sub(), set() | frozenset(), set() | frozenset():
            return left - right
        case (ast.Mult(), list() | tuple() | str() as items, int(times)) | (
            ast.Mult(),
            int(times),
            list() | tuple() | str() as items,
        ) if _size(items, _ITEMS) * times <= _ITEMS:
            return items * times
    raise ValueError("arithmetic on something other than numbers, or a sequence that is too long")


def _size(value: Any, most: int) -> int:
    """Number of values in nested containers, where a character and an empty one are one; counted to about `most`."""
    if isinstance(value, str | bytes):
        return max(len(value), 1)
    if not isinstance(value, _CONTAINERS):
        return 1
    parts = [*value, *value.values()] if isinstance(value, dict) else value
    nested = [part for part in parts if isinstance(part, _CONTAINERS)]
    size = len(parts) - len(nested)
    for part in nested:
        if size > most:
            break
        size += _size(part, most - size)
    return max(size, 1)


def _round(number: Any, digits: int | None = None) -> Any:
    """`round`, which computes 10 to the power of the digits of an integer."""
    return round(number) if digits is None else round(number, max(min(digits, _INTEGER_BITS), -_INTEGER_BITS // 4))


def _sum(items: Iterable[Any], /, start: Any = 0) -> Any:
    """`sum`, which copies what it has so far for each sequence."""
    given = list(items)
    if not isinstance(start, int | float | complex) and len(given) * _size(given, _ITEMS) > _ITEMS:
        raise ValueError("a sum of too many sequences")
    return sum(given, start)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{function.__name__: function for function in (abs, len, min, max, sorted, all, any)},
    "round": _round,
    "sum": _sum,
    **{kind.__name__: kind for kind in (set, frozenset, list, tuple, dict, str, int, float, bool)},
    **dict.fromkeys(("isclose", "math.isclose"), math.isclose),
}
"""Functions of data that an expression may call."""

Compute = Callable[[ast.operator, Any, Any], Any]
"""Applies a binary operator within bounds. Raises ValueError beyond them."""


def evaluate(node: ast.expr, names: Mapping[str, Any] = MappingProxyType({}), compute: Compute = arithmetic) -> Any:
    """The value of an expression of literals, names, operators (`compute`), subscripts and calls of `FUNCTIONS`. Raises
    ValueError for any other expression, and whatever operators and functions raise."""

    def value(child: ast.expr) -> Any:
        return evaluate(child, names, compute)

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
