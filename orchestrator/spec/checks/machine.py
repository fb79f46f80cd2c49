"""Checks that a machine has what a spec needs: models, data, libraries, the user's reward functions and environment."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from troupe.orchestrator.algorithms import custom, section
from troupe.orchestrator.errors import Finding
from troupe.orchestrator.spec import installed_vllm
from troupe.orchestrator.spec.base import NamedData, RunSpec
from troupe.orchestrator.spec.checks import models as of_models
from troupe.orchestrator.spec.checks.adapters import trained_adapters, wrong_adapters
from troupe.orchestrator.spec.derived.sampling import held_out_sets, reward_functions
from troupe.orchestrator.spec.derived.sizes import sequence_lengths
from troupe.orchestrator.spec.derived.training import needs_old_logprobs
from troupe.orchestrator.spec.locations import is_pattern, is_url, matching_files, source_problem
from troupe.orchestrator.spec.roles import TeacherEndpointRole, environment_role
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.spec.sources import HeldOut, Located
from troupe.workers.contract.config import EnvironmentConfig
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.imports import missing_package
from troupe.workers.contract.reward_config import RewardFunctionConfig
from troupe.workers.contract.trainer_config import ALL_LINEAR
from troupe.workers.isolation.interpreters import NoInterpreter, interpreter_of
from troupe.workers.isolation.probe import ProbeFailed, ask

_READ_BY = {"reasoning_gym": "reasoning_gym", "datasets": "datasets", "json": "ijson"}
"""Module that reads a kind of data, if its package is one of an extra."""
LOAD_TIMEOUT_S = 120.0
"""Longest import of the modules of all reward functions."""
_ENVIRONMENT = "troupe.workers.agents.environments.base:find_problem"
_FUNCTIONS = "troupe.workers.rewards.loading:find_problems"


def missing(spec: RunSpec) -> list[Finding]:
    """What the spec names and this machine does not have: models, data, libraries, engine options, user's code."""
    models = spec.models()
    return [
        *of_models.missing_models(models),
        *of_models.missing_templates(models),
        *of_models.broken_weights(models),
        *of_models.headless(models, spec.trains),
        *model_problems(spec, models),
        *wrong_adapters(models, spec.trains, trained_adapters(spec)),
        *missing_data(spec.data.sources()),
        *missing_packages(packages_of(spec)),
        *(() if spec.rollouts is None else _unusable_code(spec.rollouts)),
    ]


def model_problems(spec: RunSpec, models: Mapping[str, ModelConfig]) -> list[Finding]:
    """What is wrong with models of this spec by their config.json."""
    return [
        *of_models.wrong_kinds(models, spec.trains),
        *of_models.quantized(models),
        *of_models.smaller_vocabularies(models),
        *of_models.other_tokenizers(models),
        *of_models.too_long(models, sequence_lengths(spec)),
        *of_models.undivided_heads(models, _shared_models(spec)),
        *_adapted_experts(spec, models),
        *_divided_experts(spec, models),
        *(() if spec.rollouts is None else _in_engines(spec.rollouts, models)),
    ]


def packages_of(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """(field, module) of each feature that needs an extra, but for user code: that is found when it is loaded."""
    for name, source in spec.data.sources().items():
        if (module := _READ_BY.get(source.kind)) is not None:
            yield f"data.{name}.kind", module
    yield from ((f"output.sinks.{number}", sink) for number, sink in enumerate(spec.output.sinks))
    if spec.output.prometheus is not None:
        yield "output.prometheus", "prometheus_client"
    yield from ((path, "peft") for path, _, _ in trained_adapters(spec))
    if spec.rollouts is not None:
        yield from _packages_of_votes(spec.rollouts)
        for name, teacher in spec.rollouts.roles.teachers().items():
            if isinstance(teacher, TeacherEndpointRole):
                yield f"roles.{name}.kind", "openai"


def _packages_of_votes(spec: RolloutSpec) -> Iterator[tuple[str, str]]:
    """The comparison of answers, for held-out sets whose samples vote."""
    for one, source in zip(held_out_sets(spec), spec.data.held_out_sets().values(), strict=True):
        if one.votes:
            own = isinstance(source, HeldOut) and source.sampling is not None
            yield f"data.{one.section}.sampling.samples" if own else "evaluation.sampling.samples", "math_verify"


def _in_engines(spec: RolloutSpec, models: Mapping[str, ModelConfig]) -> Iterator[Finding]:
    """Models that the engines do not support."""
    if spec.device == "cpu" and "model" in models:
        yield from of_models.unsupported_head_size(Path(models["model"].path))
    if "model" in models:
        yield from of_models.windows_in_some_layers(Path(models["model"].path))
        if spec.sampling.router_replay and of_models.is_dense(models["model"]):
            yield "sampling.router_replay", "the model has no experts to choose: remove it"
    engines = {
        "model" if name == "rollout" else f"roles.{name}.model": (
            f"roles.{name}.tensor_parallel_size",
            role.tensor_parallel_size,
        )
        for name, role in spec.roles.engines().items()
    }
    yield from of_models.undivided_models(models, engines)


def _adapted_experts(spec: RunSpec, models: Mapping[str, ModelConfig]) -> Iterator[Finding]:
    for path, section_, lora in trained_adapters(spec):
        if lora.targets == ALL_LINEAR and section_ in models and of_models.has_experts(models[section_]):
            layers = ", ".join(of_models.ATTENTION)
            yield f"{path}.targets", f"adapters of experts are not supported; name other layers: [{layers}]"


def _divided_experts(spec: RunSpec, models: Mapping[str, ModelConfig]) -> Iterator[Finding]:
    for name, role in spec.roles.trainers().items():
        own = f"roles.{name}.model"
        model = models.get(own if own in spec.models() else "model")
        if model is not None and (why := of_models.undivided_experts(model, role.expert_parallel_size)):
            yield f"roles.{name}.expert_parallel_size", why


def _shared_models(spec: RunSpec) -> Iterator[tuple[str, str, int]]:
    """(section, field, `sequence_parallel_size`) of every model that workers run on parts of the same rows."""
    for name, role in spec.roles.trainers().items():
        own, field = f"roles.{name}.model", f"roles.{name}.sequence_parallel_size"
        yield own if own in spec.models() else "model", field, role.sequence_parallel_size
        for other in sorted(spec.in_policy) if name == "policy" else ():
            yield f"roles.{other}.model", field, role.sequence_parallel_size


def _unusable_code(spec: RolloutSpec) -> Iterator[Finding]:
    """Engine options that vLLM does not have, and reward functions, environments and algorithms that do not load."""
    yield from installed_vllm.unknown_options({name: role.engine for name, role in spec.roles.engines().items()})
    environments = {f"roles.{environment_role(name)}": role for name, role in spec.roles.environments().items()}
    yield from installed_vllm.unusable_parsers(
        {f"{path}.tool_parser": role.tool_parser for path, role in environments.items()}
    )
    for path, functions in reward_functions(spec).items():
        yield from unusable_functions(functions, path)
    for path, role in environments.items():
        yield from unusable_environment(role.part(EnvironmentConfig), path)
    if section.is_custom(spec.algorithm.name):
        available = {"values": spec.roles.critic is not None, "ref_logprobs": spec.roles.reference is not None}
        for problem in custom.check(spec.algorithm, old_logprobs=needs_old_logprobs(spec), **available):
            yield "algorithm.name", problem


def missing_data(sources: Mapping[str, NamedData]) -> Iterator[Finding]:
    """Files and folders of data that do not exist, by the name of their section in `data`."""
    for name, source in sources.items():
        if not isinstance(source, Located):
            continue
        if is_url(source.path):
            problem = "a folder of the kind `datasets` is read from a disk" if source.kind == "datasets" else None
            if problem := problem or source_problem(source.path):
                yield f"data.{name}.path", problem
            continue
        path = Path(source.path)
        if source.kind == "datasets" and not path.is_dir():
            yield f"data.{name}.path", f"no such folder: {path}"
        if source.kind != "datasets" and not any(file.is_file() for file in matching_files(source.path)):
            what = "no file matches" if is_pattern(source.path) else "no such file"
            yield f"data.{name}.path", f"{what}: {path}"


def missing_packages(features: Iterable[tuple[str, str]]) -> Iterator[Finding]:
    """Packages that are not installed, of these (field, module) of an extra."""
    for field, module in features:
        if problem := missing_package(module):
            yield field, problem


def unusable_environment(environment: EnvironmentConfig, path: str) -> Iterator[Finding]:
    """An environment (section `path`) that cannot be imported or does not take its arguments."""
    try:
        python = interpreter_of(environment.name, environment.python)
        request = {"name": environment.name, "args": environment.args}
        ((field, problem),) = ask(_ENVIRONMENT, request, LOAD_TIMEOUT_S, python)
    except NoInterpreter as error:
        field, problem = "python", str(error)
    except ProbeFailed as error:
        field, problem = "name", f"{environment.name}: cannot be loaded: {error}"
    if problem:
        yield f"{path}.{field}", problem


def _load_functions(request: str) -> list[Any]:
    """What is wrong with each reward function of a request."""
    return ask(_FUNCTIONS, json.loads(request), LOAD_TIMEOUT_S)


_load_built_in = cache(_load_functions)
"""The same for requests that name built-in functions only; `troupe init` checks several specs with the same ones."""


def unusable_functions(functions: Sequence[RewardFunctionConfig], path: str) -> Iterator[Finding]:
    """Reward functions that cannot be imported, or that do not take their arguments; `path` is their list's."""
    if not functions:
        return
    request = [{"name": f.name, "args": f.args, "batched": f.batched} for f in functions]
    try:
        load = _load_functions if any(":" in function.name for function in functions) else _load_built_in
        replies = load(json.dumps(request))
    except ProbeFailed as error:  # the import exits, crashes or hangs
        name = functions[len(error.replies)].name
        replies = [*error.replies, ["name", f"{name}: cannot be loaded: {error}"]]
    for index, (field, problem) in enumerate(replies):
        if problem:
            yield f"{path}.{index}.{field}", problem
