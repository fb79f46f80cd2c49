"""A calculator tool: arithmetic on numbers, read as a syntax tree and never evaluated as Python."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable

_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[float], float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_LONGEST = 200
_LARGEST = 10**50


def calculator(expression: str) -> str:
    """Calculate the value of an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, such as 12 * (3 + 4).
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"longer than {_LONGEST} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("not an arithmetic expression") from None
    value = _value(tree.body)
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else str(value)


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) > 100:
            raise ValueError("the exponent is too large")
        return _bounded(_BINARY[type(node.op)](left, right))
    raise ValueError("not an arithmetic expression")


def _bounded(value: float) -> float:
    if isinstance(value, complex) or not math.isfinite(value) or abs(value) > _LARGEST:
        raise ValueError("the result is too large, or no real number")
    return value
