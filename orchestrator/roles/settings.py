"""What a spec gives the workers of each role: their configurations, and the settings of their processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from troupe.orchestrator.algorithms import section
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.derived.sampling import held_out_sets, reward_functions
from troupe.orchestrator.spec.derived.training import resolved_backend, source_advantages, source_losses
from troupe.orchestrator.spec.offline import OfflineSpec
from troupe.orchestrator.spec.roles import ReferenceRole, TeacherEndpointRole, TeacherEngineRole, environment_role
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.workers.contract.config import (
    CPU_THREADS,
    CriticConfig,
    EngineConfig,
    EngineProcess,
    EnvironmentConfig,
    EpisodeConfig,
    JudgeConfig,
    PolicyConfig,
    ReferenceConfig,
    RolloutConfig,
    TeacherEndpointConfig,
    TeacherEngineConfig,
    TeacherSettings,
)
from troupe.workers.contract.config_base import Device, ModelConfig
from troupe.workers.contract.offline_config import ExampleConfig, OfflineConfig
from troupe.workers.contract.reward_config import ScoringConfig
from troupe.workers.contract.rewards import JUDGE_REWARD
from troupe.workers.contract.trainer_config import TrainerConfig

_SHARED_GPU = 0.5
"""Share of the policy's GPU for an engine there whose memory cannot be planned."""
_CPU_ENV = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", **CPU_THREADS}
"""Ray hides no GPU from an actor that requests none."""


@dataclass(frozen=True)
class WorkerSettings:
    """Settings with which each worker of a role is started."""

    config: Any
    """First argument of the constructor; the worker's name is the second."""
    threads: int
    device: Device
    micro_batch_tokens: int = 0
    """Most tokens in one forward pass, or 0 if the role's workers do not share rows by their tokens."""
    extra: tuple[Any, ...] = ()
    """Constructor arguments after the worker's name."""
    sequence_parallel_size: int = 1
    """Adjacent workers that share each micro-batch."""
    engine: EngineProcess | None = None
    """The engine in its process, or None without one on the CPU."""

    @property
    def env(self) -> dict[str, str]:
        """Environment variables of its process."""
        return worker_env(self.threads, self.device)


def worker_env(threads: int, device: Device) -> dict[str, str]:
    """Environment variables of a worker's process, set before any library is loaded; 0 threads: the library decides."""
    env = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if threads:
        env["OMP_NUM_THREADS"] = str(threads)
    # DeepSpeed looks for a CUDA toolkit, which its torch operations do not need.
    return {**env, **(_CPU_ENV if device == "cpu" else {"DS_IGNORE_CUDA_DETECTION": "1"})}


def rollout_config(spec: RolloutSpec) -> RolloutConfig:
    role = spec.roles.rollout
    share = role.gpu_memory_utilization or (_SHARED_GPU if role.colocate_with == "policy" else None)
    return RolloutConfig(
        model=spec.model,
        engine=role.worker_config(EngineConfig, gpu_memory_utilization=share),
        engine_options=role.engine,
        sampling=spec.sampling,
        seed=spec.seed,
        transfer_backend=resolved_backend(spec),
        device=spec.device,
        episodes={name: role.part(EpisodeConfig) for name, role in spec.roles.environments().items()},
        turn_forms=_accounts_for_forms(spec),
        sleep=role.resolved_sleep,
        lora=spec.roles.policy.lora,
        top_logprobs=section.policy_loss(spec.algorithm).recorded_top_k,
        compares_reference=section.advantage(spec.algorithm).compares_reference,
    )


def reference_engine_config(spec: RolloutSpec) -> RolloutConfig | None:
    """Configuration of each engine of the reference: it samples as the rollout engines do. The policy is not trained
    with its experts, so it records none."""
    role = spec.roles.reference_engine
    if role is None:
        return None
    return RolloutConfig(
        model=spec.reference_model,
        engine=role.worker_config(EngineConfig),
        engine_options=role.engine,
        sampling=spec.sampling.model_copy(update={"router_replay": False}),
        seed=spec.seed,
        transfer_backend="shm",
        device=role.device,
        sleep=role.resolved_sleep,
    )


def _accounts_for_forms(spec: RolloutSpec) -> bool:
    """Whether the loss accounts for the tokens that a form permits."""
    if spec.sampling.truncates or section.corrects_sampler(spec.algorithm):
        return True
    return not section.policy_loss(spec.algorithm).has_ratio


def environment_configs(spec: RolloutSpec) -> dict[str, EnvironmentConfig]:
    """Configuration of the workers of each environment, by role: `environment`, or `environment.NAME`."""
    environments = spec.roles.environments().items()
    return {environment_role(name): one.part(EnvironmentConfig) for name, one in environments}


def judge_config(spec: RolloutSpec) -> JudgeConfig | None:
    role = spec.roles.judge
    if role is None:
        return None
    engine = role.worker_config(EngineConfig)
    functions = (function for one in reward_functions(spec).values() for function in one)
    expected = any(one.name == JUDGE_REWARD and one.args.get("expected") for one in functions)
    return role.part(JudgeConfig, engine=engine, engine_options=role.engine, device=role.device, expected=expected)


def reward_config(spec: RolloutSpec) -> ScoringConfig:
    own = {f"data.train.{n}": source.rewards for n, source in enumerate(spec.data.mixture)}
    sets = {section: functions for section, functions in own.items() if functions is not None}
    sets |= {one.rewards: one.functions for one in held_out_sets(spec) if one.own_rewards}
    return spec.roles.reward.worker_config(ScoringConfig, sets=sets, teacher_tokens=spec.output.teacher_tokens)


def scorer_configs(spec: RunSpec) -> dict[str, ReferenceConfig]:
    """Configuration of each worker of a reference outside the policy's workers, and of each teacher, by role. Logits
    are divided by the temperature that responses are sampled at, or by 1 if there is no sampling."""
    rollouts: RolloutSpec | None = spec.rollouts
    teachers = {} if rollouts is None else rollouts.roles.teachers()
    own = {} if spec.roles.reference is None else {"reference": spec.roles.reference}
    if rollouts is None:
        top_k, temperature = spec.offline.algorithm.distillation.stored_k, 1.0
    else:
        top_k = section.policy_loss(rollouts.algorithm).distill.stored_k
        temperature = rollouts.sampling.temperature
    return {
        name: role.worker_config(
            ReferenceConfig,
            model=role.model or spec.model,
            column="ref_logprobs" if name == "reference" else name,
            tokenizer=spec.model,
            temperature=temperature,
            top_k=0 if name == "reference" and teachers else top_k,
            device=role.device,
            threads=role.threads or max(1, int(role.cpus) // role.shards),
        )
        for name, role in (own | teachers).items()
        if isinstance(role, ReferenceRole) and name not in spec.in_policy
    }


def teacher_engine_configs(spec: RolloutSpec) -> dict[str, TeacherEngineConfig]:
    """Configuration of each worker of a teacher that is an engine, by role."""
    top_k = section.policy_loss(spec.algorithm).distill.stored_k
    return {
        name: role.part(
            TeacherEngineConfig,
            engine=role.worker_config(EngineConfig),
            engine_options=role.engine,
            column=name,
            tokenizer=spec.model,
            top_k=top_k,
            device=role.device,
            sleep=role.resolved_sleep,
        )
        for name, role in spec.roles.teachers().items()
        if isinstance(role, TeacherEngineRole)
    }


def _teacher_models(spec: RolloutSpec) -> dict[str, ModelConfig]:
    """Models of teachers that score in the policy's workers, by role; one with an adapter is the policy's."""
    models = {name: spec.models().get(f"roles.{name}.model") for name in spec.roles.teachers()}
    return {name: model for name, model in models.items() if name in spec.in_policy and model is not None}


def policy_config(spec: RolloutSpec) -> PolicyConfig:
    role, models = spec.roles.policy, _teacher_models(spec)
    return role.part(
        PolicyConfig,
        model=spec.model,
        trainer=role.worker_config(TrainerConfig),
        loss=section.policy_loss(spec.algorithm),
        source_losses=source_losses(spec),
        advantage=section.advantage(spec.algorithm),
        source_advantages=source_advantages(spec),
        sampling=spec.sampling,
        ptx_coef=spec.algorithm.ptx_coef,
        natural_gradient=section.natural_gradient(spec.algorithm),
        run_id=spec.name,
        reference_model=_colocated_reference(spec),
        teachers={n: one.part(TeacherSettings) for n, one in spec.roles.teachers().items() if n in spec.in_policy},
        teacher_models={name: model for name, model in models.items() if model.adapter is None},
        teacher_adapters={name: model.adapter for name, model in models.items() if model.adapter is not None},
        total_updates=spec.updates_of("policy"),
        seed=spec.seed,
        deterministic=spec.deterministic,
        device=spec.device,
        transfer_backend=resolved_backend(spec),
        weight_store=spec.weight_sync.url,
        records_tokens=spec.output.trajectories,
    )


def critic_config(spec: RolloutSpec) -> CriticConfig | None:
    role, loss = spec.roles.critic, section.critic_loss(spec.algorithm)
    if role is None or loss is None:
        return None
    return CriticConfig(
        model=role.model or spec.model,
        trainer=role.worker_config(TrainerConfig),
        loss=loss,
        total_updates=spec.updates_of("critic"),
        seed=spec.seed,
        deterministic=spec.deterministic,
        device=role.device,
        lora=role.lora,
    )


def offline_config(spec: OfflineSpec) -> OfflineConfig:
    role = spec.roles.policy
    return OfflineConfig(
        model=spec.model,
        trainer=role.worker_config(TrainerConfig),
        loss=spec.algorithm.loss_config(),
        examples=ExampleConfig(
            max_length=spec.data.max_length,
            micro_batch_tokens=role.micro_batch_tokens,
            from_divergence=bool(spec.algorithm.from_divergence),
            mismatched="labelled" in spec.row.formats,
            steps="steps" in spec.row.formats,
            sampled="samples" in spec.row.formats,
        ),
        reference_model=_colocated_reference(spec),
        total_updates=spec.updates_of("policy"),
        seed=spec.seed,
        deterministic=spec.deterministic,
        device=spec.device,
        lora=role.lora,
    )


def _colocated_reference(spec: RunSpec) -> ModelConfig | None:
    """The reference's model if the policy's workers hold it, else None."""
    return spec.reference_model if spec.reference_in_policy else None


def of_rollout(spec: RolloutSpec) -> WorkerSettings:
    return _engine(rollout_config(spec))


def of_environment(spec: RolloutSpec) -> Mapping[str, WorkerSettings]:
    configs = environment_configs(spec).items()
    return {role: WorkerSettings(config, 1, "cpu", extra=(spec.model,)) for role, config in configs}


def of_judge(spec: RolloutSpec) -> WorkerSettings | None:
    config = judge_config(spec)
    return None if config is None else _engine(config)


def of_reference_engine(spec: RolloutSpec) -> WorkerSettings | None:
    config = reference_engine_config(spec)
    return None if config is None else _engine(config)


def of_reward(spec: RolloutSpec) -> WorkerSettings:
    config, device = reward_config(spec), spec.roles.reward.device
    return WorkerSettings(config, config.threads, device, extra=(device, spec.model))


def of_scorers(spec: RunSpec) -> Mapping[str, WorkerSettings]:
    return {
        role: WorkerSettings(config, config.threads, config.device, config.micro_batch_tokens)
        for role, config in scorer_configs(spec).items()
    }


def of_teacher_engines(spec: RolloutSpec) -> Mapping[str, WorkerSettings]:
    configs = teacher_engine_configs(spec).items()
    return {role: replace(_engine(one), micro_batch_tokens=one.engine.max_model_len) for role, one in configs}


def of_teacher_endpoints(spec: RolloutSpec) -> Mapping[str, WorkerSettings]:
    top_k, longest = section.policy_loss(spec.algorithm).distill.stored_k, spec.roles.rollout.max_model_len
    configs = {
        name: role.part(TeacherEndpointConfig, column=name, policy=spec.model, top_k=top_k, longest=longest)
        for name, role in spec.roles.teachers().items()
        if isinstance(role, TeacherEndpointRole)
    }
    return {role: WorkerSettings(config, 1, "cpu", longest) for role, config in configs.items()}


def of_policy(spec: RolloutSpec) -> WorkerSettings:
    return _trainer(policy_config(spec))


def of_critic(spec: RolloutSpec) -> WorkerSettings | None:
    config = critic_config(spec)
    return None if config is None else _trainer(config)


def of_offline(spec: OfflineSpec) -> WorkerSettings:
    return _trainer(offline_config(spec))


def _engine(config: RolloutConfig | JudgeConfig | TeacherEngineConfig) -> WorkerSettings:
    """On a GPU vLLM decides about threads (0): it takes one, because more would spin in parallel."""
    if config.device == "cuda":
        return WorkerSettings(config, 0, "cuda")
    return WorkerSettings(config, config.engine.threads, "cpu", engine=config.process)


def _trainer(config: PolicyConfig | CriticConfig | OfflineConfig) -> WorkerSettings:
    trainer = config.trainer
    return WorkerSettings(
        config,
        trainer.threads,
        config.device,
        trainer.micro_batch_tokens,
        sequence_parallel_size=trainer.sequence_parallel_size,
    )
