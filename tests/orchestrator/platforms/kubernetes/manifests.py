"""Manifests of `troupe deploy` for tests, and what KubeRay and Kubernetes demand of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from tests.conftest import ROOT
from troupe.orchestrator.platforms.flags import KubernetesFlags, NodeFlags
from troupe.orchestrator.platforms.manifest import Request, manifest
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.chain import PlannedRun
from troupe.orchestrator.spec.load import plan_runs, read_document

SCHEMAS = ROOT / "tests" / "data" / "kuberay"
SPECS = ROOT / "deploy" / "specs"
SHIPPED = sorted(path for path in SPECS.glob("*.yaml") if "roles" in (yaml.safe_load(path.read_text()) or {}))
GRPO = SPECS / "tiny-grpo.yaml"
NODE = SPECS / "node-8gpu-grpo.yaml"
PPO = SPECS / "multinode-ppo.yaml"

SIZES = {
    "7b": {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
    | {"intermediate_size": 18944, "vocab_size": 152064},
    "72b": {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
    | {"intermediate_size": 29568, "vocab_size": 152064},
}
"""Configs of Qwen2.5."""


def write_model(folder: Path, size: str) -> Path:
    """A model's folder with its config alone, from which its size is known."""
    folder.mkdir(parents=True)
    config = {"model_type": "qwen2", "tie_word_embeddings": False, **SIZES[size]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def planned(path: Path, *overrides: str) -> tuple[PlannedRun, ...]:
    """Every run of a file, with its place in a chain."""
    return plan_runs(read_document(path, overrides))


def runs(path: Path, *overrides: str) -> list[RunSpec]:
    """Every run of a file."""
    return [run.spec for run in planned(path, *overrides)]


def deploy(path: Path, *overrides: str, **flags: Any) -> tuple[str, list[str]]:
    """The text and the notes of `troupe deploy`."""
    of_node = {field.name for field in fields(NodeFlags)}
    nodes = NodeFlags(**{name: value for name, value in flags.items() if name in of_node})
    others = KubernetesFlags(**{name: value for name, value in flags.items() if name not in of_node})
    return manifest(Request(path, overrides), nodes, others)


def documents(path: Path, *overrides: str, **flags: Any) -> list[dict[str, Any]]:
    """The documents that `troupe deploy` writes, the RayJob or RayCluster first."""
    text, _ = deploy(path, *overrides, **flags)
    return sorted(yaml.safe_load_all(text), key=lambda document: not document["kind"].startswith("Ray"))


def cluster_of(document: dict[str, Any]) -> dict[str, Any]:
    return document["spec"]["rayClusterSpec"] if document["kind"] == "RayJob" else document["spec"]


def pods_of(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(group, pod spec) of the head and of every worker group."""
    cluster = cluster_of(document)
    yield "head", cluster["headGroupSpec"]["template"]["spec"]
    for group in cluster["workerGroupSpecs"]:
        yield group["groupName"], group["template"]["spec"]


def pod_of(document: dict[str, Any], group: str) -> dict[str, Any]:
    return dict(pods_of(document))[group]


def gib(quantity: str) -> int:
    return int(quantity.removesuffix("Gi"))


@cache
def validator(kind: str) -> jsonschema.Draft202012Validator:
    """KubeRay's schema of a kind, closed: an object with listed fields accepts no others."""

    def close(node: Any) -> None:
        if isinstance(node, list):
            for value in node:
                close(value)
        elif isinstance(node, dict):
            if isinstance(node.get("properties"), dict):
                node.setdefault("additionalProperties", False)
                for value in node["properties"].values():
                    close(value)
            for key in ("items", "additionalProperties"):
                close(node.get(key))

    read = json.loads((SCHEMAS / f"{kind.lower()}s.v1.schema.json").read_text())
    read["properties"]["metadata"] = {"type": "object"}
    close(read)
    return jsonschema.Draft202012Validator(read)


def check(document: dict[str, Any]) -> None:
    """Check a RayJob or RayCluster against KubeRay's schema and the rules that it leaves out."""
    validator(document["kind"]).validate(document)
    check_kuberay_rules(document)
    check_pods(document)


def check_kuberay_rules(document: dict[str, Any]) -> None:
    """Rules of KubeRay's own validation (`ray-operator/controllers/ray/utils/validation.go`)."""
    name = document["metadata"]["name"]
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
    assert len(name) <= {"RayJob": 47, "RayCluster": 53}[document["kind"]]
    cluster = cluster_of(document)
    assert tuple(map(int, cluster["rayVersion"].split(".")[:2])) >= (2, 52)
    assert cluster["authOptions"]["mode"] == "token"
    groups = cluster["workerGroupSpecs"]
    assert len({group["groupName"] for group in groups}) == len(groups) > 0
    for group in [cluster["headGroupSpec"], *groups]:
        # KubeRay rejects labels there, and Ray's autoscaler ignores them.
        assert "labels" not in group["rayStartParams"]
        assert "resources" not in group
        for key, value in group.get("labels", {}).items():
            assert re.fullmatch(r"([a-z0-9][-a-z0-9.]*/)?[A-Za-z0-9][-A-Za-z0-9_.]{0,62}", key)
            assert re.fullmatch(r"[A-Za-z0-9][-A-Za-z0-9_.]{0,62}", value)
    for group in groups:
        assert 1 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    if document["kind"] == "RayJob":
        spec = document["spec"]
        assert spec["activeDeadlineSeconds"] > 0 <= spec["backoffLimit"]
        assert spec["shutdownAfterJobFinishes"] is True  # else it could not be suspended
        # A pod of a Kubernetes Job.
        assert spec["submitterPodTemplate"]["spec"]["restartPolicy"] in ("Never", "OnFailure")


def check_pods(document: dict[str, Any]) -> None:
    """Rules of Kubernetes for pods, and of the Pod Security Standard `restricted`."""
    cluster = cluster_of(document)
    elastic = cluster.get("enableInTreeAutoscaling", False)
    scaling = cluster.get("autoscalerOptions", {})
    for name, pod in pods_of(document):
        (container,) = pod["containers"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = container["volumeMounts"]
        of_autoscaler = scaling["volumeMounts"] if elastic and name == "head" else []
        assert len(volumes) == len(pod["volumes"])
        assert {mount["name"] for mount in [*mounts, *of_autoscaler]} == set(volumes)
        assert all(re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", volume) for volume in volumes)
        paths = [mount["mountPath"] for mount in mounts]
        assert len(set(paths)) == len(paths) and all(path.startswith("/") for path in paths)
        assert container["resources"]["requests"] == container["resources"]["limits"]
        names = [variable["name"] for variable in container["env"]]
        assert len(set(names)) == len(names)
        assert {"name": "RAY_AUTH_MODE", "value": "token"} in container["env"]
        assert "restartPolicy" not in pod  # the autoscaler sets its own
        check_shared_memory(cluster, name, pod)
        check_stop(pod)
    submitted = [document["spec"]["submitterPodTemplate"]["spec"]] if document["kind"] == "RayJob" else []
    for pod in [*(pod for _, pod in pods_of(document)), *submitted]:
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
    assert not elastic or scaling["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def check_shared_memory(cluster: Mapping[str, Any], name: str, pod: Mapping[str, Any]) -> None:
    """The object store fits into /dev/shm, and that into the pod's memory."""
    groups = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    container = pod["containers"][0]
    (shm,) = (mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == "/dev/shm")
    (volume,) = (volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == shm)
    assert volume["medium"] == "Memory"
    params = (cluster["headGroupSpec"] if name == "head" else groups[name])["rayStartParams"]
    store = int(params["object-store-memory"]) / 2**30
    assert store <= gib(volume["sizeLimit"]) < gib(container["resources"]["limits"]["memory"])
    # KubeRay takes these from the container, unless they are set.
    from_container = {"num-gpus"} if "nvidia.com/gpu" in container["resources"]["limits"] else set()
    assert from_container.isdisjoint(params)
    assert from_container or params["num-gpus"] == "0"


def check_stop(pod: Mapping[str, Any]) -> None:
    """A pod waits for the run before it ends, and the hook ends before the pod is killed."""
    hook = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert hook[:3] == ["python", "-m", "troupe.orchestrator.platforms.kubernetes.pre_stop"]
    assert pod["terminationGracePeriodSeconds"] > float(hook[hook.index("--timeout-s") + 1])
