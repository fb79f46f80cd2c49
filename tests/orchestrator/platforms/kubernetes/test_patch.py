"""`troupe deploy --patch`: everything that has no flag."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.orchestrator.platforms.kubernetes.manifests import NODE, check, cluster_of, documents, pod_of, pods_of
from troupe.orchestrator.errors import UsageError


@pytest.fixture
def patched(tmp_path: Path) -> Any:
    """Deploys with a patch: the RayJob or RayCluster, and the other documents."""

    def deploy(text: str, **flags: Any) -> list[dict[str, Any]]:
        file = tmp_path / "patch.yaml"
        file.write_text(text)
        return documents(NODE, patch=file, **flags)

    return deploy


def test_containers_volumes_and_variables_are_merged_by_name(patched: Any) -> None:
    before = pod_of(documents(NODE)[0], "gpu")
    job, _ = patched(
        """
        spec:
          ttlSecondsAfterFinished: 60
          rayClusterSpec:
            workerGroupSpecs:
            - groupName: gpu
              template:
                spec:
                  priorityClassName: high
                  tolerations: []
                  containers:
                  - name: ray-worker
                    env: [{name: NCCL_DEBUG, value: INFO}, {name: RAY_AUTH_MODE, value: token}]
                    volumeMounts: [{name: scratch, mountPath: /scratch}]
                    resources: {limits: {memory: 700Gi}, requests: {memory: 700Gi}}
                  volumes: [{name: scratch, hostPath: {path: /mnt/nvme}}]
        """
    )
    check(job)
    pod = pod_of(job, "gpu")
    assert job["spec"]["ttlSecondsAfterFinished"] == 60
    assert pod["priorityClassName"] == "high" and pod["tolerations"] == []
    container, original = pod["containers"][0], before["containers"][0]
    assert container["env"] == [*original["env"], {"name": "NCCL_DEBUG", "value": "INFO"}]
    assert container["volumeMounts"] == [*original["volumeMounts"], {"name": "scratch", "mountPath": "/scratch"}]
    assert container["resources"]["limits"] == original["resources"]["limits"] | {"memory": "700Gi"}
    assert pod["volumes"][-1] == {"name": "scratch", "hostPath": {"path": "/mnt/nvme"}}
    assert "priorityClassName" not in pod_of(job, "cpu") and "priorityClassName" not in pod_of(job, "head")


def example(heading: str) -> str:
    """The patch below a heading of the guide."""
    page = (ROOT / "docs" / "guides" / "clusters.md").read_text(encoding="utf-8")
    found = re.search(rf"^#### {re.escape(heading)}\n.*?^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def test_the_guide_shows_how_all_pods_get_a_selector_tolerations_and_a_pull_secret(patched: Any) -> None:
    job, _ = patched(example("Nodes and private registries"))
    check(job)
    for name, pod in [*pods_of(job), ("submitter", job["spec"]["submitterPodTemplate"]["spec"])]:
        assert pod["nodeSelector"] == {"pool": "train"}
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
        gpu = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}] if name == "gpu" else []
        dedicated = {"key": "dedicated", "operator": "Equal", "value": "rl", "effect": "NoSchedule"}
        assert pod["tolerations"] == [*gpu, dedicated]


def test_the_guide_shows_how_a_job_gets_a_queue_and_its_pods_do_not(patched: Any) -> None:
    """Kueue would queue pods with the label separately."""
    job, config = patched(example("Queues"))
    assert job["metadata"]["labels"] == {
        "app.kubernetes.io/name": "troupe",
        "app.kubernetes.io/instance": "node-8gpu-grpo",
        "kueue.x-k8s.io/queue-name": "rl",
    }
    assert job["metadata"]["annotations"] == {"example.com/owner": "my-team"}
    assert "annotations" not in config["metadata"] and len(config["metadata"]["labels"]) == 2
    assert "queue-name" not in json.dumps(job["spec"])


def test_the_guide_shows_how_pods_with_gpus_request_rdma_devices(patched: Any) -> None:
    job, _ = patched(example("RDMA"))
    check(job)
    for name, pod in pods_of(job):
        container = pod["containers"][0]
        assert container["resources"]["limits"].get("rdma/hca") == ("8" if name == "gpu" else None)
        added = container["securityContext"]["capabilities"].get("add")
        assert added == (["IPC_LOCK"] if name == "gpu" else None)


def test_the_guide_shows_how_to_name_secrets_and_to_keep_a_cluster_for_longer(patched: Any) -> None:
    job, _ = patched("---\n".join(map(example, ("Tokens and Secrets", "The end of a job"))))
    check(job)
    assert cluster_of(job)["authOptions"] == {"mode": "token", "secretName": "ray-token"}
    assert all(pod["containers"][0]["envFrom"] == [{"secretRef": {"name": "team-settings"}}] for _, pod in pods_of(job))
    spec = job["spec"]
    assert (spec["ttlSecondsAfterFinished"], spec["backoffLimit"], spec["activeDeadlineSeconds"]) == (3600, 3, 86400)


def test_a_star_patches_every_group(patched: Any) -> None:
    job, _ = patched(
        "spec: {rayClusterSpec: {workerGroupSpecs: [{groupName: '*', template: {spec: {hostIPC: true}}}]}}"
    )
    assert {name for name, pod in pods_of(job) if pod.get("hostIPC")} == {"gpu", "cpu"}


def test_null_and_delete_remove(patched: Any) -> None:
    text = """
    spec:
      activeDeadlineSeconds: null
      rayClusterSpec:
        workerGroupSpecs: [{groupName: cpu, $patch: delete}]
    """
    job, _ = patched(text)
    assert "activeDeadlineSeconds" not in job["spec"] and [name for name, _ in pods_of(job)] == ["head", "gpu"]


def test_other_documents_are_patched_by_their_kind(patched: Any) -> None:
    job, config = patched("{kind: ConfigMap, immutable: true}\n---\n{metadata: {labels: {team: rl}}}")
    assert config["immutable"] is True and job["metadata"]["labels"]["team"] == "rl"
    (cluster,) = patched("{kind: RayCluster, spec: {headGroupSpec: {serviceType: NodePort}}}", cluster_only=True)
    assert cluster["spec"]["headGroupSpec"]["serviceType"] == "NodePort"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1]", "expected a mapping"),
        ("a: [", "not YAML"),
        ("kind: RayCluster", "--patch: kind: the manifest has no RayCluster (it has ConfigMap, RayJob)"),
        (
            "spec: {rayClusterSpec: {workerGroupSpecs: [{groupName: gpus}]}}",
            "--patch: spec.rayClusterSpec.workerGroupSpecs: no groupName 'gpus' (the manifest has gpu, cpu)",
        ),
        (
            "spec: {rayClusterSpec: {workerGroupSpecs: [{replicas: 2}]}}",
            "--patch: spec.rayClusterSpec.workerGroupSpecs: every element needs a groupName",
        ),
    ],
)
def test_a_patch_that_does_not_fit_is_refused_in_one_line(patched: Any, text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        patched(text)
    assert said in str(caught.value) and "\n" not in str(caught.value)
