"""The YAML documents of a KubeRay deployment (`rayjob.yaml.j2`): the values of the template."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import PurePosixPath
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined, Template

from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.plan.placement import ACCELERATOR
from troupe.orchestrator.platforms.kubernetes.memory import HEAD, HEAD_CPUS, memory, unplanned
from troupe.orchestrator.platforms.kubernetes.options import (
    API_TOKEN_FOLDER,
    COMPILED_CODE_FOLDER,
    LONGEST_S,
    SPEC_FOLDER,
    KubernetesOptions,
)
from troupe.orchestrator.platforms.kubernetes.pods import PodGroup, pod_groups
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.chain import PlannedRun
from troupe.orchestrator.spec.derived.paths import path_fields
from troupe.workers.isolation.compiled_code import FOLDER_VARIABLE

USER = 1000
"""The images' user; also the group that owns mounted volumes."""

Document = dict[str, Any]

_FOLDER = files("troupe.orchestrator.platforms.kubernetes")
_SPEC_FILE = "spec.yaml"
_LARGEST_CONFIG_MAP = 1_000_000
"""Bytes of a spec in a ConfigMap; Kubernetes rejects objects of more than 1 MiB."""
_KILL_S = 60
"""Seconds of the grace period that remain for Ray to end once the run has saved."""


@dataclass(frozen=True)
class _Names:
    """Values of the labels of Kubernetes nodes for one type of GPU, any of which matches: NVIDIA's GPU feature
    discovery, GKE, and Karpenter on AWS each have their own."""

    product: tuple[str, ...]
    gke: tuple[str, ...] = ()
    karpenter: tuple[str, ...] = ()


_A100_40 = ("NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-PCIE-40GB")
_A100_80 = ("NVIDIA-A100-SXM4-80GB", "NVIDIA-A100-80GB-PCIe")
_V100 = tuple(f"Tesla-V100-{form}-{size}GB" for form in ("SXM2", "PCIE") for size in (16, 32))
_TYPES = {
    "T4": _Names(("Tesla-T4",), ("nvidia-tesla-t4",), ("t4",)),
    "L4": _Names(("NVIDIA-L4",), ("nvidia-l4",), ("l4",)),
    "A10": _Names(("NVIDIA-A10",)),
    "A10G": _Names(("NVIDIA-A10G",), (), ("a10g",)),
    **{f"RTX{number}": _Names((f"NVIDIA-GeForce-RTX-{number}",)) for number in (3090, 4090, 5090)},
    "V100": _Names((*_V100, "Tesla-V100-SXM3-32GB"), ("nvidia-tesla-v100",), ("v100",)),
    "A100-40G": _Names(_A100_40, ("nvidia-tesla-a100",)),
    "A100-80G": _Names(_A100_80, ("nvidia-a100-80gb",)),
    "A100": _Names((*_A100_40, *_A100_80), ("nvidia-tesla-a100", "nvidia-a100-80gb"), ("a100",)),
    "L40": _Names(("NVIDIA-L40",)),
    "L40S": _Names(("NVIDIA-L40S",), (), ("l40s",)),
    "A6000": _Names(("NVIDIA-RTX-A6000",)),
    "H100": _Names(
        ("NVIDIA-H100-80GB-HBM3", "NVIDIA-H100-PCIe", "NVIDIA-H100-NVL"),
        ("nvidia-h100-80gb", "nvidia-h100-mega-80gb"),
        ("h100",),
    ),
    "H20": _Names(("NVIDIA-H20",)),
    "H200": _Names(("NVIDIA-H200", "NVIDIA-H200-NVL"), ("nvidia-h200-141gb",), ("h200",)),
    "B200": _Names(("NVIDIA-B200",), ("nvidia-b200",), ("b200",)),
}
"""Names of types of GPUs by Ray's name. The products are the names that nvidia-smi reports, with `-` for spaces."""


def manifests(sent: Document, runs: Sequence[PlannedRun], options: KubernetesOptions) -> list[Document]:
    """A ConfigMap with the spec (as plain data with absolute paths) and a RayJob, or a RayCluster alone. Raises
    UsageError if /dev/shm does not fit into a pod's memory, or the spec into a ConfigMap."""
    specs = [run.spec for run in runs]
    groups = pod_groups(specs, options.limits)
    sizes = memory(runs, groups, options)
    spec = yaml.safe_dump(sent, sort_keys=False)
    if not options.cluster_only and (size := len(spec.encode())) > _LARGEST_CONFIG_MAP:
        raise UsageError(f"the spec has {size} bytes; a ConfigMap holds at most {_LARGEST_CONFIG_MAP}")
    given = {one.variable for one in (*options.variables, *options.secret_variables)}
    text = _template().render(
        options=options,
        config=f"{options.name}-spec",
        spec=spec,
        spec_file=_SPEC_FILE,
        spec_folder=SPEC_FOLDER,
        api_token_folder=API_TOKEN_FOLDER,
        compiled=None if FOLDER_VARIABLE in given else (FOLDER_VARIABLE, COMPILED_CODE_FOLDER),
        entrypoint=entrypoint(run_folder(sent, options)),
        deadline_s=longest_s(specs),
        user=USER,
        kill_s=_KILL_S,
        head=sizes[HEAD],
        head_cpus=HEAD_CPUS,
        groups=groups,
        sizes=sizes,
        nodes={group.name: _nodes(group) for group in groups},
        elastic=any(group.min_replicas < group.max_replicas for group in groups),
    )
    return list(yaml.safe_load_all(text))


def notes(runs: Sequence[PlannedRun], options: KubernetesOptions) -> Iterator[str]:
    """What a user should know about the pods of a manifest, one line each."""
    yield from unplanned(runs, options)
    for group in pod_groups([run.spec for run in runs], options.limits):
        accelerator = dict(group.labels).get(ACCELERATOR)
        if accelerator is not None and node_affinity(accelerator) is None:
            yield (
                f"no label of Kubernetes nodes is known for the accelerator {accelerator}: the pods of {group.name} "
                "may go to any node; set roles.*.node_labels"
            )


def run_folder(sent: Document, options: KubernetesOptions) -> str:
    """The run folder, as the pods see it."""
    return options.out or str(PurePosixPath(sent["output"]["folder"]) / sent["name"])


def entrypoint(out: str) -> str:
    """The job's command line, which restarts on the same pods; a retry on new ones resumes from the checkpoints."""
    spec = f"{SPEC_FOLDER}/{_SPEC_FILE}"
    return shlex.join(["troupe", "run", spec, "--address", "auto", "--out", out, "--resume", "--supervise"])


def longest_s(specs: Sequence[RunSpec]) -> int:
    """The sum of the specs' own timeouts, in seconds; a run that takes longer has hung."""
    total = sum(s.schedule.start_timeout_s + s.schedule.steps * s.schedule.step_timeout_s for s in specs)
    return min(math.ceil(total), LONGEST_S)


def unmounted(sent: Document, options: KubernetesOptions) -> list[str]:
    """One line for each path of the spec that is not on a mounted claim, with what follows from it."""
    paths = {**dict(path_fields(sent)), "output.folder": run_folder(sent, options)}
    folder = (
        "what the run writes there ends with its pods, but for copies of checkpoints in an object store "
        f"(checkpoint.path); mount a claim there: --pvc CLAIM:{paths['output.folder']}"
    )
    return [
        f"{field}: {path} is not on any --pvc; "
        + (folder if field == "output.folder" else "the image must contain it, or every pod must mount the same folder")
        for field, path in paths.items()
        if not any(PurePosixPath(path).is_relative_to(claim.path) for claim in options.claims)
    ]


def to_yaml(documents: Sequence[Document]) -> str:
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120)


class _Dumper(yaml.SafeDumper):
    """Writes multi-line strings as blocks and no anchors, so that the manifest is easy to read."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Dumper.add_representer(str, _Dumper.represent_str)


def _template() -> Template:
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = _to_json
    return environment.from_string((_FOLDER / "rayjob.yaml.j2").read_text(encoding="utf-8"))


def _to_json(value: Any) -> str:
    """ASCII JSON that YAML reads as the same value: others write characters outside the basic plane as two escapes."""
    text = json.dumps(value, ensure_ascii=False)
    return re.sub(r"[^ -~]", lambda match: f"\\U{ord(match[0]):08x}", text)


def _nodes(group: PodGroup) -> dict[str, Any]:
    """The labels that the Kubernetes nodes of a group's pods must have, and the affinity for its accelerator."""
    labels = dict(group.labels)
    accelerator = labels.pop(ACCELERATOR, None)
    return {"selector": labels, "affinity": None if accelerator is None else node_affinity(accelerator)}


def node_affinity(accelerator: str) -> dict[str, Any] | None:
    """The affinity of a pod to nodes with GPUs of this type, or None if no label of such nodes is known."""
    names = _TYPES.get(accelerator)
    if names is None:
        return None
    labels = {
        "nvidia.com/gpu.product": names.product,
        "cloud.google.com/gke-accelerator": names.gke,
        "karpenter.k8s.aws/instance-gpu-name": names.karpenter,
    }
    terms = [
        {"matchExpressions": [{"key": key, "operator": "In", "values": list(values)}]}
        for key, values in labels.items()
        if values
    ]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
