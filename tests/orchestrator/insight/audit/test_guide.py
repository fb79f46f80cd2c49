"""The guide's table of planted faults is that of the recorded results, and has every fault."""

from __future__ import annotations

import json

from docs.tooling.write_audit_table import GUIDE, RESULTS, written


def test_the_table_is_current() -> None:
    guide = GUIDE.read_text(encoding="utf-8")
    assert written(guide, json.loads(RESULTS.read_text(encoding="utf-8"))) == guide
