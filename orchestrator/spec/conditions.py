"""Conditions on the rows of a table, as the spec writes them: `score_ratio > 2 and lang == "en"`."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

from troupe.workers.contract.expressions import FUNCTIONS, evaluate

_SINGLE = (str, bool, int, float)


@dataclass(frozen=True)
class Condition:
    """A Python expression over columns. It is read as a syntax tree: no code runs."""

    columns: tuple[str, ...]
    """Names of the columns that it reads, those inside structs with dots."""
    _test: ast.expr
    _compared: tuple[tuple[str, Any], ...]
    """Columns with the literals that they are compared with."""

    @classmethod
    def parse(cls, text: str) -> Condition:
        """The condition of a text. Raises ValueError if that is no expression over columns."""
        try:
            test = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, RecursionError, MemoryError) as error:
            raise ValueError(f"is no Python expression ({error})") from None
        columns = _Columns()
        test = columns.visit(test)
        if not columns.found:
            raise ValueError("names no column")
        return cls(tuple(dict.fromkeys(columns.found)), test, tuple(columns.compared))

    def holds(self, value: Callable[[str], Any]) -> bool:
        """Whether a row meets it; `value` returns the row's value of a column. Raises ValueError if that is unknown."""
        try:
            values = {column: value(column) for column in self.columns}
            for column, literal in self._compared:
                own = values[column]
                if isinstance(own, _SINGLE) and isinstance(own, str) != isinstance(literal, str):
                    hint = f"; of numbers as text write float({column})" if isinstance(own, str) else ""
                    raise ValueError(f"{column} is {own!r:.60}, which is never {literal!r}{hint}")
            found = evaluate(self._test, values)
        except Exception as error:  # a null has no order, and a text is no number
            raise ValueError(f"cannot be evaluated: {error}") from None
        if not isinstance(found, bool):
            raise ValueError(f"is {found!r:.60}, neither true nor false")
        return found


class _Columns(ast.NodeTransformer):
    """Finds the columns of an expression, and makes names of `a.b` and `row["a b"]`. The names of functions stay."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.compared: list[tuple[str, Any]] = []

    def visit_Name(self, node: ast.expr) -> ast.expr:
        return self._column(node)

    visit_Attribute = visit_Name

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        match node:
            case ast.Subscript(ast.Name("row"), ast.Constant(str(name))):
                return self._column(node, name)
            case _:
                return self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        sides: list[ast.expr] = [self.visit(side) for side in (node.left, *node.comparators)]
        columns = [side.id for side in sides if isinstance(side, ast.Name)]
        items = chain.from_iterable(
            side.elts if isinstance(side, ast.List | ast.Tuple | ast.Set) else (side,) for side in sides
        )
        literals = [item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, _SINGLE)]
        self.compared += product(columns, literals)
        return ast.Compare(sides[0], node.ops, sides[1:])

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if (name := ast.unparse(node.func)) not in FUNCTIONS:
            raise ValueError(f"calls {name[:60]}; functions are {', '.join(FUNCTIONS)}")
        args = [self.visit(arg) for arg in node.args]
        return ast.Call(node.func, args, [ast.keyword(one.arg, self.visit(one.value)) for one in node.keywords])

    def _column(self, node: ast.expr, name: str = "") -> ast.expr:
        self.found.append(name or ast.unparse(node))
        return ast.Name(self.found[-1])
