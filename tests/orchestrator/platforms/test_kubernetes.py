"""`troupe deploy`: manifests are valid under KubeRay's own schema and under the rules that it leaves out."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from orchestrator.capacity.placement import Node, fit, place, role_sizes
from orchestrator.errors import UsageError
from orchestrator.platforms.flags import KubernetesFlags
from orchestrator.platforms.kubernetes.options import Claim, Options, parse_claim, parse_variable
from orchestrator.platforms.kubernetes.pods import PodGroup, pod_groups
from orchestrator.platforms.manifest import Request, manifest
from orchestrator.spec.load import RunSpec
from orchestrator.spec.paths import path_fields
from orchestrator.spec.stages import plan_runs, read_document
from tests.conftest import ROOT
from tests.orchestrator.test_cli import troupe

SCHEMAS = ROOT / "tests" / "data" / "kuberay"
GRPO = ROOT / "deploy" / "specs" / "tiny-grpo.yaml"
NODE = ROOT / "deploy" / "specs" / "node-8gpu-grpo.yaml"
SHIPPED = sorted(
    path for path in (ROOT / "deploy" / "specs").glob("*.yaml") if "roles" in (yaml.safe_load(path.read_text()) or {})
)
CANARY = "hf_canary0123456789"
FLAGS = {
    "pvc": ["models:/models", "team.data:/data"],
    "env": ["HF_TOKEN=hugging-face:token", "WANDB_API_KEY=wandb:key"],
    "env_from_secret": ["team-settings"],
    "auth_secret": "ray-token",
    "namespace": "rl",
    "image": "registry.example/troupe:1@sha256:abc",
}


def runs(path: Path, *overrides: str) -> list[RunSpec]:
    """Every run of a file."""
    return [run.spec for run in plan_runs(read_document(path, overrides))]


def documents(path: Path, *overrides: str, **flags: Any) -> list[dict[str, Any]]:
    """The documents that `troupe deploy` writes."""
    text, _ = manifest(Request(path, overrides), KubernetesFlags(**flags))
    return list(yaml.safe_load_all(text))


def cluster_of(document: dict[str, Any]) -> dict[str, Any]:
    return document["spec"]["rayClusterSpec"] if document["kind"] == "RayJob" else document["spec"]


def pods_of(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(group, pod spec) of the head and of every worker group."""
    cluster = cluster_of(document)
    yield "head", cluster["headGroupSpec"]["template"]["spec"]
    for group in cluster["workerGroupSpecs"]:
        yield group["groupName"], group["template"]["spec"]


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


def check_rules(document: dict[str, Any]) -> None:
    """Check the rules of KubeRay and Kubernetes that the schema leaves out."""
    name = document["metadata"]["name"]
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
    assert len(name) <= {"RayJob": 47, "RayCluster": 53}[document["kind"]]
    cluster = cluster_of(document)
    assert tuple(map(int, cluster["rayVersion"].split(".")[:2])) >= (2, 52)
    assert cluster["authOptions"]["mode"] == "token"
    groups = cluster["workerGroupSpecs"]
    assert len({group["groupName"] for group in groups}) == len(groups) > 0
    for group in groups:
        assert 1 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        container = group["template"]["spec"]["containers"][0]
        in_container = {"num-cpus", *(["num-gpus"] if "nvidia.com/gpu" in container["resources"]["limits"] else [])}
        assert "resources" not in group and in_container & set(group["rayStartParams"]) == set()
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    for _, pod in pods_of(document):
        (container,) = pod["containers"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = container["volumeMounts"]
        assert len(volumes) == len(pod["volumes"])
        assert {mount["name"] for mount in mounts} == set(volumes)
        assert all(re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", volume) for volume in volumes)
        paths = [mount["mountPath"] for mount in mounts]
        assert len(set(paths)) == len(paths) and all(path.startswith("/") for path in paths)
        assert container["resources"]["requests"] == container["resources"]["limits"]
        (shm,) = (mount["name"] for mount in mounts if mount["mountPath"] == "/dev/shm")
        assert volumes[shm]["emptyDir"]["medium"] == "Memory"
        assert gib(volumes[shm]["emptyDir"]["sizeLimit"]) < gib(container["resources"]["limits"]["memory"])
        names = [variable["name"] for variable in container["env"]]
        assert len(set(names)) == len(names)
        assert {"name": "RAY_AUTH_MODE", "value": "token"} in container["env"]
        assert pod["securityContext"]["runAsNonRoot"] is True


def gib(quantity: str) -> int:
    return int(quantity.removesuffix("Gi"))


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
    validator(first["kind"]).validate(first)
    check_rules(first)
    pods = pod_resources(first)
    for spec in runs(path):
        placements = place(role_sizes(spec))
        assert fit(placements, pods).missing is None
        for bundle in (bundle for placement in placements for bundle in placement.bundles):
            assert any(pod.cpus >= bundle["CPU"] and pod.gpus >= bundle["GPU"] for pod in pods)
    assert [document["kind"] for document in rest] == ([] if cluster_only else ["ConfigMap"])


def pod_nodes(groups: Sequence[PodGroup]) -> list[Node]:
    """The worker pods as nodes for `placement.fit`, smallest first, so that no bundle takes a larger pod than it
    needs."""
    ordered = sorted(groups, key=lambda group: (group.gpus, group.cpus))
    return [Node(f"{g.role}-{i}", g.cpus, g.gpus) for g in ordered for i in range(g.replicas)]


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
    assert words[3:5] == ["--address", "auto"] and words[-1] == "--resume"
    sent, own = runs(file), runs(path)
    assert [(s.algorithm, s.schedule, role_sizes(s)) for s in sent] == [
        (s.algorithm, s.schedule, role_sizes(s)) for s in own
    ]
    assert all(Path(value).is_absolute() for _, value in path_fields(yaml.safe_load(file.read_text())))


def test_each_role_has_one_pod_group_of_the_specs_size() -> None:
    groups = pod_groups(runs(ROOT / "deploy" / "specs" / "multinode-ppo.yaml"))
    assert {(g.role, g.min_replicas, g.replicas, g.max_replicas, g.cpus, g.gpus) for g in groups} == {
        ("rollout", 8, 8, 8, 4, 2),
        ("policy", 8, 8, 8, 8, 1),
        ("critic", 4, 4, 4, 8, 1),
        ("reference", 2, 2, 2, 4, 1),
        ("reward", 2, 2, 2, 4, 1),
    }


def test_the_group_of_a_role_that_scales_has_its_limits_and_labels() -> None:
    sets = ("roles.rollout.min_workers=1", "roles.rollout.max_workers=6", "roles.rollout.node_labels={zone: a}")
    (document,) = documents(NODE, *sets, cluster_only=True)
    spec = cluster_of(document)
    groups = {group["groupName"]: group for group in spec["workerGroupSpecs"]}
    rollout, policy = groups["rollout"], groups["policy"]
    assert (rollout["minReplicas"], rollout["maxReplicas"]) == (1, 6)
    assert rollout["rayStartParams"]["labels"] == "zone=a"
    assert policy["minReplicas"] == policy["maxReplicas"] == policy["replicas"]
    assert "labels" not in policy["rayStartParams"]
    assert rollout["template"]["spec"]["nodeSelector"] == {"zone": "a"}
    assert "nodeSelector" not in policy["template"]["spec"]
    assert spec["enableInTreeAutoscaling"] is True
    assert not list(validator(document["kind"]).iter_errors(document))


@pytest.mark.parametrize("role", ["rollout", "policy"])
def test_pods_of_a_spread_role_prefer_different_nodes(role: str) -> None:
    (document,) = documents(NODE, f"roles.{role}.strategy=spread", cluster_only=True)
    validator(document["kind"]).validate(document)
    asked = {name: pod.get("topologySpreadConstraints", []) for name, pod in pods_of(document)}
    (constraint,) = asked.pop(role)
    assert not any(asked.values())
    assert (constraint["topologyKey"], constraint["whenUnsatisfiable"]) == ("kubernetes.io/hostname", "ScheduleAnyway")
    assert constraint["labelSelector"] == {"matchLabels": {"ray.io/group": role}}


def test_colocated_roles_share_pods() -> None:
    shared = ["roles.rollout.colocate_with=policy", "roles.rollout.gpus=0.5", "roles.policy.gpus=0.5"]
    shared += ["schedule.max_staleness=0", "weight_sync.backend=ipc"]
    groups = {group.role: group for group in pod_groups(runs(NODE, *shared))}
    assert set(groups) == {"policy", "reward"}
    assert groups["policy"] == PodGroup("policy", 4, 4, 4, 12, 1)


def test_workers_with_fractional_gpus_share_a_pod_and_cpus_are_rounded_up() -> None:
    reward = "roles.reward.model={path: /models/judge}"
    small = ["roles.reward.gpus=0.3", "roles.reward.workers=7", "roles.reward.cpus=0.5", reward]
    small += ["roles.reward.micro_batch_tokens=8192"]
    specs = runs(NODE, *small)
    group = next(group for group in pod_groups(specs) if group.role == "reward")
    assert (group.replicas, group.cpus, group.gpus) == (3, 2, 1)
    assert fit(place(role_sizes(specs[0])), pod_nodes(pod_groups(specs))).missing is None


def test_the_pods_of_a_chain_fit_its_largest_stage() -> None:
    path = ROOT / "deploy" / "specs" / "tiny-three-stage.yaml"
    overrides = ["stages.sft.roles.policy.workers=3", "stages.ppo.roles.policy.cpus=2.5"]
    stages = runs(path, *overrides)
    groups = pod_groups(stages)
    policy = next(group for group in groups if group.role == "policy")
    assert (policy.replicas, policy.cpus) == (3, 3)
    for stage in stages:
        assert fit(place(role_sizes(stage)), pod_nodes(groups)).missing is None


def test_bundles_with_gpus_are_placed_first() -> None:
    """Otherwise a reward worker of one core could take the core beside the last GPU."""
    order = [sum(bundle["GPU"] for bundle in p.bundles) > 0 for p in place(role_sizes(runs(NODE)[0]))]
    assert order == sorted(order, reverse=True)


def test_a_pod_without_gpus_offers_and_sees_none() -> None:
    job, _ = documents(NODE)
    for group in cluster_of(job)["workerGroupSpecs"]:
        container = group["template"]["spec"]["containers"][0]
        hidden = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in container["env"]
        assert hidden == (group["groupName"] == "reward") == (group["rayStartParams"] == {"num-gpus": "0"})


def test_a_job_shuts_down_at_its_end_and_retries_after_a_failure() -> None:
    spec = documents(NODE)[0]["spec"]
    assert spec["shutdownAfterJobFinishes"] is True
    assert (spec["ttlSecondsAfterFinished"], spec["backoffLimit"]) == (300, 1)
    assert spec["activeDeadlineSeconds"] == 600 + 300 * 7200
    assert documents(NODE, deadline_s=60)[0]["spec"]["activeDeadlineSeconds"] == 60
    assert documents(NODE, "schedule.steps=100000000")[0]["spec"]["activeDeadlineSeconds"] == 2**31 - 1


def test_secrets_are_referenced_and_never_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, CANARY)
    token = tmp_path / "token"
    token.write_text(CANARY)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    text, notes = manifest(Request(NODE), KubernetesFlags(**FLAGS))
    assert CANARY not in text and not any(CANARY in note for note in notes)
    job, config = yaml.safe_load_all(text)
    assert "secret" not in json.dumps(config).lower()
    assert cluster_of(job)["authOptions"] == {"mode": "token", "secretName": "ray-token"}
    for _, pod in pods_of(job):
        container = pod["containers"][0]
        assert container["envFrom"] == [{"secretRef": {"name": "team-settings"}}]
        assert {
            "name": "HF_TOKEN",
            "valueFrom": {"secretKeyRef": {"name": "hugging-face", "key": "token"}},
        } in container["env"]


@pytest.mark.parametrize("given", [f"HF_TOKEN={CANARY}", f"{CANARY}", f"HF_TOKEN=Upper{CANARY}:k", f"{CANARY}-x=a:b"])
def test_a_secret_value_on_the_command_line_is_refused_and_not_repeated(given: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_variable(given)
    assert CANARY not in str(caught.value) and "SECRET:KEY" in str(caught.value)


def test_paths_outside_every_claim_are_reported() -> None:
    _, notes = manifest(Request(NODE), KubernetesFlags())
    assert [note.split(":")[0] for note in notes] == ["model.path", "output.folder"]
    assert notes[0].startswith("model.path: /workspace/models/policy-7b-instruct is not on any --pvc")
    assert manifest(Request(NODE), KubernetesFlags(pvc=["models:/models"]))[1] == []


def test_relative_paths_are_resolved_against_the_root_or_the_first_claim() -> None:
    def folder(**flags: Any) -> str:
        return documents(NODE, **flags)[0]["spec"]["entrypoint"].split()[6]

    assert folder() == "/workspace/runs/node-8gpu-grpo"
    assert folder(pvc=["a:/a", "b:/b"]) == "/a/runs/node-8gpu-grpo"
    assert folder(pvc=["a:/a", "b:/b"], root="/b/me") == "/b/me/runs/node-8gpu-grpo"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"pvc": ["models"]}, "--pvc models: expected CLAIM:/FOLDER, as in models:/models"),
        ({"pvc": ["models:models"]}, "--pvc: expected an absolute path without ':', '..' and whitespace, got 'models'"),
        ({"pvc": ["models:"]}, "--pvc: expected an absolute path without ':', '..' and whitespace, got ''"),
        (
            {"pvc": ["models:/a/../.."]},
            "--pvc: expected an absolute path without ':', '..' and whitespace, got '/a/../..'",
        ),
        ({"pvc": ["Models:/m"]}, "--pvc Models:/m: expected CLAIM:/FOLDER"),
        ({"pvc": ["a:/m", "b:/m/"]}, "--pvc a:/m: two claims have this mount path"),
        ({"pvc": ["a:/dev/shm"]}, "--pvc a:/dev/shm: the path is reserved"),
        ({"pvc": ["a:/"]}, "--pvc a:/: the path is reserved"),
        ({"image": "two words"}, "--image two words: not an image reference"),
        ({"image": ""}, "--image : not an image reference"),
        ({"namespace": "Prod"}, "--namespace Prod: not a DNS label"),
        ({"auth_secret": "a_b"}, "--auth-secret: expected the name of a Secret"),
        ({"env_from_secret": ["A"]}, "--env-from-secret: expected the name of a Secret"),
        ({"env": ["RAY_AUTH_TOKEN=a:b"]}, "--env RAY_AUTH_TOKEN: KubeRay sets this variable"),
        ({"env": ["A=a:b", "A=a:c"]}, "--env A: specified twice"),
        ({"shm_gib": 0}, "--shm-gib: must be between 1 and 2147483647, got 0"),
        ({"shm_gib": 200}, "--shm-gib 200: /dev/shm is part of a pod's memory, and a policy pod has 8 GiB"),
        ({"ttl_s": -1}, "--ttl-s: must be between 0 and 2147483647, got -1"),
        ({"root": "here"}, "--root: expected an absolute path without ':', '..' and whitespace, got 'here'"),
    ],
)
def test_an_option_that_cannot_work_is_refused(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        documents(GRPO, **flags)
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "cluster_only", "said"),
    [
        ("a" * 48, False, "a RayJob's name has at most 47"),
        ("a" * 54, True, "a RayCluster's name has at most 53"),
        ("8b-run", False, "is not a DNS label"),
        ("a_b", False, "is not a DNS label"),
    ],
)
def test_a_name_that_kuberay_rejects_is_refused(name: str, cluster_only: bool, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        manifest(Request(GRPO, name=name), KubernetesFlags(cluster_only=cluster_only))
    assert documents(GRPO, "name=" + "a" * 47)[0]["metadata"]["name"] == "a" * 47


def test_the_replicas_of_a_group_lie_within_its_limits() -> None:
    with pytest.raises(UsageError, match="policy: expected between 3 and 4 pods, got 2"):
        PodGroup("policy", 2, 3, 4, 1, 0)


def test_a_claim_is_parsed_and_its_path_normalized() -> None:
    assert parse_claim("team.data:/data//x/") == Claim("team.data", "/data/x")
    assert Options("a", "i", "2.60.0", claims=(Claim("a", "/a"),)).base == "/a"


def test_a_spec_that_is_too_large_for_a_config_map_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.platforms.kubernetes.documents._LARGEST_CONFIG_MAP", 100)
    with pytest.raises(UsageError, match=r"the spec has \d+ bytes; a ConfigMap holds at most 100"):
        documents(GRPO)


def test_a_manifest_is_readable() -> None:
    text, _ = manifest(Request(NODE), KubernetesFlags(**FLAGS))
    assert "&id" not in text and "\n  spec.yaml: |\n    name: node-8gpu-grpo\n" in text


def test_without_an_installed_package_the_image_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "troupe-rl":
            raise importlib.metadata.PackageNotFoundError(name)
        return "2.60.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(UsageError, match="--image: required"):
        manifest(Request(GRPO), KubernetesFlags())
    assert manifest(Request(GRPO), KubernetesFlags(image="mine:1"))[0]


# The command


def test_the_command_writes_the_file_and_imports_nothing_heavy(tmp_path: Path) -> None:
    file = tmp_path / "manifest.yaml"
    answer = troupe("deploy", str(NODE), "--pvc", "models:/models", "-o", str(file))
    assert (answer.code, answer.errors, answer.heavy, answer.stdout) == (0, [], [], f"wrote {file}\n")
    assert [document["kind"] for document in yaml.safe_load_all(file.read_text())] == ["RayJob", "ConfigMap"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "name=" + "x" * 60], "error: the name 'xxx"),
        (["--pvc", "models:relative"], "error: --pvc: expected an absolute path"),
        (["--env", f"HF_TOKEN={CANARY}"], "error: --env HF_TOKEN: expected HF_TOKEN=SECRET:KEY"),
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
