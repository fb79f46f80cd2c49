"""Credentials in URLs: a URL stands in saved specs, results, messages and lists of processes."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, urlsplit

_SECRET = re.compile(r"secret|token|key|password|credential|^sig$", re.IGNORECASE)
"""In the names of options that are credentials."""


def has_credentials(url: str, *, names_no_user: bool = False) -> bool:
    """Whether a URL holds a user, a password or an option that is a credential.

    Args:
        url: The URL.
        names_no_user: Whether what stands before the `@` is no user, as in `abfs://container@account/...` and
            `gs://anonymous@bucket/...`.
    """
    try:
        parts = urlsplit(url)
    except ValueError:  # it is no URL: whoever opens it says so
        return "@" in url
    if parts.password is not None or ("@" in parts.netloc and not names_no_user):
        return True
    return any(_SECRET.search(name) for name, _ in parse_qsl(parts.query, keep_blank_values=True))
