"""A condition on samples, as in `reward < 0 and step > 40`, becomes an Arrow filter.

The syntax is Python's, parsed by Python's parser and translated node by node: what is not listed here is refused, and
nothing is executed.

    reward < 0 and step > 40
    status != "ok" or not trained
    finish_reason in ("length", "max_turns")
    "therefore" in response
    reward is None
    len(response_ids) > 100
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import NoReturn

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.compute import Expression

from troupe.orchestrator.errors import UsageError, nearest

_LONGEST = 2000
"""Characters of a condition."""
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Expression, Expression], Expression]] = {
    ast.Lt: lambda left, right: left < right,
    ast.LtE: lambda left, right: left <= right,
    ast.Gt: lambda left, right: left > right,
    ast.GtE: lambda left, right: left >= right,
    ast.Eq: lambda left, right: left == right,
    ast.NotEq: lambda left, right: left != right,
}
_LITERALS = {"null": None, "true": True, "false": False}
"""Names of constants besides Python's own."""


class FilterError(UsageError):
    """A condition that cannot be used; it says where and why."""


def parse_filter(condition: str, schema: pa.Schema) -> Expression:
    """The condition as an Arrow filter on tables of the schema. Raises FilterError."""
    if len(condition) > _LONGEST:
        raise FilterError(f"--where: the condition is longer than {_LONGEST} characters")
    text = " ".join(condition.splitlines()).strip()
    try:
        tree = ast.parse(text, mode="eval")
        return _Translation(text, schema).condition(tree.body)
    except SyntaxError as error:
        _fail(text, error.offset or len(text) + 1, _syntax_hint(text, error))
    except (ValueError, RecursionError, MemoryError) as error:
        raise FilterError(f"--where: the condition cannot be read: {type(error).__name__}") from None


class _Translation:
    """Translates one condition."""

    def __init__(self, text: str, schema: pa.Schema) -> None:
        self._text = text
        self._schema = schema

    def condition(self, node: ast.expr) -> Expression:
        """A node that is true or false."""
        if isinstance(node, ast.BoolOp):
            parts = [self.condition(value) for value in node.values]
            result = parts[0]
            for part in parts[1:]:
                result = result & part if isinstance(node.op, ast.And) else result | part
            return result
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return ~self.condition(node.operand)
        if isinstance(node, ast.Compare):
            return self._compare(node)
        if isinstance(node, ast.Name) and node.id not in _LITERALS:
            value, kind = self._value(node)
            if pa.types.is_boolean(kind):
                return value
            self._refuse(node, f"{node.id} is {_described(kind)}, not true or false: compare it with a value")
        self._refuse(node, "expected a comparison, as in reward < 0")

    def _compare(self, node: ast.Compare) -> Expression:
        """A comparison, also a chain such as 0 < reward <= 1."""
        parts, left = [], node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            parts.append(self._one_comparison(left, operator, right))
            left = right
        result = parts[0]
        for part in parts[1:]:
            result = result & part
        return result

    def _one_comparison(self, left: ast.expr, operator: ast.cmpop, right: ast.expr) -> Expression:
        if isinstance(operator, ast.In | ast.NotIn):
            found = self._membership(left, right)
            return ~found if isinstance(operator, ast.NotIn) else found
        if isinstance(operator, ast.Is | ast.IsNot) or _is_null(left) or _is_null(right):
            return self._null_test(left, operator, right)
        (value, kind), (other, other_kind) = self._value(left), self._value(right)
        for one, other_one, where in ((kind, other_kind, left), (other_kind, kind, right)):
            if pa.types.is_nested(one):
                name = ast.get_source_segment(self._text, where)
                self._refuse(where, f"{name} has an entry for each token or part: compare its length, len({name})")
            if _family(one) != _family(other_one):
                self._refuse(where, f"{_described(one)} cannot be compared with {_described(other_one)}")
        return _COMPARISONS[type(operator)](value, other)

    def _membership(self, left: ast.expr, right: ast.expr) -> Expression:
        """`column in (1, 2)`, or `"text" in column`."""
        value, kind = self._value(left)
        if isinstance(right, ast.Tuple | ast.List | ast.Set):
            choices = [self._literal(item) for item in right.elts]
            for choice, item in zip(choices, right.elts, strict=True):
                if _family(choice.type) != _family(kind):
                    self._refuse(item, f"{_described(kind)} cannot be compared with {_described(choice.type)}")
            values = [choice.as_py() for choice in choices]
            if _family(kind) == "number":
                return value.cast(pa.float64()).isin(pa.array([float(number) for number in values], pa.float64()))
            return value.isin(pa.array(values, kind))
        where, where_kind = self._value(right)
        if not isinstance(left, ast.Constant) or not isinstance(left.value, str) or _family(where_kind) != "text":
            self._refuse(right, 'expected values, as in step in (1, 2), or a column with text, as in "yes" in response')
        return pc.match_substring(where, left.value)  # pyright: ignore[reportAttributeAccessIssue]

    def _null_test(self, left: ast.expr, operator: ast.cmpop, right: ast.expr) -> Expression:
        """`column is None`, `column is not None`, and the same with == and !=."""
        if not isinstance(operator, ast.Is | ast.IsNot | ast.Eq | ast.NotEq) or _is_null(left) == _is_null(right):
            self._refuse(right, "expected a comparison with None, as in reward is None")
        value, _ = self._value(right if _is_null(left) else left)
        found = value.is_null(nan_is_null=False)
        return ~found if isinstance(operator, ast.IsNot | ast.NotEq) else found

    def _value(self, node: ast.expr) -> tuple[Expression, pa.DataType]:
        """A column, a length or a literal, with its type."""
        if isinstance(node, ast.Name) and node.id not in _LITERALS:
            return pc.field(node.id), self._type(node)
        if isinstance(node, ast.Call):
            return self._length(node)
        literal = self._literal(node)
        return pc.scalar(literal), literal.type

    def _length(self, node: ast.Call) -> tuple[Expression, pa.DataType]:
        """`len(column)`."""
        argument = node.args[0] if len(node.args) == 1 and not node.keywords else None
        if not isinstance(node.func, ast.Name) or node.func.id != "len" or not isinstance(argument, ast.Name):
            self._refuse(node, "the only function is len(COLUMN)")
        kind, field = self._type(argument), pc.field(argument.id)
        if pa.types.is_list(kind):
            return pc.list_value_length(field), pa.int32()  # pyright: ignore[reportAttributeAccessIssue]
        if _family(kind) == "text":
            return pc.utf8_length(field), pa.int32()  # pyright: ignore[reportAttributeAccessIssue]
        self._refuse(argument, f"{argument.id} is {_described(kind)}: it has no length")

    def _literal(self, node: ast.expr) -> pa.Scalar:
        """A number, a text, true or false."""
        sign = 1
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            sign, node = (-1 if isinstance(node.op, ast.USub) else 1), node.operand
            if not isinstance(node, ast.Constant) or isinstance(node.value, str | bool):
                self._refuse(node, "expected a number")
        value = _LITERALS.get(node.id) if isinstance(node, ast.Name) else getattr(node, "value", None)
        if isinstance(value, bool | str):
            return pa.scalar(value)
        if isinstance(value, int | float):
            try:
                return pa.scalar(sign * value)
            except (OverflowError, pa.ArrowInvalid):
                self._refuse(node, "the number is too large")
        self._refuse(node, "expected a column, a number, a text, true or false")

    def _type(self, node: ast.Name) -> pa.DataType:
        """The type of a column."""
        if node.id not in self._schema.names:
            hint = nearest(node.id, self._schema.names)
            self._refuse(node, f"there is no column {node.id!r}{hint and f': {hint}'}")
        return self._schema.field(node.id).type

    def _refuse(self, node: ast.expr, problem: str) -> NoReturn:
        # The parser counts bytes.
        before = self._text.encode()[: node.col_offset]
        _fail(self._text, len(before.decode(errors="replace")) + 1, problem)


def _is_null(node: ast.expr) -> bool:
    if isinstance(node, ast.Name):
        return node.id in _LITERALS and _LITERALS[node.id] is None
    return isinstance(node, ast.Constant) and node.value is None


def _family(kind: pa.DataType) -> str:
    """Kinds of values that compare with each other."""
    if pa.types.is_boolean(kind):
        return "boolean"
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return "number"
    return "text" if pa.types.is_string(kind) or pa.types.is_large_string(kind) else "list"


def _described(kind: pa.DataType) -> str:
    words = {"boolean": "true or false", "number": "a number", "text": "a text", "list": "a list"}
    return words[_family(kind)]


def _syntax_hint(text: str, error: SyntaxError) -> str:
    """What is wrong, in words that fit a condition."""
    rest = text[max(0, (error.offset or 1) - 1) :]
    if " contains " in text:
        return f'{error.msg}; text is searched by "text" in COLUMN'
    if "=" in rest and "==" not in rest:
        return "one = assigns; compare with =="
    return error.msg


def _fail(text: str, column: int, problem: str) -> NoReturn:
    """Raises FilterError with a marker below the place."""
    raise FilterError(f"--where, column {column}: {problem}\n  {text}\n  {' ' * (column - 1)}^")
