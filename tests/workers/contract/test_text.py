"""What may be secret is hidden, and nothing else of a spec."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT
from troupe.workers.contract.text import HIDDEN, without_secrets
from troupe.workers.isolation.descendants import child_environment


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("api_key", "x"),
        ("OPENAI_API_KEY", "x"),
        ("password", "x"),
        ("Authorization", "x"),
        ("hub_token", "x"),
        ("database", "postgres://user:word@host/db"),
        ("endpoint", "https://host/score?token=abc"),
        ("text", "sk-proj-0123456789abcdef"),
        ("text", "hf_abcdefghijklmnopqrstuvwx"),
        ("text", "use Authorization: eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.sig"),
        ("header", "Bearer abc"),
    ],
)
def test_what_may_be_secret_is_hidden_at_any_depth(name: str, value: str) -> None:
    hidden = without_secrets({"roles": {"reward": {"functions": [{"args": {name: value, "n": 3}}]}}})
    assert hidden == {"roles": {"reward": {"functions": [{"args": {name: HIDDEN, "n": 3}}]}}}
    assert without_secrets({name: [value, ""]}) == {name: [HIDDEN, ""]}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("api_key_env", "JUDGE_KEY"),
        ("max_tokens", 48),
        ("url", "https://host:8000/v1"),
        ("keys", "a"),
    ],
)
def test_what_is_no_secret_stays(name: str, value: object) -> None:
    assert without_secrets({name: value}) == {name: value}


@pytest.mark.parametrize("spec", sorted((ROOT / "deploy" / "specs").glob("*.yaml")), ids=lambda path: path.stem)
def test_nothing_of_a_shipped_spec_is_hidden(spec: Path) -> None:
    assert HIDDEN not in str(without_secrets(yaml.safe_load(spec.read_text())))


def test_a_url_with_a_password_is_a_secret_of_any_name() -> None:
    given = {"MY_DB_URL": "postgres://u:secret@host/db", "HOMEPAGE": "https://host/a", "BUCKET": "gs://anonymous@b"}
    assert child_environment("m", of=given).keys() == {"HOMEPAGE", "BUCKET", "TROUPE_CHILD"}
    assert "MY_DB_URL" in child_environment("m", keep=("MY_DB_URL",), of=given)
