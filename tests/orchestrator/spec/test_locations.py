"""URLs of object stores: credentials in them are refused, and what only looks like one is not."""

from __future__ import annotations

import pytest

from troupe.orchestrator.spec.locations import checkpoint_problems, url_problem


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/folder?region=eu-west-1&endpoint_override=host:9000",
        "gs://bucket/folder",
        "gs://anonymous@bucket/folder",
        "file:///mnt/shared/folder",
    ],
)
def test_a_url_without_credentials_is_one_of_both_fields(url: str) -> None:
    assert url_problem(url) is None
    assert list(checkpoint_problems(url)) == []


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:secret@bucket/folder",
        "s3://anonymous@bucket/folder",
        "gs://me@bucket/folder",
        "gs://anonymous:secret@bucket/folder",
        "s3://bucket/folder?access_key=mine",
    ],
)
def test_credentials_are_refused(url: str) -> None:
    assert "holds no credentials" in str(url_problem(url))
    assert [field for field, _ in checkpoint_problems(url)] == ["checkpoint.path"]
