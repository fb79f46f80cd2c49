"""`troupe deploy`: a spec as the manifests of a KubeRay cluster. Pure: spec and options in, documents out.

Pods are cut from the placement groups (`orchestrator/placement.py`), so every bundle has a pod that holds it. What the
CRD's schema cannot say (names, duplicates, what fits into what) is checked here.
"""

from __future__ import annotations

import math
import posixpath
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from orchestrator.errors import UsageError
from orchestrator.placement import ACCELERATOR, Placement, place, role_sizes
from orchestrator.spec_any import AnySpec
from orchestrator.spec_sections import ScaledRole

SPEC_FOLDER = "/etc/troupe"
SPEC_FILE = "spec.yaml"
WORKSPACE = "/workspace"
"""Where relative paths start when no claim is mounted: the working directory of the images (deploy/Dockerfile.*)."""
USER = 1000
"""The images' user; also the group that mounted volumes are given to."""

LONGEST_JOB, LONGEST_CLUSTER = 47, 53
"""Characters KubeRay allows in the name of a RayJob and of a RayCluster, so that what it appends still fits."""

_BASE_GIB = 4
"""Ray, torch and vLLM themselves, before any model."""
_LARGEST_CONFIG_MAP = 1_000_000
_LONGEST_S = 2**31 - 1
_GPU = "nvidia.com/gpu"
_RESERVED_PATHS = ("/dev/shm", SPEC_FOLDER, "/tmp/ray")
_RESERVED_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ADDRESS")

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,200}")
_IMAGE = re.compile(r"[A-Za-z0-9][^\s]{0,500}")

Document = dict[str, Any]
"""One YAML document."""


@dataclass(frozen=True)
class Claim:
    """A PersistentVolumeClaim and where every pod sees it."""

    name: str
    path: str


@dataclass(frozen=True)
class SecretVariable:
    """An environment variable whose value is a key of a Secret."""

    variable: str
    secret: str
    key: str


@dataclass(frozen=True)
class PodGroup:
    """The worker pods of one role, all alike."""

    role: str
    replicas: int
    min_replicas: int
    max_replicas: int
    cpus: int
    gpus: int
    labels: tuple[tuple[str, str], ...] = ()
    """What the role's spec asks of its nodes, and Ray's labels of these pods."""
    spread: bool = False
    """On as many nodes as have room."""

    def __post_init__(self) -> None:
        if not self.min_replicas <= self.replicas <= self.max_replicas:
            bounds = f"at least {self.min_replicas} and at most {self.max_replicas}"
            raise UsageError(f"{self.role}: {self.replicas} pods are not {bounds}")


@dataclass(frozen=True)
class Options:
    """What a manifest says besides the spec. Raises UsageError where Kubernetes or KubeRay would not take it."""

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
    """Secret with Ray's token under `auth_token`; None: KubeRay makes one."""
    root: str | None = None
    """Where the spec's relative paths start; None: the first claim, else the images' working directory."""
    out: str | None = None
    """Folder of the run; None: the spec's."""
    gib_per_cpu: int = 4
    gib_per_gpu: int = 64
    shm_gib: int | None = None
    """Size of /dev/shm in worker pods; None: half of the pod's memory. Ray's object store takes up to 30 % of a pod's
    memory there, the rest is for the weight file and for the segments of torch and NCCL."""
    head_cpus: int = 4
    head_gib: int = 16
    """The controller runs in the head pod; no worker does."""
    ttl_s: int = 300
    """Seconds a finished job's cluster (and its GPUs) is kept for a look at it."""
    retries: int = 1
    """New clusters after a failure; each goes on from the newest checkpoint."""
    deadline_s: int | None = None
    """Longest life of the job; None: what the spec's own bounds add up to."""

    def __post_init__(self) -> None:
        for problem in _option_problems(self):
            raise UsageError(problem)

    @property
    def start(self) -> str:
        """Where the spec's relative paths start."""
        return self.root or (self.claims[0].path if self.claims else WORKSPACE)

    def memory_gib(self, group: PodGroup) -> int:
        """Memory of a worker pod; /dev/shm is part of it."""
        return _BASE_GIB + self.gib_per_cpu * group.cpus + self.gib_per_gpu * group.gpus

    def shared_gib(self, group: PodGroup) -> int:
        """Size of /dev/shm in a worker pod."""
        return self.shm_gib or self.memory_gib(group) // 2


def parse_claim(text: str) -> Claim:
    """`NAME:/mount` of --pvc. Raises UsageError."""
    name, colon, path = text.partition(":")
    if not colon or not _SUBDOMAIN.fullmatch(name):
        raise UsageError(f"--pvc {_short(text)}: expected CLAIM:/FOLDER, as in models:/models")
    return Claim(name, _folder("--pvc", path))


def parse_variable(text: str) -> SecretVariable:
    """`NAME=SECRET:KEY` of --env. Raises UsageError, which repeats nothing of what follows `=`: it may be a secret."""
    variable, equals, source = text.partition("=")
    secret, _, key = source.partition(":")
    if not equals or not _VARIABLE.fullmatch(variable):
        raise UsageError("--env: expected NAME=SECRET:KEY, a variable and the Secret and key that hold its value")
    if not _SUBDOMAIN.fullmatch(secret) or not _KEY.fullmatch(key):
        raise UsageError(f"--env {variable}: expected {variable}=SECRET:KEY; values belong into a Secret, not here")
    return SecretVariable(variable, secret, key)


def pod_groups(specs: Sequence[AnySpec]) -> tuple[PodGroup, ...]:
    """One group for each role that has placement groups of its own. Stages of a chain follow one another on the same
    pods: each group is as large as the most demanding stage needs it.

    A pod holds one bundle, resources rounded up to whole numbers. Kubernetes gives whole GPUs only: workers that book
    a part of one share a pod, as many as one GPU holds.
    """
    largest: dict[str, PodGroup] = {}
    for group in (group for spec in specs for group in _groups(spec)):
        other = largest.get(group.role, group)
        largest[group.role] = PodGroup(
            group.role,
            max(group.replicas, other.replicas),
            max(group.min_replicas, other.min_replicas),
            max(group.max_replicas, other.max_replicas),
            max(group.cpus, other.cpus),
            max(group.gpus, other.gpus),
            tuple(dict((*other.labels, *group.labels)).items()),
            group.spread or other.spread,
        )
    return tuple(largest.values())


def _groups(spec: AnySpec) -> Iterator[PodGroup]:
    bundles: dict[str, list[dict[str, float]]] = {}
    first: dict[str, Placement] = {}
    for placement in place(role_sizes(spec)):
        bundles.setdefault(placement.role, []).extend(placement.bundles)
        first.setdefault(placement.role, placement)
    scaled = {name: role for name, role in spec.roles.present().items() if isinstance(role, ScaledRole)}
    for role, asked in bundles.items():
        cpus, gpus = max(bundle["CPU"] for bundle in asked), max(bundle["GPU"] for bundle in asked)
        shared = min(len(asked), int(round(1 / gpus, 6))) if 0 < gpus < 1 else 1
        scales = role in scaled and scaled[role].max_workers is not None
        fewest = scaled[role].min_workers if scales else len(asked)
        most = (scaled[role].max_workers if scales else None) or len(asked)
        pods, least, greatest = (math.ceil(workers / shared) for workers in (len(asked), fewest, most))
        # Ray itself names the type of a pod's GPUs.
        labels = tuple(pair for pair in first[role].labels if pair[0] != ACCELERATOR)
        spread = first[role].strategy == "SPREAD"
        yield PodGroup(role, pods, least, greatest, _whole(shared * cpus), _whole(gpus), labels, spread)


def manifests(sent: Document, specs: Sequence[AnySpec], options: Options) -> list[Document]:
    """The documents to apply: a RayJob and the ConfigMap with its spec, or a RayCluster alone.

    :param sent: the spec (or chain) as data, its paths absolute
    :param specs: every run of it
    Raises UsageError.
    """
    groups = pod_groups(specs)
    for group in groups:
        if options.shared_gib(group) >= (memory := options.memory_gib(group)):
            pod = f"a {group.role} pod has {memory} GiB of memory"
            raise UsageError(f"--shm-gib {options.shm_gib}: {pod}, and /dev/shm counts as memory")
    if options.cluster_only:
        return [_object("ray.io/v1", "RayCluster", options, spec=_cluster(groups, options, None))]
    config = f"{options.name}-spec"
    text = yaml.safe_dump(sent, sort_keys=False)
    if len(text.encode()) > _LARGEST_CONFIG_MAP:
        raise UsageError("the spec is too large for a ConfigMap: more than 1 MB")
    job = {
        "entrypoint": entrypoint(run_folder(sent, options)),
        "submissionMode": "K8sJobMode",
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": options.ttl_s,
        "activeDeadlineSeconds": options.deadline_s or longest_s(specs),
        "backoffLimit": options.retries,
        "rayClusterSpec": _cluster(groups, options, config),
    }
    return [
        _object("ray.io/v1", "RayJob", options, spec=job),
        _object("v1", "ConfigMap", options, name=config, data={SPEC_FILE: text}),
    ]


def run_folder(sent: Document, options: Options) -> str:
    """Folder of the run, as the pods see it."""
    return options.out or str(PurePosixPath(sent["output"]["folder"]) / sent["name"])


def entrypoint(out: str) -> str:
    """The job's command line. `--resume`: a retry finds the checkpoints of the attempt before it."""
    spec = f"{SPEC_FOLDER}/{SPEC_FILE}"
    return shlex.join(["troupe", "run", spec, "--address", "auto", "--out", out, "--resume"])


def longest_s(specs: Sequence[AnySpec]) -> int:
    """What the specs' own bounds add up to: past that, a run has hung."""
    bound = sum(s.schedule.start_timeout_s + s.schedule.steps * s.schedule.step_timeout_s for s in specs)
    return min(math.ceil(bound), _LONGEST_S)


def unmounted(paths: Iterable[tuple[str, str]], options: Options) -> list[str]:
    """Of (field, absolute path), those which no claim holds, a line for each."""
    return [
        f"{field}: {path} lies on no --pvc: the image must have it, or every pod the same folder"
        for field, path in paths
        if not any(PurePosixPath(path).is_relative_to(claim.path) for claim in options.claims)
    ]


def to_yaml(documents: Sequence[Document]) -> str:
    """The documents as one YAML stream."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120)


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as blocks, and no anchors: a manifest is read by people."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Dumper.add_representer(str, _Dumper.represent_str)


def _cluster(groups: Sequence[PodGroup], options: Options, config: str | None) -> Document:
    """Where a role scales, Ray's autoscaler brings the pods that `troupe scale` asks for, and takes away idle ones."""
    elastic = any(group.min_replicas < group.max_replicas for group in groups)
    return {
        **({"enableInTreeAutoscaling": True} if elastic else {}),
        "rayVersion": options.ray_version,
        # KubeRay gives the token to every container, the submitter's too, and uses it itself.
        "authOptions": {"mode": "token", **({"secretName": options.auth_secret} if options.auth_secret else {})},
        "headGroupSpec": _head(options, config),
        "workerGroupSpecs": [_worker_group(group, options) for group in groups],
    }


def _head(options: Options, config: str | None) -> Document:
    """No Ray resources, so nothing is ever placed here; the CPUs and the memory are the controller's and Ray's own."""
    pod = _pod("ray-head", options, options.head_cpus, 0, options.head_gib, options.head_gib // 2)
    if config is not None:
        pod["volumes"].append({"name": "spec", "configMap": {"name": config}})
        pod["containers"][0]["volumeMounts"].append({"name": "spec", "mountPath": SPEC_FOLDER, "readOnly": True})
    return {"rayStartParams": {"num-cpus": "0", "num-gpus": "0"}, "template": {"spec": pod}}


def _worker_group(group: PodGroup, options: Options) -> Document:
    """KubeRay tells Ray the container's CPUs and GPUs; without GPUs Ray would count those it can see."""
    pod = _pod("ray-worker", options, group.cpus, group.gpus, options.memory_gib(group), options.shared_gib(group))
    return {
        "groupName": group.role,
        "replicas": group.replicas,
        "minReplicas": group.min_replicas,
        "maxReplicas": group.max_replicas,
        "rayStartParams": ({} if group.gpus else {"num-gpus": "0"}) | _ray_labels(group),
        "template": {"spec": {**pod, **_on_nodes(group)}},
    }


def _on_nodes(group: PodGroup) -> Document:
    """Where the pods may go. Ray cannot see to that: a pod is a node to it, with the labels that it is given.

    Pods that are spread go to other nodes than those of their group, which KubeRay's own labels tell, if there is room.
    """
    selector = {"nodeSelector": dict(group.labels)} if group.labels else {}
    if not group.spread:
        return selector
    constraint = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {"ray.io/group": group.role}},
        "matchLabelKeys": ["ray.io/cluster"],
    }
    return {**selector, "topologySpreadConstraints": [constraint]}


def _ray_labels(group: PodGroup) -> dict[str, str]:
    return {"labels": ",".join(f"{key}={value}" for key, value in group.labels)} if group.labels else {}


def _pod(container: str, options: Options, cpus: int, gpus: int, memory_gib: int, shm_gib: int) -> Document:
    resources = {"cpu": str(cpus), "memory": f"{memory_gib}Gi", **({_GPU: str(gpus)} if gpus else {})}
    volumes: list[Document] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{shm_gib}Gi"}}]
    mounts: list[Document] = [{"name": "shm", "mountPath": "/dev/shm"}]
    for index, claim in enumerate(options.claims):
        volumes.append({"name": f"claim-{index}", "persistentVolumeClaim": {"claimName": claim.name}})
        mounts.append({"name": f"claim-{index}", "mountPath": claim.path})
    return {
        "securityContext": {
            "runAsNonRoot": True,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "automountServiceAccountToken": False,
        **({"tolerations": [{"key": _GPU, "operator": "Exists", "effect": "NoSchedule"}]} if gpus else {}),
        "containers": [
            {
                "name": container,
                "image": options.image,
                "env": _environment(options, gpus),
                **({"envFrom": [{"secretRef": {"name": name}} for name in options.secrets]} if options.secrets else {}),
                "resources": {"requests": resources, "limits": resources},
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }


def _environment(options: Options, gpus: int) -> list[Document]:
    """The mode is said here too: a KubeRay that does not know `authOptions` then starts no open cluster but none."""
    variables: list[Document] = [{"name": "RAY_AUTH_MODE", "value": "token"}]
    if not gpus:  # CUDA images ask for every GPU of the node
        variables.append({"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"})
    for one in options.variables:
        source = {"secretKeyRef": {"name": one.secret, "key": one.key}}
        variables.append({"name": one.variable, "valueFrom": source})
    return variables


def _object(version: str, kind: str, options: Options, *, name: str | None = None, **body: Any) -> Document:
    metadata = {"name": name or options.name, **({"namespace": options.namespace} if options.namespace else {})}
    labels = {"app.kubernetes.io/name": "troupe", "app.kubernetes.io/instance": options.name}
    return {"apiVersion": version, "kind": kind, "metadata": {**metadata, "labels": labels}, **body}


def _option_problems(options: Options) -> Iterator[str]:
    kind, longest = ("RayCluster", LONGEST_CLUSTER) if options.cluster_only else ("RayJob", LONGEST_JOB)
    if len(options.name) > longest:
        yield (
            f"the name '{_short(options.name)}' has {len(options.name)} characters and a {kind}'s at most {longest}: "
            "KubeRay appends to it; give a shorter one with --name"
        )
    if not _NAME.fullmatch(options.name):
        rule = "lowercase letters, digits and '-', a letter first and no '-' last"
        yield f"the name '{_short(options.name)}' is no DNS label ({rule}); give one with --name"
    if options.namespace is not None and not _LABEL.fullmatch(options.namespace):
        yield f"--namespace {_short(options.namespace)}: is no DNS label"
    if not _IMAGE.fullmatch(options.image):
        yield f"--image {_short(options.image)}: is no image reference"
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


def _mount_problems(options: Options) -> Iterator[str]:
    paths = [claim.path for claim in options.claims]
    for claim in options.claims:
        if claim.path == "/" or any(_inside(claim.path, path) or _inside(path, claim.path) for path in _RESERVED_PATHS):
            yield f"--pvc {claim.name}:{claim.path}: this place is taken; mount it elsewhere"
        if paths.count(claim.path) > 1:
            yield f"--pvc {claim.name}:{claim.path}: two claims are mounted there"


def _variable_problems(options: Options) -> Iterator[str]:
    names = [variable.variable for variable in options.variables]
    for name in names:
        if name in _RESERVED_VARIABLES:
            yield f"--env {name}: is set by KubeRay (its token: --auth-secret)"
        if names.count(name) > 1:
            yield f"--env {name}: is given twice"


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
        if number is not None and not least <= number <= _LONGEST_S:
            yield f"{flag} {number}: expected a whole number from {least} on"


def _folder(flag: str, path: str) -> str:
    """The absolute path, without what Kubernetes or a shell would read in another way. Raises UsageError."""
    if not path.startswith("/") or ".." in path.split("/") or re.search(r"[:\s\x00-\x1f]", path):
        raise UsageError(f"{flag}: {_short(path)!r} is no absolute path without ':', '..' and blanks")
    return "/" + posixpath.normpath(path).lstrip("/")


def _inside(path: str, folder: str) -> bool:
    return PurePosixPath(path).is_relative_to(folder)


def _whole(number: float) -> int:
    """Rounded up, but not for what sums of fractions leave over."""
    return math.ceil(round(number, 6))


def _short(text: str) -> str:
    return re.sub(r"[\x00-\x1f\x7f]", "?", text if len(text) <= 60 else f"{text[:57]}...")
