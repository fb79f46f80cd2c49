"""`troupe deploy`: the documents of a manifest, valid under KubeRay's own schema and the rules that it leaves out."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.orchestrator.platforms.kubernetes.manifests import (
    GRPO,
    NODE,
    PPO,
    SHIPPED,
    check,
    cluster_of,
    deploy,
    documents,
    pod_of,
    pods_of,
    runs,
    validator,
)
from tests.orchestrator.test_cli import troupe
from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.plan.placement import Node, fit, place, role_sizes
from troupe.orchestrator.spec.derived.paths import path_fields

CANARY = "hf_canary0123456789"
FLAGS = {
    "pvc": ["models:/models", "team.data:/data"],
    "env": ["NCCL_DEBUG=INFO", "PLAIN="],
    "secret_env": ["HF_TOKEN=hugging-face:token", "WANDB_API_KEY=wandb:key"],
    "namespace": "rl",
    "image": "registry.example/troupe:1@sha256:abc",
}
SCALES = ("roles.rollout.min_workers=1", "roles.rollout.max_workers=6")


def pod_resources(document: dict[str, Any]) -> list[Node]:
    """Every worker pod of a manifest as a node, smallest first."""
    found = []
    for group in cluster_of(document)["workerGroupSpecs"]:
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        cpus, gpus = int(limits["cpu"]), int(limits.get("nvidia.com/gpu", 0))
        found += [Node(f"{group['groupName']}-{i}", cpus, gpus) for i in range(group["replicas"])]
    return sorted(found, key=lambda node: (node.gpus, node.cpus))


@pytest.mark.parametrize("cluster_only", [False, True])
@pytest.mark.parametrize("flags", [{}, FLAGS], ids=["plain", "all-flags"])
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_manifest_of_every_shipped_spec_is_valid(path: Path, flags: dict[str, Any], cluster_only: bool) -> None:
    first, *rest = documents(path, cluster_only=cluster_only, **flags)
    assert first["kind"] == ("RayCluster" if cluster_only else "RayJob")
    check(first)
    pods = pod_resources(first)
    for spec in runs(path):
        placements = place(role_sizes(spec))
        assert fit(placements, pods).missing is None
        for bundle in (bundle for placement in placements for bundle in placement.bundles):
            assert any(pod.cpus >= bundle["CPU"] and pod.gpus >= bundle["GPU"] for pod in pods)
    assert [document["kind"] for document in rest] == ([] if cluster_only else ["ConfigMap"])


def test_the_config_map_is_created_before_the_job_that_mounts_it() -> None:
    text, _ = deploy(GRPO)
    assert [document["kind"] for document in yaml.safe_load_all(text)] == ["ConfigMap", "RayJob"]


def test_the_schema_catches_a_misspelled_field() -> None:
    job, _ = documents(GRPO)
    job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["minReplica"] = 1
    with pytest.raises(jsonschema.ValidationError, match="minReplica"):
        validator("RayJob").validate(job)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_manifest_contains_the_spec_unchanged(path: Path, tmp_path: Path) -> None:
    job, config = documents(path, pvc=["models:/models"])
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    (volume,) = (volume for volume in head["volumes"] if "configMap" in volume)
    assert volume["configMap"]["name"] == config["metadata"]["name"]
    (mount,) = (m for m in head["containers"][0]["volumeMounts"] if m["name"] == volume["name"])
    file = tmp_path / "spec.yaml"
    file.write_text(config["data"]["spec.yaml"])
    words = job["spec"]["entrypoint"].split()
    assert words[:3] == ["troupe", "run", f"{mount['mountPath']}/spec.yaml"]
    assert words[3:5] == ["--address", "auto"] and words[-2:] == ["--resume", "--supervise"]
    sent, own = runs(file), runs(path)
    assert [(s.algorithm, s.schedule, role_sizes(s)) for s in sent] == [
        (s.algorithm, s.schedule, role_sizes(s)) for s in own
    ]
    assert all(Path(value).is_absolute() for _, value in path_fields(yaml.safe_load(file.read_text())))


# Autoscaling


@pytest.mark.parametrize("cluster_only", [False, True])
def test_only_the_autoscaler_has_a_token_for_the_api(cluster_only: bool) -> None:
    (first, *_) = documents(NODE, *SCALES, cluster_only=cluster_only, **FLAGS)
    check(first)
    cluster = cluster_of(first)
    assert cluster["enableInTreeAutoscaling"] is True and cluster["autoscalerOptions"]["version"] == "v2"
    (mount,) = cluster["autoscalerOptions"]["volumeMounts"]
    # Where Ray's autoscaler reads it: IN_CLUSTER_TOKEN_PATH, IN_CLUSTER_CA_CERT_PATH.
    assert mount["mountPath"] == "/var/run/secrets/kubernetes.io/serviceaccount"
    (volume,) = (volume for volume in pod_of(first, "head")["volumes"] if volume["name"] == mount["name"])
    token, authority, _ = volume["projected"]["sources"]
    assert token["serviceAccountToken"]["path"] == "token"
    assert authority["configMap"] == {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}
    for _, pod in pods_of(first):
        assert mount["name"] not in {one["name"] for one in pod["containers"][0]["volumeMounts"]}


def test_a_cluster_that_does_not_scale_has_no_token_and_no_autoscaler() -> None:
    first = documents(NODE)[0]
    assert "autoscalerOptions" not in cluster_of(first) and "enableInTreeAutoscaling" not in cluster_of(first)
    assert "serviceAccountToken" not in json.dumps(first)


# Nodes


def test_labels_of_a_role_are_those_of_its_pods_and_of_their_nodes() -> None:
    (document,) = documents(NODE, *SCALES, "roles.rollout.node_labels={zone: a}", cluster_only=True)
    check(document)
    groups = {group["groupName"]: group for group in cluster_of(document)["workerGroupSpecs"]}
    assert (groups["rollout"]["minReplicas"], groups["rollout"]["maxReplicas"]) == (1, 6)
    assert groups["rollout"]["labels"] == {"zone": "a"} and "labels" not in groups["gpu"]
    assert pod_of(document, "rollout")["nodeSelector"] == {"zone": "a"}
    assert "nodeSelector" not in pod_of(document, "gpu")


def test_an_accelerator_selects_nodes_by_the_label_of_any_distributor() -> None:
    (document,) = documents(NODE, "roles.policy.accelerator=H200", cluster_only=True)
    check(document)
    by_label = {group["groupName"]: group.get("labels") for group in cluster_of(document)["workerGroupSpecs"]}
    assert by_label == {"gpu": {"ray.io/accelerator-type": "H200"}, "gpu-2": None, "cpu": None}
    affinity = pod_of(document, "gpu")["affinity"]["nodeAffinity"]
    terms = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    labels = {one["key"]: one["values"] for term in terms for one in term["matchExpressions"]}
    assert labels == {
        "nvidia.com/gpu.product": ["NVIDIA-H200", "NVIDIA-H200-NVL"],
        "cloud.google.com/gke-accelerator": ["nvidia-h200-141gb"],
        "karpenter.k8s.aws/instance-gpu-name": ["h200"],
    }
    assert all(len(term["matchExpressions"]) == 1 for term in terms)  # terms are alternatives, expressions are not
    assert "affinity" not in pod_of(document, "gpu-2") and "nodeSelector" not in pod_of(document, "gpu")


def test_an_accelerator_without_a_known_label_is_reported() -> None:
    _, notes = deploy(NODE, "roles.policy.accelerator=X1", pvc=["models:/models"], gib_per_node=100)
    assert notes == [
        "no label of Kubernetes nodes is known for the accelerator X1: the pods of gpu may go to any node; "
        "set roles.*.node_labels"
    ]


@pytest.mark.parametrize("role", ["rollout", "reward"])
def test_pods_of_a_spread_role_prefer_different_nodes(role: str) -> None:
    (document,) = documents(NODE, f"roles.{role}.strategy=spread", cluster_only=True)
    check(document)
    group = {"rollout": "gpu", "reward": "cpu"}[role]
    asked = {name: pod.get("topologySpreadConstraints", []) for name, pod in pods_of(document)}
    (constraint,) = asked.pop(group)
    assert not any(asked.values())
    assert (constraint["topologyKey"], constraint["whenUnsatisfiable"]) == ("kubernetes.io/hostname", "ScheduleAnyway")
    assert constraint["labelSelector"] == {"matchLabels": {"ray.io/group": group}}


def test_a_pod_without_gpus_offers_and_sees_none() -> None:
    job, _ = documents(PPO)
    for group in cluster_of(job)["workerGroupSpecs"]:
        container = group["template"]["spec"]["containers"][0]
        hidden = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in container["env"]
        assert hidden == (group["groupName"] != "gpu") == (group["rayStartParams"].get("num-gpus") == "0")


# The end of a job


def test_a_job_shuts_down_at_its_end_and_retries_after_a_failure() -> None:
    spec = documents(NODE)[0]["spec"]
    assert spec["shutdownAfterJobFinishes"] is True
    assert (spec["ttlSecondsAfterFinished"], spec["backoffLimit"]) == (300, 1)
    assert spec["activeDeadlineSeconds"] == 600 + 300 * 7200
    assert documents(NODE, "schedule.steps=100000000")[0]["spec"]["activeDeadlineSeconds"] == 2**31 - 1


def test_a_submitter_that_loses_its_connection_does_not_fail_the_job() -> None:
    assert documents(NODE)[0]["spec"]["submitterConfig"]["backoffLimit"] >= 10


@pytest.mark.parametrize("cluster_only", [False, True])
def test_a_stopped_run_has_the_same_time_to_save_everywhere(cluster_only: bool) -> None:
    (first, *_) = documents(NODE, stop_s=1200, cluster_only=cluster_only)
    check(first)
    for name, pod in pods_of(first):
        container = pod["containers"][0]
        command = container["lifecycle"]["preStop"]["exec"]["command"]
        assert command[-2:] == ["--timeout-s", "1200"] and ("--stop-jobs" in command) == (name == "head")
        assert pod["terminationGracePeriodSeconds"] == 1260
        ray_waits = {"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": "1200"} in container["env"]
        assert ray_waits == (name == "head")  # jobs run there


# Secrets and paths


def test_secrets_are_referenced_and_never_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, CANARY)
    token = tmp_path / "token"
    token.write_text(CANARY)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    text, notes = deploy(NODE, **FLAGS)
    assert CANARY not in text and not any(CANARY in note for note in notes)
    config, job = yaml.safe_load_all(text)
    assert "secret" not in json.dumps(config).lower()
    assert cluster_of(job)["authOptions"] == {"mode": "token"}
    for _, pod in pods_of(job):
        token = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hugging-face", "key": "token"}}}
        assert token in pod["containers"][0]["env"]


def test_paths_outside_every_claim_are_reported() -> None:
    _, notes = deploy(NODE, gib_per_node=512)
    assert [note.split(":")[0] for note in notes] == ["model.path", "output.folder"]
    assert notes[0].startswith("model.path: /workspace/models/policy-7b-instruct is not on any --pvc")
    assert "writes there ends with its pods" in notes[1] and notes[1].endswith(
        ": --pvc CLAIM:/workspace/runs/node-8gpu-grpo"
    )
    assert deploy(NODE, pvc=["models:/models"], gib_per_node=512)[1] == []


def test_checkpoints_in_an_object_store_need_no_claim_and_those_on_a_disk_do() -> None:
    def sent(url: str, *claims: str) -> tuple[Any, list[str]]:
        text, notes = deploy(NODE, f"checkpoint.path={url}", pvc=["models:/models", *claims], gib_per_node=512)
        spec = yaml.safe_load(next(yaml.safe_load_all(text))["data"]["spec.yaml"])
        return spec["checkpoint"]["path"], notes

    for url in ("s3://bucket/runs?region=eu-west-1", "abfs://box@me.dfs.core.windows.net/runs"):
        assert sent(url) == (url, [])
    assert sent("file:///mnt/runs", "runs:/mnt") == ("file:///mnt/runs", [])
    assert sent("file:///mnt/runs")[1][0].startswith("checkpoint.path: /mnt/runs is not on any --pvc")


def test_relative_paths_are_resolved_against_the_root_or_the_first_claim() -> None:
    def folder(**flags: Any) -> str:
        return documents(NODE, **flags)[0]["spec"]["entrypoint"].split()[6]

    assert folder() == "/workspace/runs/node-8gpu-grpo"
    assert folder(pvc=["a:/a", "b:/b"]) == "/a/runs/node-8gpu-grpo"
    assert folder(pvc=["a:/a", "b:/b"], root="/b/me") == "/b/me/runs/node-8gpu-grpo"


def test_a_spec_that_is_too_large_for_a_config_map_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("troupe.orchestrator.platforms.kubernetes.documents._LARGEST_CONFIG_MAP", 100)
    with pytest.raises(UsageError, match=r"the spec has \d+ bytes; a ConfigMap holds at most 100"):
        documents(GRPO)


@pytest.mark.parametrize(
    "value",
    [
        *("{{ options }}", "{% if x %}", "{# x #}", "a: {b: [c], 'd': \"e\"} # f", "<&>", "\\n"),
        *("a\nb: c\n---\nd", "!!int 5", "5", "true", "~", "", " ", "\x7f\x85\u2028\ufeff", "é\U0001f600"),
    ],
)
def test_a_value_stays_what_it_is_in_the_template(value: str) -> None:
    job, _ = documents(GRPO, env=[f"A={value}"])
    check(job)
    for _, pod in pods_of(job):
        assert {"name": "A", "value": value} in pod["containers"][0]["env"]


def test_a_manifest_is_readable() -> None:
    text, _ = deploy(NODE, **FLAGS)
    assert "&id" not in text and "\n  spec.yaml: |\n    name: node-8gpu-grpo\n" in text


def test_without_an_installed_package_the_image_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "troupe-rl":
            raise importlib.metadata.PackageNotFoundError(name)
        return "2.60.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(UsageError, match="--image: required"):
        deploy(GRPO)
    assert deploy(GRPO, image="mine:1")[0]


# The command


def test_the_command_writes_the_file_and_imports_nothing_heavy(tmp_path: Path) -> None:
    file = tmp_path / "manifest.yaml"
    answer = troupe("deploy", str(NODE), "--pvc", "models:/models", "--gib-per-node", "512", "-o", str(file))
    assert (answer.code, answer.errors, answer.heavy, answer.stdout) == (0, [], [], f"wrote {file}\n")
    assert [document["kind"] for document in yaml.safe_load_all(file.read_text())] == ["ConfigMap", "RayJob"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "name=" + "x" * 60], "error: the name 'xxx"),
        (["--pvc", "models:relative"], "error: --pvc: expected an absolute path"),
        (["--secret-env", f"HF_TOKEN={CANARY}"], "error: --secret-env HF_TOKEN: expected HF_TOKEN=SECRET:KEY"),
        (["--env", f"HF_TOKEN={CANARY}"], "error: --env HF_TOKEN: the value of a credential"),
        (["--nodes", "2"], "error: --nodes: requires --slurm"),
        (["--slurm", "--pvc", "a:/a"], "error: --pvc: not available with --slurm"),
        (["-o", "/no/such/folder/m.yaml"], "error: --output /no/such/folder/m.yaml: No such file or directory"),
        (["--set", "roles.policy.wrkers=2"], "did you mean 'workers'?"),
    ],
)
def test_bad_input_gives_one_line_and_exit_code_2(arguments: list[str], said: str) -> None:
    answer = troupe("deploy", str(GRPO), *arguments)
    errors = [line for line in answer.errors if not line.startswith("note: ")]
    assert (answer.code, len(errors), answer.heavy) == (2, 1, [])
    assert said in errors[0] and CANARY not in errors[0]


def test_worker_pods_keep_compiled_code_unless_the_environment_names_a_folder() -> None:
    """The head has no worker."""
    for env, kept in (([], True), (["TROUPE_COMPILED_CODE=/disk"], False)):
        job, _ = documents(GRPO, env=env)
        for name, pod in pods_of(job):
            (container,) = pod["containers"]
            values = {one["name"]: one.get("value") for one in container["env"]}
            mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
            expected = "/var/cache/troupe" if name != "head" and kept else None
            assert mounts.get("compiled") == expected
            assert values.get("TROUPE_COMPILED_CODE") == (expected if kept else "/disk")
            assert ({"name": "compiled", "emptyDir": {}} in pod["volumes"]) == (expected is not None)
