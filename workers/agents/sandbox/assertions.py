"""Test cases in the form of `assert` lines, split so that the expected results stay outside the sandbox.

``assert add(2, 3) == 5`` becomes the call ``add(2, 3)``, which the sandbox runs, and the comparison of its result with
5, which is evaluated here, on plain data and without running any code. What cannot be split that way is refused.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from troupe.workers.contract.expressions import BINARY, FUNCTIONS, evaluate

_ITERATES = frozenset({"sum", "min", "max", "sorted", "set", "list", "tuple", "all", "any", "frozenset", "dict"})
"""Those of `FUNCTIONS` that take any iterable. What a call returns to them leaves the sandbox as a list if it is no
data itself."""
RAISED = "_raised"
"""Function of the sandbox that names the classes of what a call raises."""
ITEMS = "_items"
"""Function of the sandbox that makes that list; its second argument: whether the value must have a length."""
_RESULT = "\0result"
"""Name that stands for a result of the sandbox in an expression."""


@dataclass(frozen=True)
class Assertion:
    """One `assert`."""

    calls: tuple[str, ...]
    """Expressions for the sandbox, which may call `ITEMS`. Their results are what is compared."""
    _test: ast.expr

    def holds(self, results: Sequence[Any]) -> bool:
        """Whether the assertion holds with these results of its calls; False if they cannot even be compared."""
        try:
            return bool(evaluate(self._test, {_RESULT + str(at): one for at, one in enumerate(results)}))
        except Exception:
            return False


@dataclass
class Assertions:
    """The assertions of a text."""

    setup: list[str] = field(default_factory=list)
    """Imports for the sandbox that come before the calls."""
    cases: list[Assertion] = field(default_factory=list)


def parse_assertions(text: str, function: str = "") -> Assertions:
    """Split the assertions of a text: `assert` lines, in HumanEval's `check(candidate)`, or in functions `test...()`.

    `candidate` stands for the tested function; if it has no name, what the text calls is tested. Raises ValueError if
    the text is not Python, contains anything but imports, assignments and assertions, or an assertion whose expected
    result would have to enter the sandbox, cannot be computed or is too large.
    """
    try:
        body = ast.parse(text).body
        return _Splitter(function).split(body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"the tests are not Python: {error}") from None


class _Splitter:
    def __init__(self, function: str) -> None:
        self._function = function
        self._literals: dict[str, ast.expr] = {}
        self._imported: set[str] = set()
        self._objects: set[str] = set()
        self._pending: list[str] = []
        self._found = Assertions()

    def split(self, body: list[ast.stmt]) -> Assertions:
        for statement in body:
            match statement:
                case ast.Expr(ast.Call(ast.Name("check"), [ast.Name(name)])):
                    self._function = self._function or name
        for statement in body:
            self._add(statement)
        if not self._found.cases:
            raise ValueError("the tests contain no assertion that calls a function")
        return self._found

    def _add(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Import([ast.alias("pytest")]):
                pass
            case ast.ImportFrom("solution"):
                self._found.setup.append(ast.unparse(statement))
            case ast.Import(names) | ast.ImportFrom(names=names):
                self._imported |= {(alias.asname or alias.name).partition(".")[0] for alias in names}
                self._found.setup.append(ast.unparse(statement))
            case ast.Assign([ast.Name(name)], value):
                self._assign(name, value)
            case ast.Assert(test):
                self._assert(test)
            case ast.FunctionDef("check", ast.arguments(args=[ast.arg("candidate")])):
                if not self._function:
                    raise ValueError("check(candidate): no name of the function that is tested (`entry_point`)")
                for inner in statement.body:
                    self._add(inner)
            case ast.FunctionDef(name, ast.arguments(args=[]), body, []) if name.startswith("test"):
                known = self._literals, self._objects
                self._literals, self._objects = self._literals.copy(), self._objects.copy()
                for inner in body:
                    self._add(inner)
                self._literals, self._objects = known
            case ast.With(
                [ast.withitem(ast.Call(func, [ast.Name(error)], []))], [ast.Expr(call) | ast.Assign(_, call)]
            ) if ast.unparse(func) == "pytest.raises":
                self._raises(error, self._insert(call))
            case ast.Expr(ast.Call(ast.Attribute(ast.Name(name))) as call) if name in self._objects:
                self._pending.append(ast.unparse(self._insert(call)))
            case ast.Expr(ast.Constant()) | ast.Expr(ast.Call(ast.Name("check"), [ast.Name()])) | ast.Pass():
                pass
            case _:
                raise ValueError(f"line {statement.lineno} of the tests is not an import, an assignment or an assert")

    def _assign(self, name: str, value: ast.expr) -> None:
        value = self._insert(value)
        calls: list[str] = []
        local = self._split(value, calls)
        self._literals.pop(name, None)
        self._objects.discard(name)
        if not calls:
            self._literals[name] = local
            return
        self._objects.add(name)
        self._pending.append(f"globals().__setitem__({name!r}, {ast.unparse(value)})")

    def _assert(self, test: ast.expr) -> None:
        calls = self._pending.copy()
        local = self._split(self._insert(test), calls, truth=True)
        if len(calls) > len(self._pending):  # `assert True` tests nothing
            _require_values(local)
            self._found.cases.append(Assertion(tuple(calls), local))
            self._pending.clear()

    def _raises(self, error: str, call: ast.expr) -> None:
        """`with pytest.raises(ValueError): f(-1)`; of what is raised, the sandbox returns the names of its classes."""
        if not isinstance(call, ast.Call) or not self._is_tested(call.func):
            raise ValueError(f"the tests expect an error of something else than a call: {ast.unparse(call)[:80]}")
        calls = self._pending.copy()
        raised = self._call(f"{RAISED}(lambda: {ast.unparse(call)})", calls)
        self._found.cases.append(Assertion(tuple(calls), ast.Compare(ast.Constant(error), [ast.In()], [raised])))
        self._pending.clear()

    def _insert(self, node: ast.expr) -> ast.expr:
        """The expression with the values of names that the tests assigned, and the name that `candidate` stands for."""
        literals, function = self._literals, self._function

        class Insert(ast.NodeTransformer):
            def visit_Name(self, node: ast.Name) -> ast.expr:
                if node.id == "candidate" and function:
                    return ast.Name(function, ast.Load())
                return literals.get(node.id, node)

        return Insert().visit(node)

    def _split(self, node: ast.expr, calls: list[str], truth: bool = False) -> ast.expr:
        """The expression with a placeholder for each of the sandbox's calls, which are appended to `calls`."""

        def part(child: ast.expr, truth: bool = False) -> ast.expr:
            return self._split(child, calls, truth)

        match node:
            case ast.Constant():
                return node
            case ast.Name() if node.id in ("inf", "nan"):
                return ast.Constant(float(node.id))
            case ast.List(items):
                return ast.List([part(item) for item in items], ast.Load())
            case ast.Tuple(items):
                return ast.Tuple([part(item) for item in items], ast.Load())
            case ast.Set(items):
                return ast.Set([part(item) for item in items])
            case ast.Dict(keys, values) if None not in keys:
                return ast.Dict([part(key) for key in keys if key], [part(value) for value in values])
            case ast.UnaryOp(op, operand):
                return ast.UnaryOp(op, part(operand, isinstance(op, ast.Not)))
            case ast.BinOp(left, op, right) if type(op) in BINARY:
                return ast.BinOp(part(left), op, part(right))
            case ast.BoolOp(op, values):
                return ast.BoolOp(op, [part(value, truth=True) for value in values])
            case ast.Compare():
                return self._split_comparison(node, calls)
            case ast.Subscript(value, ast.Constant() | ast.UnaryOp() as index):
                return ast.Subscript(part(value), part(index), ast.Load())
            case ast.Call(func, args, keywords) if (name := ast.unparse(func)) in FUNCTIONS:
                named = [ast.keyword(one.arg, part(one.value)) for one in keywords]
                if name in _ITERATES or name == "len":
                    given = [self._split_iterable(argument, calls, sized=name == "len") for argument in args]
                    return ast.Call(func, given, named)
                return ast.Call(func, [part(argument) for argument in args], named)
            case _ if self._is_result(node):
                source = ast.unparse(node)
                return self._call(f"bool({source})" if truth else source, calls)
        raise ValueError(f"the tests contain an expression that cannot be evaluated: {ast.unparse(node)[:80]}")

    def _split_iterable(self, node: ast.expr, calls: list[str], *, sized: bool = False) -> ast.expr:
        """As `_split`, of an expression whose items count: a call may return an iterator or a view."""
        if self._is_result(node):
            return self._call(f"{ITEMS}({ast.unparse(node)}, {sized})", calls)
        return self._split(node, calls)

    def _call(self, source: str, calls: list[str]) -> ast.expr:
        """A placeholder for the result of an expression that the sandbox evaluates."""
        calls.append(source)
        return ast.Name(f"{_RESULT}{len(calls) - 1}", ast.Load())

    def _split_comparison(self, node: ast.Compare, calls: list[str]) -> ast.expr:
        sides: list[ast.expr] = []
        counts = []
        for op, side in zip((None, *node.ops), (node.left, *node.comparators), strict=True):
            before, contains = len(calls), isinstance(op, ast.In | ast.NotIn)
            sides.append(self._split_iterable(side, calls) if contains else self._split(side, calls))
            counts.append(len(calls) - before)
        if sum(count > 0 for count in counts) > 1:
            raise ValueError(f"the expected result would be computed in the sandbox: {ast.unparse(node)[:80]}")
        return ast.Compare(sides[0], node.ops, sides[1:])

    def _is_result(self, node: ast.expr) -> bool:
        """Whether only the sandbox has the value: what a tested call returns, an object with one, or its attribute."""
        match node:
            case ast.Call(func):
                return ast.unparse(func) not in FUNCTIONS and self._is_tested(func)
            case ast.Name(name) | ast.Attribute(ast.Name(name)):
                return name in self._objects
        return False

    def _is_tested(self, function: ast.expr) -> bool:
        """Whether a called function belongs to the code that is tested. Any other would receive an expected result."""
        match function:
            case ast.Name(name):
                if self._function:
                    return name == self._function
                return name not in self._imported and not hasattr(builtins, name)
            case ast.Attribute(ast.Call(inner)):
                return self._is_tested(inner)
            case ast.Attribute(ast.Name(name)):
                return name in self._objects
        return False


def _require_values(node: ast.AST) -> None:
    """Raise ValueError if a part that holds no result of the sandbox has no value: no program could pass."""
    if any(isinstance(inner, ast.Name) and inner.id.startswith(_RESULT) for inner in ast.walk(node)):
        called = isinstance(node, ast.Call)
        children = [*node.args, *(one.value for one in node.keywords)] if called else ast.iter_child_nodes(node)
        for child in children:
            _require_values(child)
    elif isinstance(node, ast.expr):
        try:
            evaluate(node)
        except Exception as error:
            shown = f"{ast.unparse(node)[:80]} ({error})"
            raise ValueError(f"the tests contain an expression that cannot be evaluated: {shown}") from None
