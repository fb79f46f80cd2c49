"""The YAML documents of a KubeRay deployment: a RayJob with its spec in a ConfigMap, or a RayCluster alone."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath
from typing import Any

import yaml

from orchestrator.errors import UsageError
from orchestrator.platforms.kubernetes.options import LONGEST_S, SPEC_FOLDER, Options
from orchestrator.platforms.kubernetes.pods import PodGroup, pod_groups
from orchestrator.spec.load import RunSpec

SPEC_FILE = "spec.yaml"
USER = 1000
"""The images' user; also the group that owns mounted volumes."""

_LARGEST_CONFIG_MAP = 1_000_000
"""Bytes of a spec in a ConfigMap; Kubernetes rejects objects of more than 1 MiB."""
_GPU = "nvidia.com/gpu"

Document = dict[str, Any]
"""One YAML document."""


def manifests(sent: Document, specs: Sequence[RunSpec], options: Options) -> list[Document]:
    """The documents to apply: a RayJob and the ConfigMap with its spec, or a RayCluster alone.

    Args:
        sent: The spec (or chain) as plain data with absolute paths.
        specs: Every run of it.
        options: Settings outside the spec.

    Raises:
        UsageError: /dev/shm does not fit into a pod's memory, or the spec does not fit into a ConfigMap.
    """
    groups = pod_groups(specs)
    for group in groups:
        if options.shared_gib(group) >= (memory := options.memory_gib(group)):
            pod = f"and a {group.role} pod has {memory} GiB"
            raise UsageError(f"--shm-gib {options.shm_gib}: /dev/shm is part of a pod's memory, {pod}")
    if options.cluster_only:
        return [_object("ray.io/v1", "RayCluster", options, spec=_cluster(groups, options, None))]
    config = f"{options.name}-spec"
    text = yaml.safe_dump(sent, sort_keys=False)
    if (size := len(text.encode())) > _LARGEST_CONFIG_MAP:
        raise UsageError(f"the spec has {size} bytes; a ConfigMap holds at most {_LARGEST_CONFIG_MAP}")
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
    """The run folder, as the pods see it."""
    return options.out or str(PurePosixPath(sent["output"]["folder"]) / sent["name"])


def entrypoint(out: str) -> str:
    """The job's command line. With `--resume`, a retry resumes from the checkpoints of the previous attempt."""
    spec = f"{SPEC_FOLDER}/{SPEC_FILE}"
    return shlex.join(["troupe", "run", spec, "--address", "auto", "--out", out, "--resume"])


def longest_s(specs: Sequence[RunSpec]) -> int:
    """The sum of the specs' own timeouts, in seconds; a run that takes longer has hung."""
    total = sum(s.schedule.start_timeout_s + s.schedule.steps * s.schedule.step_timeout_s for s in specs)
    return min(math.ceil(total), LONGEST_S)


def unmounted(paths: Iterable[tuple[str, str]], options: Options) -> list[str]:
    """One line for each (field, absolute path) that is not on a mounted claim."""
    return [
        f"{field}: {path} is not on any --pvc; the image must contain it, or every pod must mount the same folder"
        for field, path in paths
        if not any(PurePosixPath(path).is_relative_to(claim.path) for claim in options.claims)
    ]


def to_yaml(documents: Sequence[Document]) -> str:
    """Serialize the documents as one YAML stream."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120)


class _Dumper(yaml.SafeDumper):
    """Writes multi-line strings as blocks and no anchors, so that the manifest is easy to read."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Dumper.add_representer(str, _Dumper.represent_str)


def _cluster(groups: Sequence[PodGroup], options: Options, config: str | None) -> Document:
    """The cluster section. If a role scales, Ray's autoscaler adds the pods that `troupe scale` requests and removes
    idle ones."""
    elastic = any(group.min_replicas < group.max_replicas for group in groups)
    return {
        **({"enableInTreeAutoscaling": True} if elastic else {}),
        "rayVersion": options.ray_version,
        # KubeRay passes the token to every container, the submitter's included, and uses it itself.
        "authOptions": {"mode": "token", **({"secretName": options.auth_secret} if options.auth_secret else {})},
        "headGroupSpec": _head(options, config),
        "workerGroupSpecs": [_worker_group(group, options) for group in groups],
    }


def _head(options: Options, config: str | None) -> Document:
    """The head pod. It offers no Ray resources, so no worker is placed on it; its CPUs and memory are for the
    controller and for Ray itself."""
    pod = _pod("ray-head", options, options.head_cpus, 0, options.head_gib, options.head_gib // 2)
    if config is not None:
        pod["volumes"].append({"name": "spec", "configMap": {"name": config}})
        pod["containers"][0]["volumeMounts"].append({"name": "spec", "mountPath": SPEC_FOLDER, "readOnly": True})
    return {"rayStartParams": {"num-cpus": "0", "num-gpus": "0"}, "template": {"spec": pod}}


def _worker_group(group: PodGroup, options: Options) -> Document:
    """One role's pods. KubeRay passes the container's CPUs and GPUs to Ray; without a GPU limit, `num-gpus` is set to 0
    because Ray would count every GPU it can see."""
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
    """Constraints on the Kubernetes nodes of a group's pods.

    Ray cannot enforce them, because it takes each pod for a node with the labels of its configuration. A spread group's
    pods go to different nodes while there is room; KubeRay's own labels identify the group.
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
    """Environment variables of a container.

    The authentication mode is repeated here: a KubeRay without `authOptions` then fails to start the cluster instead of
    starting an open one.
    """
    variables: list[Document] = [{"name": "RAY_AUTH_MODE", "value": "token"}]
    if not gpus:  # CUDA images request every GPU of the node
        variables.append({"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"})
    for one in options.variables:
        source = {"secretKeyRef": {"name": one.secret, "key": one.key}}
        variables.append({"name": one.variable, "valueFrom": source})
    return variables


def _object(version: str, kind: str, options: Options, *, name: str | None = None, **body: Any) -> Document:
    metadata = {"name": name or options.name, **({"namespace": options.namespace} if options.namespace else {})}
    labels = {"app.kubernetes.io/name": "troupe", "app.kubernetes.io/instance": options.name}
    return {"apiVersion": version, "kind": kind, "metadata": {**metadata, "labels": labels}, **body}
