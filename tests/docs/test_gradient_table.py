"""The table of losses and gradients has every row of the tables of algorithms, and its bounds hold."""

from __future__ import annotations

import re

from docs.tooling.write_gradient_table import BEGIN, END, PAGE, measured

_ROW = re.compile(r"\| (`.+) \| (1e-\d\d) \| (1e-\d\d) \|")


def test_the_table_is_current() -> None:
    text = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    rows = [(name, float(value), float(gradient)) for name, value, gradient in _ROW.findall(text)]
    found = [*measured([0])]
    assert [name for name, *_ in rows] == [name for name, *_ in found], (
        "run: python -m docs.tooling.write_gradient_table"
    )
    for (name, value, gradient), (_, *differences) in zip(rows, found, strict=True):
        assert differences[0] <= value <= 1e-11 and differences[1] <= gradient <= 1e-11, name
