"""How the prompts of each source are sampled and scored, in training and in evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.spec.sections import EvaluationConfig
from troupe.orchestrator.spec.sources import DataSource, HeldOut, MixedSource, ReasoningGymSource
from troupe.workers.contract.config import EvalSampling
from troupe.workers.contract.reward_config import RewardFunctionConfig, RewardModelConfig
from troupe.workers.contract.rewards import REWARD_MODEL, RIGHT_OR_WRONG

COMPARISONS = ("win_rate", "position_consistency")
"""Results of a held-out set whose samples are compared with a baseline."""

NO_ENVIRONMENT = "none"
"""Replaces an environment's name: samples of the source are single responses."""


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
    own_algorithm: bool = False
    """Whether the source has settings of the algorithm."""
    teachers: Mapping[str, float] = field(default_factory=dict)
    """Weights of the source's teachers, by the name of their role; empty if the reference is the teacher."""


@dataclass(frozen=True)
class HeldOutSettings:
    """How one source of `data.eval` is sampled and scored."""

    section: str
    """Name of its section in `data`: `eval`, or `eval.NAME`."""
    sampling: EvalSampling
    functions: tuple[RewardFunctionConfig, ...]
    """Its reward functions."""
    own_rewards: bool
    """Whether these are its own, instead of `roles.reward`'s."""
    solved_at: float | None
    """A sample with at least this reward counts as solved; None if the reward does not define it."""
    level: str
    """Key of the metadata by whose values results are also reported."""
    environment: str | None = None
    """Name of the environment that its samples are episodes in, empty for one without a name, or None if its samples
    are single responses."""
    players: tuple[str, ...] = ()
    """The players of a game that the policy plays, if they are several: each is a sample of an episode."""

    @property
    def name(self) -> str:
        """Name of the set; empty for one source without a name."""
        return self.section.partition(".")[2]

    @property
    def label(self) -> str:
        """Its name in reports: `eval` for one source without a name."""
        return self.name or self.section

    @property
    def prefix(self) -> str:
        """What the names of its metrics begin with: `eval/`, or `eval/NAME/`."""
        return f"{self.section.replace('.', '/')}/"

    @property
    def compared(self) -> tuple[str, ...]:
        """Its reward components that compare the samples with a baseline."""
        return tuple(function.component for function in self.functions if function.compares == "baseline")

    @property
    def votes(self) -> bool:
        """Whether its samples vote for an answer (maj@k)."""
        return self.sampling.samples > 1 and self.solved_at is not None

    @property
    def pass_at(self) -> list[int]:
        """Every k of its pass@k, or best@k: the powers of two up to the number of samples, and that number."""
        samples = self.sampling.samples
        powers = [1 << power for power in range(1, samples.bit_length()) if 1 << power <= samples]
        return powers if samples in powers or samples == 1 else [*powers, samples]

    @property
    def average(self) -> str:
        """Name of the share of solved samples: `avg` of a named set, `accuracy` of one source without a name."""
        return "avg" if self.name else "accuracy"

    def metric_names(self) -> list[str]:
        """Every metric that an evaluation reports of it, besides those by level."""
        solved = self.solved_at is not None
        means = ["reward", *([self.average] if solved else ()), *(COMPARISONS if self.compared else ())]
        at = [f"{'pass' if solved else 'best'}@{k}" for k in self.pass_at]
        at += [f"maj@{self.sampling.samples}"] if self.votes else []
        names = ["prompts", "refused", "failed_samples", "response_tokens", "truncated"]
        names += ["solved_at"] if solved else []
        names += [f"{name}{bound}" for name in means for bound in ("", "_low", "_high")]
        names += [f"players/{player}/{name}" for player in self.players for name in (*means, *at)]
        return [f"{self.prefix}{name}" for name in (names if self.players else [*names, *at])]

    @property
    def rewards(self) -> str:
        """Key of the functions in `ScoringConfig.sets` that a reward worker calls; empty for the role's."""
        return f"data.{self.section}" if self.own_rewards else ""

    @property
    def rewards_section(self) -> str:
        """Dotted path of its reward functions."""
        return f"data.{self.section}.rewards" if self.own_rewards else "roles.reward.functions"


def group_settings(spec: RolloutSpec) -> tuple[GroupSettings, ...]:
    """Settings with which groups are sampled and scored, for each source of `data.train`."""
    if spec.data.mixture:
        return tuple(_of_source(spec, number, source) for number, source in enumerate(spec.data.mixture))
    return (
        GroupSettings(
            spec.group_size,
            environment=_environment_of(spec, None),
            solved_at=_solved_in_training(spec, None),
            mask_truncated=spec.algorithm.mask_truncated,
            signal_in=spec.algorithm.dynamic_sampling_on,
            teachers=_teachers_of(spec, ""),
        ),
    )


def held_out_sets(spec: RolloutSpec) -> list[HeldOutSettings]:
    """Settings with which each source of `data.eval` is sampled and scored, in the order of the spec."""
    evaluation = spec.evaluation or EvaluationConfig()
    found: list[HeldOutSettings] = []
    games = spec.roles.environments()
    for name, source in spec.data.held_out_sets().items():
        own = source if isinstance(source, HeldOut) else HeldOut()
        solved = solved_at(spec) if own.rewards is None else right_from(own.rewards)
        found.append(
            HeldOutSettings(
                section=name,
                sampling=own.sampling or evaluation.sampling,
                functions=own.rewards or spec.roles.reward.components,
                own_rewards=own.rewards is not None,
                solved_at=solved if own.solved_at is None else own.solved_at,
                level=own.level,
                environment=(environment := _environment_of(spec, own.environment)),
                players=_several(games[environment].trained) if environment in games else (),  # refused elsewhere
            )
        )
    return found


def scored_models(spec: RolloutSpec) -> dict[str, RewardModelConfig]:
    """The reward model of each component that has one, by the path of the component; of `roles.reward.model` as a
    component without an entry in a list, by the model's path."""
    reward = spec.roles.reward
    lists = {**reward_functions(spec), "roles.reward.functions": reward.components}
    named = {f"{path}.{n}": one.model for path, own in lists.items() for n, one in enumerate(own) if one.model}
    if len(reward.components) > len(reward.functions):
        named["roles.reward.model"] = named.pop(f"roles.reward.functions.{len(reward.functions)}")
    models = reward.reward_models
    return {path: models[name] for path, name in named.items() if name in models}


@dataclass(frozen=True)
class Offset:
    """The measured offset of a reward model, for one set of reward functions."""

    model: str
    rewards: str
    """Key of the set in `ScoringConfig.sets`; empty for the role's functions."""
    column: str
    """Column with the reference answers."""
    sources: tuple[str, ...]
    """The sources that have them, by their path in the section `data`."""
    metric: str
    """Its name in the metrics, or empty if only held-out prompts are scored with the set."""

    @property
    def path(self) -> str:
        """Path of the field."""
        return f"roles.reward.{'model' if self.model == REWARD_MODEL else f'models.{self.model}'}.offset"


def measured_offsets(spec: RolloutSpec) -> list[Offset]:
    """The offsets that are measured. The references are of the sources whose samples are scored with the set; of a set
    for held-out prompts alone, of all sources that the model scores."""
    reward, groups = spec.roles.reward, group_settings(spec)
    columns = {name: one.offset for name, one in reward.reward_models.items() if isinstance(one.offset, str)}
    given = [source.rewards or reward.components for source in spec.data.mixture] or [reward.components]
    used = [{function.model for function in functions} & columns.keys() for functions in given]
    sources = list(zip(spec.data.train_sources(), groups, used, strict=True))
    sets = {one.rewards: ("", one.functions) for one in held_out_sets(spec)}
    sets |= {
        one.rewards: (f"source/{one.source}" if one.rewards else "reward", functions)
        for one, functions in zip(groups, given, strict=True)
    }
    found: list[Offset] = []
    for rewards, (prefix, functions) in sets.items():
        for name in dict.fromkeys(one.model for one in functions if one.model in columns):
            scored = {path: one.rewards for path, one, models in sources if name in models}
            own = tuple(path for path, key in scored.items() if key == rewards) or tuple(scored)
            found.append(Offset(name, rewards, columns[name], own, prefix and f"{prefix}/{name}/offset"))
    return found


def answer_column(source: DataSource) -> str | None:
    """Name of the column with the answers of a source, or None if it has none."""
    return "answer" if isinstance(source, ReasoningGymSource) else source.answer


def reward_functions(spec: RolloutSpec) -> dict[str, tuple[RewardFunctionConfig, ...]]:
    """Every list of reward functions by its path, the role's first."""
    own = {f"data.train.{n}.rewards": source.rewards for n, source in enumerate(spec.data.mixture)}
    own |= {one.rewards_section: one.functions for one in held_out_sets(spec) if one.own_rewards}
    lists = {"roles.reward.functions": spec.roles.reward.functions, **own}
    return {path: functions for path, functions in lists.items() if functions is not None}


def evaluation_metrics(spec: RunSpec) -> list[str]:
    """The metrics that every evaluation of this spec reports; empty without held-out data."""
    if (offline := spec.offline) is not None:
        names = () if offline.data.eval is None else ("examples", *offline.algorithm.reported)
        return [f"eval/{name}" for name in names]
    return [name for held_out in held_out_sets(spec.rollouts) for name in held_out.metric_names()]


def solved_at(spec: RolloutSpec) -> float | None:
    """Least reward (of the role) of a solved sample, or None if neither evaluation nor reward define it."""
    if spec.evaluation is not None and spec.evaluation.solved_at is not None:
        return spec.evaluation.solved_at
    return right_from(spec.roles.reward.components)


def right_from(functions: Sequence[RewardFunctionConfig], component: str | None = None) -> float | None:
    """Least sum of reward functions of a right response, or None if they do not define it. `component`: label of one of
    them, whose value (it has no weight) is looked at instead of the sum."""
    if component is not None:
        says = any(one.name in RIGHT_OR_WRONG for one in functions if one.component == component)
        return 1.0 if says else None
    weighted = [function for function in functions if function.weight]
    if len(weighted) != 1:
        return None
    (only,) = weighted
    return only.weight if only.name in RIGHT_OR_WRONG and only.weight > 0 else None


def _several(players: tuple[str, ...]) -> tuple[str, ...]:
    return players if len(players) > 1 else ()


def _of_source(spec: RolloutSpec, number: int, source: MixedSource) -> GroupSettings:
    own = "" if source.rewards is None else f"data.train.{number}"
    algorithm = spec.algorithm
    return GroupSettings(
        samples=source.group_size or spec.group_size,
        source=source.name,
        max_tokens=source.max_tokens,
        rewards=own,
        solved_at=_solved_in_training(spec, source.rewards) if source.solved_at is None else source.solved_at,
        environment=_environment_of(spec, source.environment),
        mask_truncated=algorithm.mask_truncated if source.mask_truncated is None else source.mask_truncated,
        signal_in=source.dynamic_sampling_on or algorithm.dynamic_sampling_on,
        own_algorithm=source.algorithm is not None,
        teachers=_teachers_of(spec, source.name),
    )


def _teachers_of(spec: RolloutSpec, source: str) -> dict[str, float]:
    return {name: teacher.weight for name, teacher in spec.roles.teachers(source).items()}


def _solved_in_training(spec: RolloutSpec, rewards: Sequence[RewardFunctionConfig] | None) -> float | None:
    """Least reward, or curriculum component, of a solved sample by the functions of its source, or None."""
    curriculum = spec.data.curriculum
    if curriculum is not None and curriculum.solved_at is not None:
        return curriculum.solved_at
    component = None if curriculum is None else curriculum.component
    if component is None and rewards is None:
        return solved_at(spec)
    return right_from(spec.roles.reward.components if rewards is None else rewards, component)


def _environment_of(spec: RolloutSpec, name: str | None) -> str | None:
    """The environment of samples by its name in their source, or None if they are single responses."""
    if name == NO_ENVIRONMENT:
        return None
    return "" if name is None and "" in spec.roles.environments() else name
