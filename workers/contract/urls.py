"""Credentials in URLs: a URL stands in saved specs, results, messages and lists of processes."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, urlsplit

_SECRET = re.compile(r"secret|token|key|password|credential|^sig$", re.IGNORECASE)
"""In the names of options that are credentials."""
_NO_USER = "gs://anonymous@"
"""How a URL asks Google Cloud Storage for no credentials."""
_AZURE = ("abfs://", "abfss://")
"""In such URLs the container or the account replaces the user."""
_NO_SECRET = "credential_kind"
"""An option of Azure that names where credentials come from."""


def has_credentials(url: str) -> bool:
    """Whether a URL holds a user, a password or an option that is a credential."""
    try:
        parts = urlsplit(url)
    except ValueError:  # it is no URL: opening it reports that
        return "@" in url
    names = {name for name, _ in parse_qsl(parts.query, keep_blank_values=True)} - {_NO_SECRET}
    if any(_SECRET.search(name) for name in names):
        return True
    if url.startswith(_AZURE):
        return ":" in parts.netloc.rpartition("@")[0]
    return "@" in parts.netloc and not url.startswith(_NO_USER)
