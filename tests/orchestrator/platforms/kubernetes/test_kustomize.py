"""The guide's kustomizations of a manifest: everything that has no flag of `troupe deploy`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT
from tests.orchestrator.platforms.kubernetes.manifests import NODE, check, cluster_of, documents, pod_of, pods_of
from troupe.orchestrator.platforms.kubernetes.documents import to_yaml

HEADINGS = (
    *("Nodes and private registries", "Queues", "RDMA", "Tokens and Secrets", "The end of a job"),
    "Volumes, annotations and priorities of pods",
)


def example(heading: str) -> str:
    """The kustomization below a heading of the guide."""
    page = (ROOT / "docs" / "guides" / "clusters.md").read_text(encoding="utf-8")
    found = re.search(rf"^#### {re.escape(heading)}\n.*?^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def kustomized(heading: str) -> list[dict[str, Any]]:
    """The RayJob with an example's JSON patches (RFC 6902), and the ConfigMap."""
    job, config = documents(NODE)
    for patch in yaml.safe_load(example(heading))["patches"]:
        assert patch["target"] == {"kind": "RayJob"}
        for change in yaml.safe_load(patch["patch"]):
            apply(job, **change)
    check(job)
    return [job, config]


def apply(document: Any, op: str, path: str, value: Any) -> None:
    """Apply one operation. As in kubectl, what contains the place must be there, and what is replaced too."""
    *parents, last = [part.replace("~1", "/") for part in path.split("/")[1:]]
    for part in parents:
        document = document[int(part) if isinstance(document, list) else part]
    if isinstance(document, list):
        assert (op, last) == ("add", "-")
        document.append(value)
    else:
        assert op == "add" or last in document
        document[last] = value


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("heading", HEADINGS)
def test_kubectl_gives_the_same(heading: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.yaml").write_text(to_yaml(documents(NODE)))
    (tmp_path / "kustomization.yaml").write_text(example(heading))
    done = subprocess.run(["kubectl", "kustomize", str(tmp_path)], capture_output=True, text=True, check=True)
    found = {document["kind"]: document for document in yaml.safe_load_all(done.stdout)}
    assert found == {document["kind"]: document for document in kustomized(heading)}


def test_all_pods_get_a_selector_tolerations_and_a_pull_secret() -> None:
    job, _ = kustomized("Nodes and private registries")
    for name, pod in [*pods_of(job), ("submitter", job["spec"]["submitterPodTemplate"]["spec"])]:
        assert pod["nodeSelector"] == {"pool": "train"}
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
        gpu = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}] if name == "gpu" else []
        dedicated = {"key": "dedicated", "operator": "Equal", "value": "rl", "effect": "NoSchedule"}
        assert pod["tolerations"] == [*gpu, dedicated]


def test_a_job_gets_a_queue_and_its_pods_do_not() -> None:
    """Kueue would queue pods with the label separately."""
    job, config = kustomized("Queues")
    assert job["metadata"]["labels"] == {
        "app.kubernetes.io/name": "troupe",
        "app.kubernetes.io/instance": "node-8gpu-grpo",
        "kueue.x-k8s.io/queue-name": "rl",
    }
    assert job["metadata"]["annotations"] == {"example.com/owner": "my-team"}
    assert "annotations" not in config["metadata"] and len(config["metadata"]["labels"]) == 2
    assert "queue-name" not in json.dumps(job["spec"])


def test_pods_with_gpus_request_rdma_devices() -> None:
    job, _ = kustomized("RDMA")
    for name, pod in pods_of(job):
        container = pod["containers"][0]
        assert container["resources"]["limits"].get("rdma/hca") == ("8" if name == "gpu" else None)
        added = container["securityContext"]["capabilities"].get("add")
        assert added == (["IPC_LOCK"] if name == "gpu" else None)


def test_secrets_are_named_and_a_cluster_is_kept_for_longer() -> None:
    job, _ = kustomized("Tokens and Secrets")
    assert cluster_of(job)["authOptions"] == {"mode": "token", "secretName": "ray-token"}
    assert all(pod["containers"][0]["envFrom"] == [{"secretRef": {"name": "team-settings"}}] for _, pod in pods_of(job))
    spec = kustomized("The end of a job")[0]["spec"]
    assert (spec["ttlSecondsAfterFinished"], spec["backoffLimit"], spec["activeDeadlineSeconds"]) == (3600, 3, 86400)


def test_a_group_gets_a_volume_and_the_head_a_priority() -> None:
    job, _ = kustomized("Volumes, annotations and priorities of pods")
    gpu, cpu = pod_of(job, "gpu"), pod_of(job, "cpu")
    assert gpu["volumes"][-1] == {"name": "scratch", "hostPath": {"path": "/mnt/nvme"}}
    assert gpu["containers"][0]["volumeMounts"][-1] == {"name": "scratch", "mountPath": "/scratch"}
    assert len(gpu["volumes"]) == len(cpu["volumes"]) + 1
    assert pod_of(job, "head")["priorityClassName"] == "high" and "priorityClassName" not in gpu
