"""Options of a KubeRay manifest, checked against the rules of Kubernetes and KubeRay that the CRD schema leaves out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.platforms.kubernetes.pods import Limits
from troupe.orchestrator.platforms.kubernetes.values import Claim, SecretVariable, Variable, folder, short

SPEC_FOLDER = "/etc/troupe"
"""Mount path of the ConfigMap with the spec."""
WORKSPACE = "/workspace"
"""Base of relative paths when no claim is mounted: the working directory of the images (deploy/images/Dockerfile.*)."""
COMPILED_CODE_FOLDER = "/var/cache/troupe"
"""Mount path of the volume that keeps compiled code while a container of the pod starts again."""
API_TOKEN_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Where the autoscaler reads the token of its service account."""
LONGEST_S = 2**31 - 1
"""Largest duration of a Kubernetes object, in seconds: a signed 32-bit integer."""

_LONGEST_JOB, _LONGEST_CLUSTER = 47, 53
"""Characters KubeRay allows in the name of a RayJob and of a RayCluster, because it appends to them."""
_RESERVED_PATHS = ("/dev/shm", SPEC_FOLDER, "/tmp/ray", API_TOKEN_FOLDER, COMPILED_CODE_FOLDER)
_RESERVED_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ADDRESS", "RAY_JOB_STOP_WAIT_TIME_S")

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_IMAGE = re.compile(r"[A-Za-z0-9][^\s]{0,500}")


@dataclass(frozen=True)
class KubernetesOptions:
    """Settings of a manifest besides the spec. Raises UsageError if Kubernetes or KubeRay would reject a value."""

    name: str
    image: str
    ray_version: str
    namespace: str | None = None
    cluster_only: bool = False
    claims: tuple[Claim, ...] = ()
    variables: tuple[Variable, ...] = ()
    secret_variables: tuple[SecretVariable, ...] = ()
    root: str | None = None
    """Base of the spec's relative paths. If None, the first claim, else the images' working directory."""
    out: str | None = None
    """Run folder, or None for the spec's."""
    limits: Limits = field(default_factory=Limits)
    gib_per_node: int | None = None
    """Memory of a worker pod with GPUs (of every worker pod, if none has any), or None for the plan's."""
    shm_gib: int | None = None
    """Size of /dev/shm in worker pods, or None for the plan's."""
    stop_s: int = 600
    """Seconds that a stopped run has to save."""

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise UsageError(problem)

    @property
    def base(self) -> str:
        return self.root or (self.claims[0].path if self.claims else WORKSPACE)


def _problems(options: KubernetesOptions) -> Iterator[str]:
    yield from _name_problems(options)
    if options.namespace is not None and not _LABEL.fullmatch(options.namespace):
        yield f"--namespace {short(options.namespace)}: not a DNS label (lowercase letters, digits and '-')"
    if not _IMAGE.fullmatch(options.image):
        yield f"--image {short(options.image)}: not an image reference"
    for flag, path in (("--root", options.root), ("--out", options.out)):
        if path is not None:
            folder(flag, path)
    yield from _mount_problems(options)
    yield from _variable_problems(options)
    yield from _number_problems(options)


def _name_problems(options: KubernetesOptions) -> Iterator[str]:
    kind, longest = ("RayCluster", _LONGEST_CLUSTER) if options.cluster_only else ("RayJob", _LONGEST_JOB)
    if len(options.name) > longest:
        yield (
            f"the name '{short(options.name)}' has {len(options.name)} characters; a {kind}'s name has at most "
            f"{longest}, because KubeRay appends to it: set a shorter one with --name"
        )
    if not _NAME.fullmatch(options.name):
        rule = "lowercase letters, digits and '-', starting with a letter and not ending in '-'"
        yield f"the name '{short(options.name)}' is not a DNS label ({rule}); set one with --name"


def _mount_problems(options: KubernetesOptions) -> Iterator[str]:
    paths = [claim.path for claim in options.claims]
    for claim in options.claims:
        if claim.path == "/" or any(_inside(claim.path, path) or _inside(path, claim.path) for path in _RESERVED_PATHS):
            yield f"--pvc {claim.name}:{claim.path}: the path is reserved; mount the claim elsewhere"
        if paths.count(claim.path) > 1:
            yield f"--pvc {claim.name}:{claim.path}: two claims have this mount path"


def _variable_problems(options: KubernetesOptions) -> Iterator[str]:
    flags = [("--env", variable.variable) for variable in options.variables]
    flags += [("--secret-env", variable.variable) for variable in options.secret_variables]
    names = [name for _, name in flags]
    for flag, name in flags:
        if name in _RESERVED_VARIABLES:
            instead = "set it with --stop-s" if name == "RAY_JOB_STOP_WAIT_TIME_S" else "KubeRay sets this variable"
            yield f"{flag} {name}: {instead}" + (
                "; name the Secret of a token with kustomize" if "AUTH" in name else ""
            )
        if names.count(name) > 1:
            yield f"{flag} {name}: specified twice"


def _number_problems(options: KubernetesOptions) -> Iterator[str]:
    numbers = {
        "--gpus-per-node": (options.limits.gpus, 1),
        "--cpus-per-node": (options.limits.cpus, 1),
        "--gib-per-node": (options.gib_per_node, 1),
        "--shm-gib": (options.shm_gib, 1),
        "--stop-s": (options.stop_s, 1),
    }
    for flag, (number, least) in numbers.items():
        if number is not None and not least <= number <= LONGEST_S:
            yield f"{flag}: must be between {least} and {LONGEST_S}, got {number}"


def _inside(path: str, parent: str) -> bool:
    return PurePosixPath(path).is_relative_to(parent)
