"""Pod templates: the head, the workers and the submitter. Valid under the Pod Security Standard `restricted`."""

from __future__ import annotations

from typing import Any

from troupe.orchestrator.capacity.placement import ACCELERATOR
from troupe.orchestrator.platforms.kubernetes.accelerators import node_affinity
from troupe.orchestrator.platforms.kubernetes.memory import HEAD_CPUS, PodMemory
from troupe.orchestrator.platforms.kubernetes.options import API_TOKEN_FOLDER, SPEC_FOLDER, Options
from troupe.orchestrator.platforms.kubernetes.pods import PodGroup
from troupe.orchestrator.platforms.kubernetes.values import Toleration

USER = 1000
"""The images' user; also the group that owns mounted volumes."""
API_TOKEN = "api-token"
"""Volume with the token of the autoscaler's service account."""

_GPU = "nvidia.com/gpu"
_KILL_S = 60
"""Seconds of the grace period that remain for Ray to end once the run has saved."""
_IDLE_S = 600
"""Seconds after which the autoscaler removes a pod without workers. A run needs a while to use its first pods: it loads
data and downloads models before it starts workers."""
_TOKEN_S = 3600
"""Lifetime of the autoscaler's token; the kubelet renews it, and the autoscaler reads it again every minute."""

Document = dict[str, Any]
"""A part of a YAML document."""


def head(options: Options, memory: PodMemory, config: str | None, elastic: bool) -> Document:
    """The head pod. It offers no Ray resources, so no worker is placed on it; its CPUs and memory are for the
    controller and for Ray itself.

    Args:
        options: Settings of the manifest.
        memory: Memory of the pod.
        config: ConfigMap with the spec; None: none.
        elastic: Whether the autoscaler runs in the pod and needs the token of its service account.
    """
    resources = {"cpu": str(HEAD_CPUS), "memory": f"{memory.limit}Gi"}
    pod = _ray_pod("ray-head", options, memory.shm, resources, gpus=False)
    container = pod["containers"][0]
    # Ray gives a stopped job three seconds otherwise.
    container["env"].append({"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": str(options.stop_s)})
    container["lifecycle"] = _pre_stop(options, "--stop-jobs")
    if config is not None:
        pod["volumes"].append({"name": "spec", "configMap": {"name": config}})
        container["volumeMounts"].append({"name": "spec", "mountPath": SPEC_FOLDER, "readOnly": True})
    if elastic:
        pod["volumes"].append(_api_token())
    return pod


def worker(group: PodGroup, options: Options, memory: PodMemory) -> Document:
    """A pod of a group of workers."""
    resources = {"cpu": str(group.cpus), "memory": f"{memory.limit}Gi"}
    if group.gpus:
        resources[_GPU] = str(group.gpus)
        if options.rdma is not None:
            resources[options.rdma.resource] = str(options.rdma.count)
    pod = _ray_pod("ray-worker", options, memory.shm, resources, gpus=bool(group.gpus))
    container = pod["containers"][0]
    if group.gpus and options.rdma is not None:
        container["securityContext"]["capabilities"]["add"] = ["IPC_LOCK"]
    return {**pod, **_on_nodes(group, options)}


def submitter(options: Options) -> Document:
    """The pod that submits the Ray job and follows its log; KubeRay adds the command and the token."""
    return {
        **_pod(options, gpus=False),
        "restartPolicy": "Never",
        "containers": [
            {
                "name": "ray-job-submitter",
                "image": options.image,
                "resources": {
                    "requests": {"cpu": "500m", "memory": "1Gi"},
                    "limits": {"cpu": "1", "memory": "1Gi"},
                },
                "securityContext": restricted(),
            }
        ],
    }


def autoscaler() -> Document:
    """Options of the autoscaler, a container of the head pod, and the only one with a token for Kubernetes' API."""
    return {
        "version": "v2",
        "idleTimeoutSeconds": _IDLE_S,
        "resources": {
            "requests": {"cpu": "500m", "memory": "1Gi"},
            "limits": {"cpu": "500m", "memory": "1Gi"},
        },
        "securityContext": restricted(),
        "volumeMounts": [{"name": API_TOKEN, "mountPath": API_TOKEN_FOLDER, "readOnly": True}],
    }


def restricted() -> Document:
    """Security context of a container. KubeRay gives the init container of a worker pod the worker's own."""
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _pod(options: Options, gpus: bool) -> Document:
    """What all pods share."""
    tolerations = [*([Toleration(_GPU, effect="NoSchedule")] if gpus else []), *options.tolerations]
    return {
        "securityContext": {
            "runAsNonRoot": True,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "automountServiceAccountToken": False,
        **({"imagePullSecrets": [{"name": name} for name in options.pull_secrets]} if options.pull_secrets else {}),
        **({"nodeSelector": dict(options.node_selector)} if options.node_selector else {}),
        **({"tolerations": [one.document() for one in tolerations]} if tolerations else {}),
    }


def _ray_pod(container: str, options: Options, shm_gib: int, resources: dict[str, str], gpus: bool) -> Document:
    volumes: list[Document] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{shm_gib}Gi"}}]
    mounts: list[Document] = [{"name": "shm", "mountPath": "/dev/shm"}]
    for index, claim in enumerate(options.claims):
        volumes.append({"name": f"claim-{index}", "persistentVolumeClaim": {"claimName": claim.name}})
        mounts.append({"name": f"claim-{index}", "mountPath": claim.path})
    return {
        **_pod(options, gpus),
        "terminationGracePeriodSeconds": options.stop_s + _KILL_S,
        "containers": [
            {
                "name": container,
                "image": options.image,
                "env": _environment(options, gpus),
                **({"envFrom": [{"secretRef": {"name": name}} for name in options.secrets]} if options.secrets else {}),
                "resources": {"requests": resources, "limits": resources},
                "securityContext": restricted(),
                "lifecycle": _pre_stop(options),
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }


def _pre_stop(options: Options, *arguments: str) -> Document:
    """Delays the end of a pod until the run has saved (`orchestrator/platforms/kubernetes/pre_stop.py`)."""
    command = ["python", "-m", "troupe.orchestrator.platforms.kubernetes.pre_stop", *arguments]
    return {"preStop": {"exec": {"command": [*command, "--timeout-s", str(options.stop_s)]}}}


def _environment(options: Options, gpus: bool) -> list[Document]:
    """Environment variables of a container.

    The authentication mode is repeated here: a KubeRay without `authOptions` then fails to start the cluster instead of
    starting an open one.
    """
    variables: list[Document] = [{"name": "RAY_AUTH_MODE", "value": "token"}]
    if not gpus:  # CUDA images request every GPU of the node
        variables.append({"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"})
    variables += [{"name": one.variable, "value": one.value} for one in options.variables]
    for one in options.secret_variables:
        source = {"secretKeyRef": {"name": one.secret, "key": one.key}}
        variables.append({"name": one.variable, "valueFrom": source})
    return variables


def _on_nodes(group: PodGroup, options: Options) -> Document:
    """Constraints on the Kubernetes nodes of a group's pods.

    Ray cannot enforce them, because it takes each pod for a node with the labels of its configuration. A spread group's
    pods go to different nodes while there is room; KubeRay's own labels identify the group.
    """
    labels = dict(group.labels)
    accelerator = labels.pop(ACCELERATOR, None)
    selector = dict(options.node_selector) | labels
    constraints: Document = {"nodeSelector": selector} if selector else {}
    affinity = None if accelerator is None else node_affinity(accelerator)
    if affinity is not None:
        constraints["affinity"] = affinity
    if group.spread:
        constraint = {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {"ray.io/group": group.name}},
            "matchLabelKeys": ["ray.io/cluster"],
        }
        constraints["topologySpreadConstraints"] = [constraint]
    return constraints


def _api_token() -> Document:
    """The volume that Kubernetes mounts in every container of a pod whose token is not disabled; here the autoscaler
    alone mounts it, and neither Ray nor the run can use Kubernetes' API."""
    namespace = {"path": "namespace", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}}
    return {
        "name": API_TOKEN,
        "projected": {
            "sources": [
                {"serviceAccountToken": {"path": "token", "expirationSeconds": _TOKEN_S}},
                {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
                {"downwardAPI": {"items": [namespace]}},
            ]
        },
    }
