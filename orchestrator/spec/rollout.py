"""The spec of a run on rollouts, and the configuration it gives each of its workers.

Constructing a spec checks its fields. Loading one (`orchestrator/spec/load.py`) also refuses combinations of fields
that cannot work.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from troupe.orchestrator.algorithms import custom, section
from troupe.orchestrator.algorithms.section import AlgorithmConfig
from troupe.orchestrator.algorithms.table import KlPenalty
from troupe.orchestrator.spec import installed_vllm
from troupe.orchestrator.spec.base import PromptRoom, RunSpec
from troupe.orchestrator.spec.checks import machine as preflight
from troupe.orchestrator.spec.checks.machine import DataSource, Finding
from troupe.orchestrator.spec.derived.sampling import HeldOutSettings, right_from
from troupe.orchestrator.spec.field_tree import decisive, field_tree
from troupe.orchestrator.spec.sections import (
    OTHER_EVALUATIONS,
    AlarmConfig,
    AuditConfig,
    DataConfig,
    EvaluationConfig,
    FailureConfig,
    HeldOut,
    MixedSource,
    OutputConfig,
    RolesConfig,
    RolloutCheckpointConfig,
    ScheduleConfig,
    WeightSyncConfig,
)
from troupe.workers.contract.config import (
    CriticConfig,
    Device,
    EngineConfig,
    EnvironmentConfig,
    EpisodeConfig,
    JudgeConfig,
    ModelConfig,
    PolicyConfig,
    RewardFunctionConfig,
    RolloutConfig,
    SamplingConfig,
    ScoringConfig,
    Sleep,
    TrainerConfig,
)
from troupe.workers.contract.consequences import NEXT_STEP, NONE, NOT_REWARDED, NOT_SAMPLED, SAMPLED, Counts
from troupe.workers.contract.rewards import JUDGE_REWARD
from troupe.workers.contract.weight_backends import BACKENDS, TransferBackend, automatic_backend

_SHARED_GPU = 0.5
"""Share of the policy's GPU for an engine there whose memory cannot be planned."""
NO_ENVIRONMENT = "none"
"""Replaces an environment's name: samples of the source are single responses."""
_KEPT_BYTES = 1024
"""Room for the tokens that the sampler left to one token: 256 of them, more than most distributions have on average."""
_NEW_PROCESS_S = 10.0
"""Start of the process of a reward function, with room for what the function imports."""
_SCORERS = ("reference", "reward", "environment")
"""Roles whose workers have one sample at a time."""


@dataclass(frozen=True)
class GroupSettings:
    """Settings with which the groups of one source of prompts are sampled and scored."""

    samples: int
    source: str = ""
    """Name of the source in a mixture; empty if there is one source."""
    max_tokens: int | None = None
    """Longest response, in tokens, or None for `sampling.max_tokens`."""
    rewards: str = ""
    """Key of the source's reward functions in the configuration of reward workers; empty for the role's."""
    environment: str | None = None
    """Name of the environment that a sample is an episode in, empty for one without a name, or None if a sample is one
    response to its prompt."""
    solved_at: float | None = None
    """A sample with at least this reward counts as solved; None if the reward does not define it."""
    mask_truncated: bool = False
    """Whether responses that were cut carry no loss."""
    signal_in: str | None = None
    """Reward component that must differ within a group (dynamic sampling), or None for the reward."""


def environment_role(name: str) -> str:
    """The role of an environment by its name: `environment`, or `environment.NAME`."""
    return f"environment.{name}" if name else "environment"


class RolloutSpec(RunSpec, frozen=True):
    """One run that samples its own responses."""

    roles: RolesConfig
    """The worker roles, with their number of workers and their resources."""
    algorithm: Annotated[AlgorithmConfig, NONE, NEXT_STEP, SAMPLED]
    """How the policy is trained."""
    schedule: Annotated[ScheduleConfig, NONE]
    """Length of the run, division of a step, and timeouts."""
    sampling: Annotated[SamplingConfig, NEXT_STEP, NOT_REWARDED, SAMPLED] = SamplingConfig()
    """How responses are sampled for training."""
    data: DataConfig
    """Sources of prompts."""
    evaluation: Annotated[EvaluationConfig | None, OTHER_EVALUATIONS, NOT_REWARDED, NOT_SAMPLED] = None
    """When and how the policy is evaluated; left out: never."""
    weight_sync: Annotated[WeightSyncConfig, NONE] = WeightSyncConfig()
    """How new weights reach the engines."""
    audit: Annotated[AuditConfig, NONE] = AuditConfig()
    """Whether sampler and trainer are compared before the first step."""
    checkpoint: Annotated[RolloutCheckpointConfig, NONE] = RolloutCheckpointConfig()
    """When the run's state is saved."""
    failures: Annotated[FailureConfig, NONE] = FailureConfig()
    """Which failures are tolerated, and when the run stops."""
    output: Annotated[OutputConfig, NONE] = OutputConfig()
    """Outputs of the run."""

    @property
    def group_size(self) -> int:
        """Samples per prompt, unless its source sets another number."""
        return section.group_size(self.algorithm)

    @property
    def group_settings(self) -> tuple[GroupSettings, ...]:
        """Settings with which groups are sampled and scored, for each source of `data.train`."""
        if not self.data.mixture:
            return (
                GroupSettings(
                    self.group_size,
                    environment=self._environment_of(None),
                    solved_at=self._solved_in_training(None),
                    mask_truncated=self.algorithm.mask_truncated,
                    signal_in=self.algorithm.dynamic_sampling_on,
                ),
            )
        return tuple(self._of_source(number, source) for number, source in enumerate(self.data.mixture))

    def _of_source(self, number: int, source: MixedSource) -> GroupSettings:
        own = "" if source.rewards is None else f"data.train.{number}"
        return GroupSettings(
            samples=source.group_size or self.group_size,
            source=source.name,
            max_tokens=source.max_tokens,
            rewards=own,
            solved_at=self._solved_in_training(source.rewards) if source.solved_at is None else source.solved_at,
            environment=self._environment_of(source.environment),
            mask_truncated=self.algorithm.mask_truncated if source.mask_truncated is None else source.mask_truncated,
            signal_in=source.dynamic_sampling_on or self.algorithm.dynamic_sampling_on,
        )

    def _solved_in_training(self, rewards: Sequence[RewardFunctionConfig] | None) -> float | None:
        """Least value of the reward, or of the curriculum's component, of a solved sample, or None if undefined.

        `rewards`: the functions of its source, or None for the role's.
        """
        curriculum = self.data.curriculum
        if curriculum is not None and curriculum.solved_at is not None:
            return curriculum.solved_at
        component = None if curriculum is None else curriculum.component
        if component is None and rewards is None:
            return self.solved_at
        return right_from(self.roles.reward.functions if rewards is None else rewards, component)

    def _environment_of(self, name: str | None) -> str | None:
        """The environment of samples by its name in their source, or None if they are single responses."""
        if name == NO_ENVIRONMENT:
            return None
        return "" if name is None and "" in self.roles.environments() else name

    @property
    def group_sizes(self) -> frozenset[int]:
        """Samples per prompt, of all sources."""
        return frozenset(settings.samples for settings in self.group_settings)

    @property
    def kl_coef(self) -> float:
        """Weight of the KL term, in the loss or in the reward."""
        return section.kl_coef(self.algorithm)

    @property
    def samples_per_step(self) -> int:
        """Samples in a step's batch, when none fails; the most if sources differ in their group sizes."""
        return self.schedule.prompts_per_step * max(self.group_sizes)

    @property
    def critic_updates(self) -> int:
        """Optimizer updates of the critic over the run."""
        return self.schedule.steps * self.schedule.updates_per_step

    @property
    def critic_warmup(self) -> int:
        """Steps at the start of the run in which only the critic is updated."""
        return self.roles.critic.warmup_steps if self.roles.critic is not None else 0

    @property
    def policy_updates(self) -> int:
        """Optimizer updates of the policy over the run (the critic's warm-up has none)."""
        return max(0, self.schedule.steps - self.critic_warmup) * self.schedule.updates_per_step

    @property
    def kl_penalty(self) -> KlPenalty | None:
        """The penalty on KL(old || new), or None for an algorithm without one."""
        return section.kl_penalty(self.algorithm)

    @property
    def kl_start(self) -> float | None:
        """Start value of the adaptive coefficient of the KL term in the reward, or None if it does not adapt."""
        return None if self.algorithm.kl.target is None else self.kl_coef

    @property
    def skips_zero_advantage(self) -> bool:
        """Whether updates leave out rows without an advantage, because the loss has no other term for them.

        A custom loss may have one.
        """
        loss = section.policy_loss(self.algorithm)
        only_advantages = loss.objective != "custom" and loss.kl_coef == 0 and loss.entropy_coef == 0
        return only_advantages and self.kl_penalty is None

    @property
    def update_rules(self) -> tuple[object, ...]:
        """The settings besides batch and trainers' configurations on which the updates of a step depend."""
        algorithm = self.algorithm
        return (
            *super().update_rules,
            self.critic_warmup,
            self.skips_zero_advantage,
            self.kl_penalty,
            section.trust_region(algorithm),
            algorithm.kl_stop or None,
            algorithm.kl_states,
        )

    @property
    def engine_load(self) -> int:
        """Most unfinished samples of one engine, running and queued.

        Two groups can queue in a full engine and take the places that finished samples free before their group ends.
        An episode that waits for its environment takes no place in the engine, so that an engine gets as many groups as
        there are episodes.
        """
        episodes = sum(one.workers * one.episodes for one in self.roles.environments().values())
        episodes = -(-episodes // self.roles.rollout.workers)
        largest = max(self.group_sizes)
        return max(self.roles.rollout.max_num_seqs, largest, episodes) + 2 * largest

    @property
    def group_scoring_s(self) -> float:
        """Longest time in which a reward worker scores a group: every sample may take its function's timeout, after
        which the function gets a new process."""
        functions = [function for one in self.reward_functions().values() for function in one]
        slowest = max((function.timeout_s for function in functions), default=0.0)
        largest = max([*self.group_sizes, *(one.sampling.samples for one in self.held_out_sets())])
        return max(self.schedule.score_timeout_s, largest * (slowest + _NEW_PROCESS_S))

    @property
    def device(self) -> Device:
        """Device that the policy and the engines run on."""
        return "cuda" if self.roles.policy.gpus > 0 or self.roles.rollout.gpus > 0 else "cpu"

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the log-probs before the update are computed separately.

        With one update per step and no KL in the reward, the update itself computes them.
        """
        policy = self.policy_config()
        compares = self.schedule.updates_per_step > 1 and policy.loss.has_ratio
        return compares or policy.advantage.kl_coef > 0 or policy.advantage.estimator == "distill"

    @property
    def old_logprobs_at_batch(self) -> bool:
        """Whether these log-probs are computed for the whole batch instead of for each group during generation."""
        return self.needs_old_logprobs and self.schedule.max_staleness > 0

    @property
    def values_at_batch(self) -> bool:
        """Whether the critic's values are computed for the whole batch instead of for each group during generation.

        The critic trains while groups of later steps are generated: only once it is their turn is it the critic before
        the step's updates.
        """
        return self.roles.critic is not None and self.schedule.max_staleness > 0

    @property
    def solved_at(self) -> float | None:
        """Least reward (of the role) of a solved sample, or None if neither evaluation nor reward define it."""
        if self.evaluation is not None and self.evaluation.solved_at is not None:
            return self.evaluation.solved_at
        reward = self.roles.reward
        return None if reward.model is not None and reward.model_weight else right_from(reward.functions)

    def held_out_sets(self) -> list[HeldOutSettings]:
        """Settings with which each source of `data.eval` is sampled and scored, in the order of the spec."""
        evaluation = self.evaluation or EvaluationConfig()
        found: list[HeldOutSettings] = []
        for name, source in self.data.held_out_sets().items():
            own = source if isinstance(source, HeldOut) else HeldOut()
            rewards = own.rewards
            solved_at = self.solved_at if rewards is None else right_from(rewards)
            found.append(
                HeldOutSettings(
                    section=name,
                    sampling=own.sampling or evaluation.sampling,
                    functions=rewards or self.roles.reward.functions,
                    own_rewards=rewards is not None,
                    solved_at=solved_at if own.solved_at is None else own.solved_at,
                    level=own.level,
                    environment=self._environment_of(own.environment),
                )
            )
        return found

    def reward_functions(self) -> dict[str, tuple[RewardFunctionConfig, ...]]:
        """Every list of reward functions by its path, the role's first."""
        own = {f"data.train.{n}.rewards": source.rewards for n, source in enumerate(self.data.mixture)}
        own |= {one.rewards_section: one.functions for one in self.held_out_sets() if one.own_rewards}
        lists = {"roles.reward.functions": self.roles.reward.functions, **own}
        return {path: functions for path, functions in lists.items() if functions is not None}

    def reward_digest(self) -> str:
        """Digest of the settings that determine rewards in training, without the functions' time limits and place."""
        reward, judge = self.roles.reward, self.roles.judge
        content: dict[str, Any] = {
            path: [decisive(one, "reward") for one in functions]
            for path, functions in self.reward_functions().items()
            if not path.startswith("data.eval")
        }
        if reward.model is not None:
            content["model"] = [*decisive(reward, "reward")["model"].values(), reward.model_weight]
        if judge is not None:
            content["judge"] = decisive(judge, "reward")
        return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()

    def missing(self) -> list[Finding]:
        """Missing models, data and libraries, and problems of engines, reward functions and own algorithms."""
        engines = {"rollout": self.roles.rollout.engine}
        if self.roles.judge is not None:
            engines["judge"] = self.roles.judge.engine
        options = installed_vllm.unknown_options(engines)
        parsers = {
            f"roles.{environment_role(name)}.tool_parser": role.tool_parser
            for name, role in self.roles.environments().items()
        }
        lists = self.reward_functions().items()
        functions = [problem for path, one in lists for problem in preflight.unusable_functions(one, path)]
        environments = [
            problem
            for role, config in self.environment_configs().items()
            for problem in preflight.unusable_environment(config, f"roles.{role}")
        ]
        read = installed_vllm.unusable_parsers(parsers)
        return [*super().missing(), *options, *read, *functions, *environments, *self._algorithm_problems()]

    def packages(self) -> Iterator[tuple[str, str]]:
        """(field, module) of features that need an extra, and of the comparison of answers in votes."""
        yield from super().packages()
        for one, source in zip(self.held_out_sets(), self.data.held_out_sets().values(), strict=True):
            if one.votes:
                own = isinstance(source, HeldOut) and source.sampling is not None
                yield f"data.{one.section}.sampling.samples" if own else "evaluation.sampling.samples", "math_verify"

    def model_problems(self, models: Mapping[str, ModelConfig]) -> list[Finding]:
        """Problems of models by their config.json, including what the engines do not support."""
        trained = models.get("model") if self.device == "cpu" else None
        heads = preflight.unsupported_head_size(Path(trained.path)) if trained is not None else ()
        engines = {"model": ("roles.rollout.tensor_parallel_size", self.roles.rollout.tensor_parallel_size)}
        if self.roles.judge is not None:
            judge = self.roles.judge.tensor_parallel_size
            engines["roles.judge.model"] = ("roles.judge.tensor_parallel_size", judge)
        return [
            *super().model_problems(models),
            *heads,
            *preflight.undivided_models(models, engines),
        ]

    def _algorithm_problems(self) -> Iterator[Finding]:
        if section.is_custom(self.algorithm.name):
            available = {"values": self.roles.critic is not None, "ref_logprobs": self.roles.reference is not None}
            old = self.needs_old_logprobs
            for problem in custom.check(self.algorithm, old_logprobs=old, **available):
                yield "algorithm.name", problem

    def warnings(self) -> list[str]:
        """Warnings, also of learning rates that do not reach their peak, and roles with more workers than work."""
        counts = {"policy": self.policy_updates, "critic": self.critic_updates}
        rising = [line for name, role in self.roles.trainers().items() for line in role.rising(name, counts[name])]
        return [*super().warnings(), *rising, *self._idle_workers()]

    def _idle_workers(self) -> list[str]:
        if section.dynamic_sampling(self.algorithm):  # more groups are dispatched than a step trains on
            return []
        groups = self.schedule.prompts_per_step * (1 + self.schedule.max_staleness)
        samples = groups * max(self.group_sizes)
        most = {"rollout": (groups, "groups")} | dict.fromkeys(_SCORERS, (samples, "samples"))
        return [
            f"roles.{name}.workers: {role.workers}, but at most {bound[0]} {bound[1]} are in progress at a "
            "time (schedule.prompts_per_step, max_staleness, algorithm.group_size); the other workers are idle"
            for name, role in self.roles.scaled().items()
            if (bound := most.get(name.partition(".")[0])) is not None and role.workers > bound[0]
        ]

    def resolved_backend(self) -> TransferBackend:
        """The weight-transfer back-end, `auto` resolved. Adapters are small: they take the way through memory."""
        if self.weight_sync.backend != "auto":
            return self.weight_sync.backend
        if self.roles.policy.lora is not None:
            return "shm"
        return automatic_backend(self.device, self.roles.rollout.colocate_with == "policy").name

    @property
    def resolved_sleep(self) -> Sleep:
        """Memory that engines release while the policy trains, null resolved."""
        role = self.roles.rollout
        if role.sleep is not None:
            return role.sleep
        return "kv_cache" if role.colocate_with == "policy" and self.device == "cuda" else "none"

    def rollout_config(self) -> RolloutConfig:
        """Configuration of each rollout worker."""
        role = self.roles.rollout
        share = role.gpu_memory_utilization or (_SHARED_GPU if role.colocate_with == "policy" else None)
        return RolloutConfig(
            model=self.model,
            engine=role.worker_config(EngineConfig, gpu_memory_utilization=share),
            engine_options=role.engine,
            sampling=self.sampling,
            seed=self.seed,
            transfer_backend=self.resolved_backend(),
            device=self.device,
            episodes={name: role.part(EpisodeConfig) for name, role in self.roles.environments().items()},
            turn_forms=self._accounts_for_forms,
            sleep=self.resolved_sleep,
            lora=self.roles.policy.lora,
        )

    @property
    def _accounts_for_forms(self) -> bool:
        """Whether the loss accounts for the tokens that a form permits."""
        if self.sampling.truncates or section.corrects_sampler(self.algorithm):
            return True
        return not section.policy_loss(self.algorithm).has_ratio

    def without_adapters(self) -> RolloutSpec:
        """The spec for engines that serve the model that training starts from, without a policy."""
        policy = self.roles.policy.model_copy(update={"lora": None})
        return self.model_copy(update={"roles": self.roles.model_copy(update={"policy": policy})})

    def environment_configs(self) -> dict[str, EnvironmentConfig]:
        """Configuration of the workers of each environment, by role: `environment`, or `environment.NAME`."""
        environments = self.roles.environments().items()
        return {environment_role(name): one.part(EnvironmentConfig) for name, one in environments}

    def judge_config(self) -> JudgeConfig | None:
        """Configuration of each judge worker; None without a judge."""
        role = self.roles.judge
        if role is None:
            return None
        return role.part(
            JudgeConfig,
            engine=role.worker_config(EngineConfig),
            engine_options=role.engine,
            device=role.device,
        )

    def policy_config(self) -> PolicyConfig:
        """Configuration of each policy rank."""
        role = self.roles.policy
        return PolicyConfig(
            model=self.model,
            trainer=role.worker_config(TrainerConfig),
            loss=section.policy_loss(self.algorithm),
            advantage=section.advantage(self.algorithm),
            sampling=self.sampling,
            ptx_coef=self.algorithm.ptx_coef,
            share_prompts=role.share_prompts,
            run_id=self.name,
            reference_model=self.colocated_reference_model,
            total_updates=self.policy_updates,
            seed=self.seed,
            device=self.device,
            transfer_backend=self.resolved_backend(),
            weight_store=self.weight_sync.url,
            records_tokens=self.output.trajectories,
            lora=role.lora,
        )

    def critic_config(self) -> CriticConfig | None:
        """Configuration of each critic rank; None without a critic."""
        role, loss = self.roles.critic, section.critic_loss(self.algorithm)
        if role is None or loss is None:
            return None
        return CriticConfig(
            model=role.model or self.model,
            trainer=role.worker_config(TrainerConfig),
            loss=loss,
            total_updates=self.critic_updates,
            seed=self.seed,
            device=role.device,
            lora=role.lora,
        )

    def plays_and_judges(self, held_out: HeldOutSettings) -> dict[str, Any]:
        """The environment of a held-out set and the judge of its samples, as far as they decide results; JSON-ready."""
        found: dict[str, Any] = {}
        if held_out.environment is not None:
            role = self.roles.environments()[held_out.environment]
            found["played_in"] = decisive(role, "evaluation")
        judge = self.roles.judge
        if judge is not None and any(function.name == JUDGE_REWARD for function in held_out.functions):
            found["judged_by"] = field_tree(type(judge)).counted(judge, "evaluation", Counts.BY_SET)
        return found

    def evaluated_by(self) -> dict[str, Any]:
        """Environment and judge that decide results, by set; the digest's other fields hold an unnamed environment."""
        sets = {one.label: self.plays_and_judges(one) for one in self.held_out_sets()}
        if "" in self.roles.environments():
            sets = {label: {k: v for k, v in own.items() if k != "played_in"} for label, own in sets.items()}
        return {label: own for label, own in sets.items() if own}

    def evaluation_metrics(self) -> list[str]:
        """The metrics that every evaluation reports, or empty without held-out data."""
        return [name for held_out in self.held_out_sets() for name in held_out.metric_names()]

    def reward_config(self) -> ScoringConfig:
        """Configuration of each reward worker."""
        own = {f"data.train.{n}": source.rewards for n, source in enumerate(self.data.mixture)}
        sets = {section: functions for section, functions in own.items() if functions is not None}
        sets |= {one.rewards: one.functions for one in self.held_out_sets() if one.own_rewards}
        return self.roles.reward.worker_config(ScoringConfig, sets=sets)

    @property
    def probe_interval_s(self) -> float:
        """Seconds between two rounds of health probes of the workers besides the trainers."""
        return self.failures.health_interval_s

    @property
    def overlaps_steps(self) -> bool:
        """Whether a step may begin before the engines have the previous step's weights."""
        return self.schedule.max_staleness > 0

    @property
    def alarm(self) -> AlarmConfig | None:
        """When a rising reward counts as reward hacking, or None if never."""
        return self.failures.alarm

    @property
    def trains(self) -> Literal["policy"]:
        """Kind of model that the run writes."""
        return "policy"

    @property
    def rollouts(self) -> RolloutSpec:
        """This spec."""
        return self

    @property
    def prompt_room(self) -> PromptRoom:
        """Tokens that a prompt may have."""
        longest, response = self.roles.rollout.max_model_len, self.sampling.max_tokens
        words = f"roles.rollout.max_model_len {longest} leaves beside sampling.max_tokens {response}"
        return PromptRoom(longest - response, "roles.rollout.max_model_len", words)

    def room_for(self, section: str) -> PromptRoom:
        """Tokens that a prompt of this section in `data` may have, after reserving a response, or a turn of its
        episodes.

        A turn may have what the conversation leaves of the model's length, and needs one token.
        """
        place = section.partition(" ")[0]  # of a mixture with the source: `train.0 (math)`
        sources = zip(self.data.train_sources(), self.group_settings, strict=True)
        lengths = {name: (own.environment, own.max_tokens, f"data.{name}") for name, own in sources}
        for own in self.held_out_sets():
            lengths[own.section] = own.environment, own.sampling.max_tokens, "evaluation"
        environment, response, where = lengths.get(place, (None, None, ""))
        longest, field = self.roles.rollout.max_model_len, "roles.rollout.max_model_len"
        if environment is not None:
            return PromptRoom(longest - 1, field, f"{field} {longest} leaves beside a turn of one token")
        if response is None:
            return self.prompt_room
        return PromptRoom(
            longest - response, field, f"{field} {longest} leaves beside a response of {response} in {where}"
        )

    @property
    def trainer(self) -> str:
        """Row of the table of roles for the workers that train the model."""
        return "policy"

    @property
    def batch_bytes(self) -> int:
        """Most bytes of the tables of one step and of steps in progress, with prompts and responses at their longest.

        ROLLOUTS hold ids, text (about 4 bytes per token), log-probs, masks and, if sampling is truncated, the tokens
        that were left, once for every step in progress; the scores (old, reference, values) and TRAIN exist once
        (`workers/contract/messages.py`).
        """
        response = self.sampling.max_tokens
        prompt = max(1, self.roles.rollout.max_model_len - response)
        left = min(4 * self.sampling.top_k or _KEPT_BYTES, _KEPT_BYTES) if self.sampling.truncates else 0
        rollouts = self.samples_per_step * (prompt * (4 + 4) + response * (4 + 4 + 4 + 1 / 8 + left))
        train = self.samples_per_step * (prompt * 4 + response * (4 + 1 / 8 + 3 * 4 + 6 * 4 + left))
        return int(rollouts * (1 + self.schedule.max_staleness) + train)

    @property
    def has_weight_file(self) -> bool:
        """Whether new weights reach the engines in a file in shared memory."""
        return BACKENDS[self.resolved_backend()].writes_file

    @property
    def batch_description(self) -> str:
        """Size of a step's batch, as text."""
        return f"{'at most ' if len(self.group_sizes) > 1 else ''}{self.samples_per_step} samples"

    @property
    def scoring_temperature(self) -> float:
        """Temperature that the reference divides its logits by: the one that responses are sampled at."""
        return self.sampling.temperature

    def sequence_lengths(self) -> dict[str, int]:
        """Every limit on the length of a sequence in tokens, by the dotted path of its field."""
        lengths = {"roles.rollout.max_model_len": self.roles.rollout.max_model_len}
        texts = self.data.text_sources().items()
        return lengths | {f"data.{section}.max_tokens": source.max_tokens for section, source in texts}

    def data_sources(self) -> dict[str, DataSource]:
        """The sections that name data, by their name in the section `data`."""
        return {**self.data.prompt_sources(), **self.data.text_sources()}
