"""Flags of `troupe deploy` that Kubernetes or KubeRay would reject."""

from __future__ import annotations

from typing import Any

import pytest

from tests.orchestrator.platforms.kubernetes.manifests import GRPO, documents
from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.platforms.flags import KubernetesFlags, NodeFlags
from troupe.orchestrator.platforms.kubernetes.options import KubernetesOptions
from troupe.orchestrator.platforms.kubernetes.values import (
    Claim,
    Variable,
    parse_claim,
    parse_secret_variable,
    parse_variable,
)
from troupe.orchestrator.platforms.manifest import Request, manifest

CANARY = "hf_canary0123456789"


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
        ({"env": ["A"]}, "--env: expected NAME=VALUE"),
        ({"env": ["HF_TOKEN=x"]}, "--env HF_TOKEN: the value of a credential would stand in the file"),
        ({"env": ["A=a", "A=b"]}, "--env A: specified twice"),
        ({"env": ["A=a"], "secret_env": ["A=a:c"]}, "--env A: specified twice"),
        ({"env": ["RAY_ADDRESS=x"]}, "--env RAY_ADDRESS: KubeRay sets this variable"),
        ({"env": ["RAY_JOB_STOP_WAIT_TIME_S=9"]}, "--env RAY_JOB_STOP_WAIT_TIME_S: set it with --stop-s"),
        (
            {"secret_env": ["RAY_AUTH_TOKEN=a:b"]},
            "--secret-env RAY_AUTH_TOKEN: KubeRay sets this variable; name the Secret of a token with kustomize",
        ),
        ({"pvc": ["a:/var/run/secrets/kubernetes.io"]}, "--pvc a:/var/run/secrets/kubernetes.io: the path is reserved"),
        ({"gpus_per_node": 0}, "--gpus-per-node: must be between 1 and 2147483647, got 0"),
        ({"stop_s": 0}, "--stop-s: must be between 1 and 2147483647, got 0"),
        ({"shm_gib": 0}, "--shm-gib: must be between 1 and 2147483647, got 0"),
        (
            {"shm_gib": 200, "gib_per_node": 100},
            "--shm-gib 200: /dev/shm (200 GiB) is part of a pod's memory, and a pod of cpu has 100 GiB",
        ),
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
        manifest(Request(GRPO, name=name), NodeFlags(), KubernetesFlags(cluster_only=cluster_only))
    assert documents(GRPO, "name=" + "a" * 47)[0]["metadata"]["name"] == "a" * 47


@pytest.mark.parametrize("given", [f"HF_TOKEN={CANARY}", f"{CANARY}", f"HF_TOKEN=Upper{CANARY}:k", f"{CANARY}-x=a:b"])
def test_a_secret_value_on_the_command_line_is_refused_and_not_repeated(given: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_secret_variable(given)
    assert CANARY not in str(caught.value) and "SECRET:KEY" in str(caught.value)


@pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_API_KEY", "aws_secret_access_key", "PASSWORD"])
def test_a_credential_is_refused_as_a_plain_variable_and_not_repeated(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_variable(f"{name}={CANARY}")
    assert CANARY not in str(caught.value) and f"use --secret-env {name}=SECRET:KEY" in str(caught.value)


def test_a_plain_variable_keeps_its_value() -> None:
    assert parse_variable("A=b=c:d e") == Variable("A", "b=c:d e")
    assert parse_variable("TOKENIZERS_PARALLELISM=false") == Variable("TOKENIZERS_PARALLELISM", "false")


def test_a_claim_is_parsed_and_its_path_normalized() -> None:
    assert parse_claim("team.data:/data//x/") == Claim("team.data", "/data/x")
    assert KubernetesOptions("a", "i", "2.60.0", claims=(Claim("a", "/a"),)).base == "/a"
