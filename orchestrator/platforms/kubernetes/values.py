"""Values of `troupe deploy` flags with a special form, such as `CLAIM:/FOLDER`, parsed and checked."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass

from troupe.orchestrator.errors import UsageError

SUBDOMAIN = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,200}")
_CREDENTIAL = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|KEY|APIKEY)$", re.IGNORECASE)


@dataclass(frozen=True)
class Claim:
    """A PersistentVolumeClaim and its mount path in every pod."""

    name: str
    path: str


@dataclass(frozen=True)
class Variable:
    """An environment variable with its value."""

    variable: str
    value: str


@dataclass(frozen=True)
class SecretVariable:
    """An environment variable whose value is a key of a Secret."""

    variable: str
    secret: str
    key: str


def parse_claim(text: str) -> Claim:
    """Parse `CLAIM:/FOLDER` of --pvc. Raises UsageError."""
    name, colon, path = text.partition(":")
    if not colon or not SUBDOMAIN.fullmatch(name):
        raise UsageError(f"--pvc {short(text)}: expected CLAIM:/FOLDER, as in models:/models")
    return Claim(name, folder("--pvc", path))


def parse_variable(text: str) -> Variable:
    """Parse `NAME=VALUE` of --env. Raises UsageError, which does not repeat the value, if it has another form, or the
    name is a credential's, whose value would stand in the manifest."""
    variable, equals, value = text.partition("=")
    if not equals or not _VARIABLE.fullmatch(variable):
        raise UsageError("--env: expected NAME=VALUE, as in NCCL_DEBUG=INFO")
    if _CREDENTIAL.search(variable):
        raise UsageError(
            f"--env {variable}: the value of a credential would stand in the file; on Kubernetes "
            f"use --secret-env {variable}=SECRET:KEY, for Slurm read it in a --prologue"
        )
    return Variable(variable, value)


def parse_secret_variable(text: str) -> SecretVariable:
    """Parse `NAME=SECRET:KEY` of --secret-env. Raises UsageError if it has another form, and repeats nothing after `=`,
    which may be a secret value."""
    variable, equals, source = text.partition("=")
    secret, _, key = source.partition(":")
    if not equals or not _VARIABLE.fullmatch(variable):
        raise UsageError(
            "--secret-env: expected NAME=SECRET:KEY, a variable and the Secret and key that hold its value"
        )
    if not SUBDOMAIN.fullmatch(secret) or not _KEY.fullmatch(key):
        raise UsageError(f"--secret-env {variable}: expected {variable}=SECRET:KEY; store the value in a Secret")
    return SecretVariable(variable, secret, key)


def folder(flag: str, path: str) -> str:
    """Normalize an absolute path. Raises UsageError for characters that Kubernetes or a shell would interpret."""
    if not path.startswith("/") or ".." in path.split("/") or re.search(r"[:\s\x00-\x1f]", path):
        raise UsageError(f"{flag}: expected an absolute path without ':', '..' and whitespace, got {short(path)!r}")
    return "/" + posixpath.normpath(path).lstrip("/")


def short(text: str) -> str:
    """The text on one line of at most 60 characters."""
    return re.sub(r"[\x00-\x1f\x7f]", "?", text if len(text) <= 60 else f"{text[:57]}...")
