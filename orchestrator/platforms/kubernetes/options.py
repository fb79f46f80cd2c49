"""Options of a KubeRay manifest, checked against the rules of Kubernetes and KubeRay that the CRD schema leaves out."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from orchestrator.errors import UsageError
from orchestrator.platforms.kubernetes.pods import PodGroup

SPEC_FOLDER = "/etc/troupe"
"""Mount path of the ConfigMap with the spec."""
WORKSPACE = "/workspace"
"""Base of relative paths when no claim is mounted: the working directory of the images (deploy/images/Dockerfile.*)."""
LONGEST_S = 2**31 - 1
"""Largest duration of a Kubernetes object, in seconds: a signed 32-bit integer."""

_LONGEST_JOB, _LONGEST_CLUSTER = 47, 53
"""Characters KubeRay allows in the name of a RayJob and of a RayCluster, because it appends to them."""
_BASE_GIB = 4
"""Memory of Ray, torch and vLLM before any model is loaded."""
_RESERVED_PATHS = ("/dev/shm", SPEC_FOLDER, "/tmp/ray")
_RESERVED_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ADDRESS")

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,200}")
_IMAGE = re.compile(r"[A-Za-z0-9][^\s]{0,500}")


@dataclass(frozen=True)
class Claim:
    """A PersistentVolumeClaim and its mount path in every pod."""

    name: str
    path: str


@dataclass(frozen=True)
class SecretVariable:
    """An environment variable whose value is a key of a Secret."""

    variable: str
    secret: str
    key: str


@dataclass(frozen=True)
class Options:
    """Settings of a manifest that are not part of the spec.

    Raises:
        UsageError: Kubernetes or KubeRay would reject a value.
    """

    name: str
    image: str
    ray_version: str
    namespace: str | None = None
    cluster_only: bool = False
    claims: tuple[Claim, ...] = ()
    secrets: tuple[str, ...] = ()
    """Secrets whose keys become environment variables."""
    variables: tuple[SecretVariable, ...] = ()
    auth_secret: str | None = None
    """Secret with Ray's token under `auth_token`; None: KubeRay creates one."""
    root: str | None = None
    """Base of the spec's relative paths; None: the first claim, else the images' working directory."""
    out: str | None = None
    """Run folder; None: the spec's."""
    gib_per_cpu: int = 4
    gib_per_gpu: int = 64
    shm_gib: int | None = None
    """Size of /dev/shm in worker pods; None: half of the pod's memory. Ray's object store takes up to 30 % of a pod's
    memory there; the rest is for the weight file and for the segments of torch and NCCL."""
    head_cpus: int = 4
    head_gib: int = 16
    """Memory of the head pod, which runs the controller and no worker."""
    ttl_s: int = 300
    """Seconds a finished job's cluster (and its GPUs) is kept for inspection."""
    retries: int = 1
    """New clusters after a failure; each resumes from the newest checkpoint."""
    deadline_s: int | None = None
    """Longest lifetime of the job; None: the sum of the spec's own timeouts."""

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise UsageError(problem)

    @property
    def base(self) -> str:
        """Base of the spec's relative paths."""
        return self.root or (self.claims[0].path if self.claims else WORKSPACE)

    def memory_gib(self, group: PodGroup) -> int:
        """Memory of a worker pod, /dev/shm included."""
        return _BASE_GIB + self.gib_per_cpu * group.cpus + self.gib_per_gpu * group.gpus

    def shared_gib(self, group: PodGroup) -> int:
        """Size of /dev/shm in a worker pod."""
        return self.shm_gib or self.memory_gib(group) // 2


def parse_claim(text: str) -> Claim:
    """Parse `CLAIM:/FOLDER` of --pvc. Raises UsageError."""
    name, colon, path = text.partition(":")
    if not colon or not _SUBDOMAIN.fullmatch(name):
        raise UsageError(f"--pvc {_short(text)}: expected CLAIM:/FOLDER, as in models:/models")
    return Claim(name, _folder("--pvc", path))


def parse_variable(text: str) -> SecretVariable:
    """Parse `NAME=SECRET:KEY` of --env.

    Raises:
        UsageError: it has another form. The message repeats nothing after `=`, which may be a secret value.
    """
    variable, equals, source = text.partition("=")
    secret, _, key = source.partition(":")
    if not equals or not _VARIABLE.fullmatch(variable):
        raise UsageError("--env: expected NAME=SECRET:KEY, a variable and the Secret and key that hold its value")
    if not _SUBDOMAIN.fullmatch(secret) or not _KEY.fullmatch(key):
        raise UsageError(f"--env {variable}: expected {variable}=SECRET:KEY; store the value in a Secret")
    return SecretVariable(variable, secret, key)


def _problems(options: Options) -> Iterator[str]:
    yield from _name_problems(options)
    if options.namespace is not None and not _LABEL.fullmatch(options.namespace):
        yield f"--namespace {_short(options.namespace)}: not a DNS label (lowercase letters, digits and '-')"
    if not _IMAGE.fullmatch(options.image):
        yield f"--image {_short(options.image)}: not an image reference"
    for flag, names in (("--env-from-secret", options.secrets), ("--auth-secret", (options.auth_secret,))):
        for name in names:
            if name is not None and not _SUBDOMAIN.fullmatch(name):
                yield f"{flag}: expected the name of a Secret (lowercase letters, digits, '-' and '.')"
    for flag, folder in (("--root", options.root), ("--out", options.out)):
        if folder is not None:
            _folder(flag, folder)
    yield from _mount_problems(options)
    yield from _variable_problems(options)
    yield from _number_problems(options)


def _name_problems(options: Options) -> Iterator[str]:
    kind, longest = ("RayCluster", _LONGEST_CLUSTER) if options.cluster_only else ("RayJob", _LONGEST_JOB)
    if len(options.name) > longest:
        yield (
            f"the name '{_short(options.name)}' has {len(options.name)} characters; a {kind}'s name has at most "
            f"{longest}, because KubeRay appends to it: set a shorter one with --name"
        )
    if not _NAME.fullmatch(options.name):
        rule = "lowercase letters, digits and '-', starting with a letter and not ending in '-'"
        yield f"the name '{_short(options.name)}' is not a DNS label ({rule}); set one with --name"


def _mount_problems(options: Options) -> Iterator[str]:
    paths = [claim.path for claim in options.claims]
    for claim in options.claims:
        if claim.path == "/" or any(_inside(claim.path, path) or _inside(path, claim.path) for path in _RESERVED_PATHS):
            yield f"--pvc {claim.name}:{claim.path}: the path is reserved; mount the claim elsewhere"
        if paths.count(claim.path) > 1:
            yield f"--pvc {claim.name}:{claim.path}: two claims have this mount path"


def _variable_problems(options: Options) -> Iterator[str]:
    names = [variable.variable for variable in options.variables]
    for name in names:
        if name in _RESERVED_VARIABLES:
            yield f"--env {name}: KubeRay sets this variable; set Ray's token with --auth-secret"
        if names.count(name) > 1:
            yield f"--env {name}: specified twice"


def _number_problems(options: Options) -> Iterator[str]:
    numbers = {
        "--gib-per-cpu": (options.gib_per_cpu, 1),
        "--gib-per-gpu": (options.gib_per_gpu, 1),
        "--shm-gib": (options.shm_gib, 1),
        "--ttl-s": (options.ttl_s, 0),
        "--retries": (options.retries, 0),
        "--deadline-s": (options.deadline_s, 1),
    }
    for flag, (number, least) in numbers.items():
        if number is not None and not least <= number <= LONGEST_S:
            yield f"{flag}: must be between {least} and {LONGEST_S}, got {number}"


def _folder(flag: str, path: str) -> str:
    """Normalize an absolute path. Raises UsageError for characters that Kubernetes or a shell would interpret."""
    if not path.startswith("/") or ".." in path.split("/") or re.search(r"[:\s\x00-\x1f]", path):
        raise UsageError(f"{flag}: expected an absolute path without ':', '..' and whitespace, got {_short(path)!r}")
    return "/" + posixpath.normpath(path).lstrip("/")


def _inside(path: str, folder: str) -> bool:
    return PurePosixPath(path).is_relative_to(folder)


def _short(text: str) -> str:
    return re.sub(r"[\x00-\x1f\x7f]", "?", text if len(text) <= 60 else f"{text[:57]}...")
