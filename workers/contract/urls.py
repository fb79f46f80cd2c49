"""Credentials in URLs: a URL stands in saved specs, results, messages and lists of processes."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, urlsplit

_SECRET = re.compile(r"secret|token|key|password|credential|^sig$", re.IGNORECASE)
"""In the names of options that are credentials."""
_NO_USER = "gs://anonymous@"
"""How a URL asks Google Cloud Storage for no credentials."""


def has_credentials(url: str) -> bool:
    """Whether a URL holds a user, a password or an option that is a credential."""
    try:
        parts = urlsplit(url)
    except ValueError:  # it is no URL: whoever opens it says so
        return "@" in url
    if "@" in parts.netloc and not url.startswith(_NO_USER):
        return True
    return any(_SECRET.search(name) for name, _ in parse_qsl(parts.query, keep_blank_values=True))
