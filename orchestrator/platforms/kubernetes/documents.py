"""The YAML documents of a KubeRay deployment: a RayJob with its spec in a ConfigMap, or a RayCluster alone."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import yaml

from troupe.orchestrator.capacity.placement import ACCELERATOR
from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.platforms.kubernetes import templates
from troupe.orchestrator.platforms.kubernetes.accelerators import node_affinity
from troupe.orchestrator.platforms.kubernetes.memory import HEAD, PodMemory, memory, unplanned
from troupe.orchestrator.platforms.kubernetes.options import LONGEST_S, SPEC_FOLDER, Options
from troupe.orchestrator.platforms.kubernetes.patch import apply_patches
from troupe.orchestrator.platforms.kubernetes.pods import PodGroup, pod_groups
from troupe.orchestrator.spec.load import RunSpec
from troupe.orchestrator.spec.stages import PlannedRun

SPEC_FILE = "spec.yaml"

_LARGEST_CONFIG_MAP = 1_000_000
"""Bytes of a spec in a ConfigMap; Kubernetes rejects objects of more than 1 MiB."""
_SUBMITTER_RETRIES = 20
"""Times the submitter connects to the job's log again. The job goes on without it, but KubeRay takes the job for failed
when it gives up, and a connection rarely lasts as long as a run."""

Document = dict[str, Any]
"""One YAML document."""


def manifests(sent: Document, runs: Sequence[PlannedRun], options: Options) -> list[Document]:
    """The documents to apply: a ConfigMap with the spec and a RayJob, or a RayCluster alone.

    Args:
        sent: The spec (or chain) as plain data with absolute paths.
        runs: Every run of it.
        options: Settings outside the spec.

    Raises:
        UsageError: /dev/shm does not fit into a pod's memory, the spec does not fit into a ConfigMap, or the patch does
            not fit the manifest.
    """
    specs = [run.spec for run in runs]
    groups = pod_groups(specs, options.limits)
    sizes = memory(runs, groups, options)
    if options.cluster_only:
        cluster = _cluster(groups, sizes, options, None)
        return apply_patches([_object("ray.io/v1", "RayCluster", options, spec=cluster)], options.patch)
    config = f"{options.name}-spec"
    text = yaml.safe_dump(sent, sort_keys=False)
    if (size := len(text.encode())) > _LARGEST_CONFIG_MAP:
        raise UsageError(f"the spec has {size} bytes; a ConfigMap holds at most {_LARGEST_CONFIG_MAP}")
    job = {
        "entrypoint": entrypoint(run_folder(sent, options)),
        "submissionMode": "K8sJobMode",
        "submitterConfig": {"backoffLimit": _SUBMITTER_RETRIES},
        "submitterPodTemplate": {"spec": templates.submitter(options)},
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": options.ttl_s,
        "activeDeadlineSeconds": options.deadline_s or longest_s(specs),
        "backoffLimit": options.retries,
        "rayClusterSpec": _cluster(groups, sizes, options, config),
    }
    documents = [
        _object("v1", "ConfigMap", options, name=config, data={SPEC_FILE: text}),
        _object("ray.io/v1", "RayJob", options, spec=job),
    ]
    return apply_patches(documents, options.patch)


def notes(runs: Sequence[PlannedRun], options: Options) -> Iterator[str]:
    """What a user should know about the pods of a manifest, one line each."""
    yield from unplanned(runs, options)
    for group in pod_groups([run.spec for run in runs], options.limits):
        accelerator = dict(group.labels).get(ACCELERATOR)
        if accelerator is not None and node_affinity(accelerator) is None:
            yield (
                f"no label of Kubernetes nodes is known for the accelerator {accelerator}: the pods of {group.name} "
                "may go to any node; set roles.*.node_labels"
            )


def run_folder(sent: Document, options: Options) -> str:
    """The run folder, as the pods see it."""
    return options.out or str(PurePosixPath(sent["output"]["folder"]) / sent["name"])


def entrypoint(out: str) -> str:
    """The job's command line. It starts again by itself after an unexpected end, on the same pods; a retry on new ones
    resumes from the checkpoints of the previous attempt."""
    spec = f"{SPEC_FOLDER}/{SPEC_FILE}"
    return shlex.join(["troupe", "run", spec, "--address", "auto", "--out", out, "--resume", "--supervise"])


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


def _cluster(
    groups: Sequence[PodGroup], sizes: Mapping[str, PodMemory], options: Options, config: str | None
) -> Document:
    """The cluster section. If a role scales, Ray's autoscaler adds the pods that `troupe scale` requests and removes
    idle ones; KubeRay creates its service account with a role for this cluster's pods."""
    elastic = any(group.min_replicas < group.max_replicas for group in groups)
    scaling = {"enableInTreeAutoscaling": True, "autoscalerOptions": templates.autoscaler()}
    return {
        "rayVersion": options.ray_version,
        # KubeRay passes the token to every container, the submitter's included, and uses it itself.
        "authOptions": {"mode": "token", **({"secretName": options.auth_secret} if options.auth_secret else {})},
        **(scaling if elastic else {}),
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0", "num-gpus": "0", **_store(sizes[HEAD])},
            "template": {"spec": templates.head(options, sizes[HEAD], config, elastic)},
        },
        "workerGroupSpecs": [_worker_group(group, sizes[group.name], options) for group in groups],
    }


def _worker_group(group: PodGroup, size: PodMemory, options: Options) -> Document:
    """One group of pods. KubeRay passes the container's CPUs and GPUs to Ray; without a GPU limit, `num-gpus` is set to
    0 because Ray would count every GPU it can see. The labels are Ray's: the autoscaler knows the pods by them too."""
    return {
        "groupName": group.name,
        "replicas": group.replicas,
        "minReplicas": group.min_replicas,
        "maxReplicas": group.max_replicas,
        **({"labels": dict(group.labels)} if group.labels else {}),
        "rayStartParams": {**({} if group.gpus else {"num-gpus": "0"}), **_store(size)},
        "template": {"spec": templates.worker(group, options, size)},
    }


def _store(size: PodMemory) -> dict[str, str]:
    return {"object-store-memory": str(size.store * 2**30)}


def _object(version: str, kind: str, options: Options, *, name: str | None = None, **body: Any) -> Document:
    labels = {"app.kubernetes.io/name": "troupe", "app.kubernetes.io/instance": options.name}
    metadata: Document = {"name": name or options.name}
    if options.namespace is not None:
        metadata["namespace"] = options.namespace
    if kind == "ConfigMap":
        return {"apiVersion": version, "kind": kind, "metadata": {**metadata, "labels": labels}, **body}
    metadata["labels"] = labels | dict(options.labels)
    if options.annotations:
        metadata["annotations"] = dict(options.annotations)
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **body}
