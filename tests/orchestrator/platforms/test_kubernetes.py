"""`troupe deploy`: manifests that KubeRay's own schema takes, and what that schema cannot say. No cluster is asked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from orchestrator import deploy, kubernetes
from orchestrator.deploy import Request, manifest
from orchestrator.errors import UsageError
from orchestrator.kubernetes import Claim, Options, PodGroup, parse_claim, parse_variable, pod_groups
from orchestrator.placement import Node, fit, place, role_sizes
from orchestrator.spec_any import AnySpec
from orchestrator.spec_chain import plan_runs, read_document
from orchestrator.spec_paths import path_fields
from tests.conftest import ROOT
from tests.test_cli import troupe

SCHEMAS = ROOT / "tests" / "data" / "kuberay"
GRPO = ROOT / "deploy" / "tiny-grpo.yaml"
NODE = ROOT / "deploy" / "node-8gpu-grpo.yaml"
SHIPPED = sorted(
    path for path in (ROOT / "deploy").glob("*.yaml") if "roles" in (yaml.safe_load(path.read_text()) or {})
)
CANARY = "hf_canary0123456789"
FLAGS = {
    "claims": ["models:/models", "team.data:/data"],
    "variables": ["HF_TOKEN=hugging-face:token", "WANDB_API_KEY=wandb:key"],
    "secrets": ["team-settings"],
    "auth_secret": "ray-token",
    "namespace": "rl",
    "image": "registry.example/troupe:1@sha256:abc",
}


def runs(path: Path, *overrides: str) -> list[AnySpec]:
    """Every run of a file."""
    return [run.spec for run in plan_runs(read_document(path, overrides))]


def documents(path: Path, *overrides: str, **flags: Any) -> list[dict[str, Any]]:
    """What `troupe deploy` writes, read again."""
    text, _ = manifest(Request(path, overrides), flags)
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
    """By KubeRay's schema of a kind, closed: an object whose fields are listed has no others."""

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
    """What KubeRay and Kubernetes ask and the schema does not say."""
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
    """Every worker pod of a manifest as a node, the smallest first."""
    found = []
    for group in cluster_of(document)["workerGroupSpecs"]:
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        cpus, gpus = int(limits["cpu"]), int(limits.get("nvidia.com/gpu", 0))
        found += [Node(f"{group['groupName']}-{i}", cpus, gpus) for i in range(group["replicas"])]
    return sorted(found, key=lambda node: (node.gpus, node.cpus))


@pytest.mark.parametrize("cluster_only", [None, True])
@pytest.mark.parametrize("flags", [{}, FLAGS], ids=["plain", "all-flags"])
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_manifest_of_every_shipped_spec_holds(path: Path, flags: dict[str, Any], cluster_only: bool | None) -> None:
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
    """The worker pods as nodes for `placement.fit`, the smallest first: no bundle takes a larger one than needed."""
    ordered = sorted(groups, key=lambda group: (group.gpus, group.cpus))
    return [Node(f"{g.role}-{i}", g.cpus, g.gpus) for g in ordered for i in range(g.replicas)]


def test_a_typo_would_be_found_by_the_schema() -> None:
    job, _ = documents(GRPO)
    job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["minReplica"] = 1
    with pytest.raises(jsonschema.ValidationError, match="minReplica"):
        validator("RayJob").validate(job)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_spec_travels_in_the_manifest_and_is_that_spec(path: Path, tmp_path: Path) -> None:
    job, config = documents(path, claims=["models:/models"])
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


def test_one_group_per_role_with_the_workers_of_the_spec() -> None:
    groups = pod_groups(runs(ROOT / "deploy" / "multinode-ppo.yaml"))
    assert {(g.role, g.min_replicas, g.replicas, g.max_replicas, g.cpus, g.gpus) for g in groups} == {
        ("rollout", 8, 8, 8, 4, 2),
        ("policy", 8, 8, 8, 8, 1),
        ("critic", 4, 4, 4, 8, 1),
        ("reference", 2, 2, 2, 4, 1),
        ("reward", 2, 2, 2, 4, 1),
    }


def test_a_role_that_scales_is_a_group_with_its_bounds_and_labels() -> None:
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
def test_pods_of_a_role_that_is_spread_go_to_different_nodes_where_they_can(role: str) -> None:
    (document,) = documents(NODE, f"roles.{role}.strategy=spread", cluster_only=True)
    validator(document["kind"]).validate(document)
    asked = {name: pod.get("topologySpreadConstraints", []) for name, pod in pods_of(document)}
    (constraint,) = asked.pop(role)
    assert not any(asked.values())
    assert (constraint["topologyKey"], constraint["whenUnsatisfiable"]) == ("kubernetes.io/hostname", "ScheduleAnyway")
    assert constraint["labelSelector"] == {"matchLabels": {"ray.io/group": role}}


def test_colocated_roles_share_the_hosts_pods() -> None:
    shared = ["roles.rollout.colocate_with=policy", "roles.rollout.gpus=0.5", "roles.policy.gpus=0.5"]
    shared += ["schedule.max_staleness=0", "weight_sync.backend=ipc"]
    groups = {group.role: group for group in pod_groups(runs(NODE, *shared))}
    assert set(groups) == {"policy", "reward"}
    assert groups["policy"] == PodGroup("policy", 4, 4, 4, 12, 1)


def test_workers_with_a_part_of_a_gpu_share_one_and_cpus_are_rounded_up() -> None:
    reward = "roles.reward.model={path: /models/judge}"
    small = ["roles.reward.gpus=0.3", "roles.reward.workers=7", "roles.reward.cpus=0.5", reward]
    small += ["roles.reward.micro_batch_tokens=8192"]
    specs = runs(NODE, *small)
    group = next(group for group in pod_groups(specs) if group.role == "reward")
    assert (group.replicas, group.cpus, group.gpus) == (3, 2, 1)
    assert fit(place(role_sizes(specs[0])), pod_nodes(pod_groups(specs))).missing is None


def test_the_pods_of_a_chain_hold_its_largest_stage() -> None:
    path = ROOT / "deploy" / "tiny-three-stage.yaml"
    overrides = ["stages.sft.roles.policy.workers=3", "stages.ppo.roles.policy.cpus=2.5"]
    stages = runs(path, *overrides)
    groups = pod_groups(stages)
    policy = next(group for group in groups if group.role == "policy")
    assert (policy.replicas, policy.cpus) == (3, 3)
    for stage in stages:
        assert fit(place(role_sizes(stage)), pod_nodes(groups)).missing is None


def test_gpus_are_reserved_before_what_needs_none() -> None:
    """A reward worker of one core would otherwise take the core beside the last GPU."""
    order = [sum(bundle["GPU"] for bundle in p.bundles) > 0 for p in place(role_sizes(runs(NODE)[0]))]
    assert order == sorted(order, reverse=True)


def test_a_pod_without_gpus_neither_counts_nor_sees_any() -> None:
    job, _ = documents(NODE)
    for group in cluster_of(job)["workerGroupSpecs"]:
        container = group["template"]["spec"]["containers"][0]
        hidden = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in container["env"]
        assert hidden == (group["groupName"] == "reward") == (group["rayStartParams"] == {"num-gpus": "0"})


def test_a_job_ends_and_goes_on_after_a_failure() -> None:
    spec = documents(NODE)[0]["spec"]
    assert spec["shutdownAfterJobFinishes"] is True
    assert (spec["ttlSecondsAfterFinished"], spec["backoffLimit"]) == (300, 1)
    assert spec["activeDeadlineSeconds"] == 600 + 300 * 7200
    assert documents(NODE, deadline_s=60)[0]["spec"]["activeDeadlineSeconds"] == 60
    assert documents(NODE, "schedule.steps=100000000")[0]["spec"]["activeDeadlineSeconds"] == 2**31 - 1


def test_secrets_are_named_and_never_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, CANARY)
    token = tmp_path / "token"
    token.write_text(CANARY)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    text, notes = manifest(Request(NODE), FLAGS)
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
def test_a_value_where_a_reference_belongs_is_refused_and_not_repeated(given: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_variable(given)
    assert CANARY not in str(caught.value) and "SECRET:KEY" in str(caught.value)


def test_paths_that_no_claim_holds_are_told() -> None:
    _, notes = manifest(Request(NODE), {})
    assert [note.split(":")[0] for note in notes] == ["model.path", "output.folder"]
    assert notes[0].startswith("model.path: /workspace/models/policy-7b-instruct lies on no --pvc")
    assert manifest(Request(NODE), {"claims": ["models:/models"]})[1] == []


def test_relative_paths_start_at_the_root_or_the_first_claim() -> None:
    def folder(**flags: Any) -> str:
        return documents(NODE, **flags)[0]["spec"]["entrypoint"].split()[6]

    assert folder() == "/workspace/runs/node-8gpu-grpo"
    assert folder(claims=["a:/a", "b:/b"]) == "/a/runs/node-8gpu-grpo"
    assert folder(claims=["a:/a", "b:/b"], root="/b/me") == "/b/me/runs/node-8gpu-grpo"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"claims": ["models"]}, "--pvc models: expected CLAIM:/FOLDER, as in models:/models"),
        ({"claims": ["models:models"]}, "--pvc: 'models' is no absolute path"),
        ({"claims": ["models:"]}, "--pvc: '' is no absolute path"),
        ({"claims": ["models:/a/../.."]}, "--pvc: '/a/../..' is no absolute path"),
        ({"claims": ["Models:/m"]}, "--pvc Models:/m: expected CLAIM:/FOLDER"),
        ({"claims": ["a:/m", "b:/m/"]}, "--pvc a:/m: two claims are mounted there"),
        ({"claims": ["a:/dev/shm"]}, "--pvc a:/dev/shm: this place is taken"),
        ({"claims": ["a:/"]}, "--pvc a:/: this place is taken"),
        ({"image": "two words"}, "--image two words: is no image reference"),
        ({"image": ""}, "--image : is no image reference"),
        ({"namespace": "Prod"}, "--namespace Prod: is no DNS label"),
        ({"auth_secret": "a_b"}, "--auth-secret: expected the name of a Secret"),
        ({"secrets": ["A"]}, "--env-from-secret: expected the name of a Secret"),
        ({"variables": ["RAY_AUTH_TOKEN=a:b"]}, "--env RAY_AUTH_TOKEN: is set by KubeRay"),
        ({"variables": ["A=a:b", "A=a:c"]}, "--env A: is given twice"),
        ({"shm_gib": 0}, "--shm-gib 0: expected a whole number from 1 on"),
        ({"shm_gib": 200}, "--shm-gib 200: a policy pod has 8 GiB of memory, and /dev/shm counts as memory"),
        ({"ttl_s": -1}, "--ttl-s -1: expected a whole number from 0 on"),
        ({"root": "here"}, "--root: 'here' is no absolute path"),
    ],
)
def test_an_option_that_cannot_work_is_refused(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        documents(GRPO, **flags)
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "cluster_only", "said"),
    [
        ("a" * 48, None, "characters and a RayJob's at most 47"),
        ("a" * 54, True, "characters and a RayCluster's at most 53"),
        ("8b-run", None, "is no DNS label"),
        ("a_b", None, "is no DNS label"),
    ],
)
def test_a_name_that_kuberay_would_not_take_is_refused(name: str, cluster_only: bool | None, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        manifest(Request(GRPO, name=name), {"cluster_only": cluster_only})
    assert documents(GRPO, "name=" + "a" * 47)[0]["metadata"]["name"] == "a" * 47


def test_bounds_of_a_group_hold_each_other() -> None:
    with pytest.raises(UsageError, match="policy: 2 pods are not at least 3 and at most 4"):
        PodGroup("policy", 2, 3, 4, 1, 0)


def test_a_claim_is_read_as_it_is_written() -> None:
    assert parse_claim("team.data:/data//x/") == Claim("team.data", "/data/x")
    assert Options("a", "i", "2.60.0", claims=(Claim("a", "/a"),)).start == "/a"


def test_a_spec_that_is_too_large_for_a_config_map_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "_LARGEST_CONFIG_MAP", 100)
    with pytest.raises(UsageError, match="too large for a ConfigMap"):
        documents(GRPO)


def test_a_manifest_is_read_by_people() -> None:
    text, _ = manifest(Request(NODE), FLAGS)
    assert "&id" not in text and "\n  spec.yaml: |\n    name: node-8gpu-grpo\n" in text


def test_without_an_installed_package_the_image_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "troupe-rl":
            raise deploy.importlib.metadata.PackageNotFoundError(name)
        return "2.60.0"

    monkeypatch.setattr(deploy.importlib.metadata, "version", version)
    with pytest.raises(UsageError, match="--image: is needed"):
        manifest(Request(GRPO), {})
    assert manifest(Request(GRPO), {"image": "mine:1"})[0]


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
        (["--pvc", "models:relative"], "error: --pvc: 'relative' is no absolute path"),
        (["--env", f"HF_TOKEN={CANARY}"], "error: --env HF_TOKEN: expected HF_TOKEN=SECRET:KEY"),
        (["--nodes", "2"], "error: --nodes: is for --slurm"),
        (["--slurm", "--pvc", "a:/a"], "error: --pvc: is not for --slurm"),
        (["-o", "/no/such/folder/m.yaml"], "error: --output /no/such/folder/m.yaml: No such file or directory"),
        (["--set", "roles.policy.wrkers=2"], "did you mean 'workers'?"),
    ],
)
def test_bad_input_costs_one_line_and_exit_code_2(arguments: list[str], said: str) -> None:
    answer = troupe("deploy", str(GRPO), *arguments)
    errors = [line for line in answer.errors if not line.startswith("note: ")]
    assert (answer.code, len(errors), answer.heavy) == (2, 1, [])
    assert said in errors[0] and CANARY not in errors[0]
