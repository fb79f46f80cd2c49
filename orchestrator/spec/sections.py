"""The sections of a spec: what a user may write, field by field.

A section that reaches a worker unchanged is built on the worker's own model (`workers/contract/config.py`), so that
a field is described, typed and bounded once.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from troupe.orchestrator.spec.sources import (
    COUNTED_BEFORE,
    LIST,
    MAP,
    SECTION,
    DataSource,
    HeldOutSource,
    MixedSource,
    Name,
    NamedTextSource,
    TextSource,
    form_of,
)
from troupe.workers.contract.config import (
    EvalSampling,
)
from troupe.workers.contract.config_base import Frozen
from troupe.workers.contract.consequences import (
    ALLOWED,
    EVALUATED,
    EVALUATED_IF_SET,
    NEXT_STEP,
    NONE,
    NOT_EVALUATED,
    SAMPLED,
    Consequences,
    Resume,
    noted,
    refused,
)
from troupe.workers.contract.weight_backends import TransferBackend, describe_backends

_LENGTH = Consequences(resume=Resume(length=True))
SAME_ROWS = Consequences(resume=Resume(note="allowed where the rows are the same"), itself=ALLOWED)
_NEW_TEXTS = Consequences(itself=Resume(refused_if_off="the checkpoint has no position in these texts"))
OTHER_EVALUATIONS = noted("evaluations before and after may not be comparable")
NEW_ORDER = refused("the order of the data follows from it")
_OTHER_BEST = noted("the best evaluations so far are forgotten")


class BaseSchedule(Frozen):
    """Length of the run, division of a step, and timeouts."""

    @property
    @abstractmethod
    def rows_per_step(self) -> int:
        """Rows of the data in a step's batch."""

    steps: Annotated[int, _LENGTH] = Field(ge=1)
    """Training steps; `data_epochs` may stand instead."""
    data_epochs: Annotated[float | None, NONE] = Field(default=None, gt=0.0)
    """Passes over `data.train` instead of `steps`: rows x passes / prompts (or examples) of a step, rounded up.
    `troupe validate` prints the steps, and the spec in the run folder has them. Rows that are too long for the model
    count too."""
    epochs: Annotated[int, _LENGTH] = Field(default=1, ge=1)
    """Passes over a step's batch."""
    minibatches: Annotated[int, _LENGTH] = Field(default=1, ge=1)
    """Optimizer updates in one pass."""
    start_timeout_s: float = Field(default=600.0, gt=0.0)
    """Timeout for the start of a worker: its resources, its process, its model."""
    score_timeout_s: float = Field(default=600.0, gt=0.0)
    """Timeout for a call to a worker that scores: reference, reward or critic. A reward worker has as long as all
    samples of a group may take, if each takes the timeout of its function and that is longer."""
    train_timeout_s: float = Field(default=1800.0, gt=0.0)
    """Timeout for a call to the trainers (prepare, update, evaluate, save, load)."""
    step_timeout_s: float = Field(default=7200.0, gt=0.0)
    """Timeout for a step; the run then stops with an error."""

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates on each batch."""
        return self.epochs * self.minibatches


class ScheduleConfig(BaseSchedule):
    """Length of the run, division of a step, and timeouts."""

    prompts_per_step: int = Field(ge=1)
    """Prompts (groups) in a step's batch."""

    @property
    def rows_per_step(self) -> int:
        return self.prompts_per_step

    max_staleness: int = Field(default=0, ge=0)
    """Policy versions a sample's oldest token may lag behind the one it trains; 0 is synchronous training."""
    generate_timeout_s: float = Field(default=600.0, gt=0.0)
    """Timeout for one group on an engine; the group is then retried on another engine."""
    sync_timeout_s: float = Field(default=600.0, gt=0.0)
    """Timeout for a weight update of the engines."""


class CurriculumConfig(Frozen):
    """Draws a prompt the more often, the nearer its pass rate is to one half. A pass over the data draws a prompt with
    probability max(floor, 4 p (1 - p)), where p = (solved + 1) / (samples + 2) counts its samples in finished steps. A
    prompt without results is always drawn."""

    solved_at: Annotated[float | None, COUNTED_BEFORE] = None
    """A sample with at least this reward counts as solved; null: `evaluation.solved_at`, or by the rule that stands
    there. For a component the rule is: 1 for a function of right or wrong, such as `exact_match`. Required if neither
    defines it."""
    component: Annotated[str | None, COUNTED_BEFORE] = None
    """Reward component that `solved_at` is compared with (its label, or `reward_model`), without its weight; null: the
    reward."""
    floor: float = Field(default=0.1, ge=0.01, le=1.0)
    """Least probability with which a pass over the data draws a prompt."""
    decay: float = Field(default=0.5, ge=0.0, le=1.0)
    """Weight of a prompt's counts so far when new ones arrive: 0 keeps only the latest, 1 weighs all alike."""


class DataConfig(Frozen):
    """Where prompts come from."""

    train: Annotated[
        Annotated[DataSource, Tag(SECTION)]
        | Annotated[tuple[MixedSource, ...], Field(min_length=1), Tag(LIST), Consequences(of={"name": SAMPLED})],
        Discriminator(form_of),
        NONE,
        SAME_ROWS,
    ]
    """Prompts to train on: one source, or a list of named sources, which are mixed in proportion to their weights."""
    eval: Annotated[
        Annotated[
            Annotated[DataSource, Tag(SECTION)] | Annotated[dict[Name, HeldOutSource], Tag(MAP)], Discriminator(form_of)
        ]
        | None,
        NONE,
        OTHER_EVALUATIONS,
        EVALUATED,
    ] = None
    """Prompts to evaluate on: one source, or several by name (`{math: {...}, code: {...}}`), each with its own sampling
    and rewards. A name has lowercase letters, digits and `-`."""
    skip: Annotated[int, NONE, NEW_ORDER] = Field(default=0, ge=0)
    """Prompts at the start of the seed's order that are not drawn. `rounds` adds what earlier rounds have drawn."""
    held_out: Annotated[bool, NONE, EVALUATED_IF_SET] = True
    """Exclude every prompt of `train` from `eval`."""
    ptx: Annotated[
        Annotated[
            Annotated[TextSource, Tag(SECTION)]
            | Annotated[tuple[NamedTextSource, ...], Field(min_length=1), Tag(LIST)],
            Discriminator(form_of),
        ]
        | None,
        NONE,
        SAME_ROWS,
        _NEW_TEXTS,
    ] = None
    """Plain texts that every update of the policy also trains on (`algorithm.ptx_coef`): one source, or a list of named
    sources; a step trains on `texts_per_step` of each."""
    curriculum: Annotated[CurriculumConfig | None, NONE] = None
    """Draw prompts by how often they were solved; null: every pass over the data draws each of them once."""

    def held_out_sets(self) -> dict[str, DataSource]:
        """The sources of `eval` by the name of their section in `data`: `eval`, or `eval.NAME` for each of a map."""
        if self.eval is None:
            return {}
        if isinstance(self.eval, dict):
            return {f"eval.{name}": held_out for name, held_out in self.eval.items()}
        return {"eval": self.eval}

    @property
    def mixture(self) -> tuple[MixedSource, ...]:
        """The sources of a mixture; empty if there is one source."""
        return self.train if isinstance(self.train, tuple) else ()

    def train_sources(self) -> dict[str, DataSource]:
        """The sources to train on by their path in the section `data`: `train`, or `train.0`, `train.1`, ..."""
        if isinstance(self.train, tuple):
            return {f"train.{number}": source for number, source in enumerate(self.train)}
        return {"train": self.train}

    def text_sources(self) -> dict[str, TextSource]:
        """The sources of `ptx` by their path in the section `data`: `ptx`, or `ptx.0`, `ptx.1`, ..."""
        if isinstance(self.ptx, tuple):
            return {f"ptx.{number}": source for number, source in enumerate(self.ptx)}
        return {} if self.ptx is None else {"ptx": self.ptx}

    def prompt_sources(self) -> dict[str, DataSource]:
        """The sources of prompts by their path in the section `data`."""
        return self.train_sources() | self.held_out_sets()

    def sources(self) -> dict[str, DataSource | TextSource]:
        """The sources of prompts and texts by their path in the section `data`."""
        return {**self.prompt_sources(), **self.text_sources()}


class BaseEvaluation(Frozen):
    """When the model is evaluated on `data.eval`."""

    every_steps: Annotated[int, NEXT_STEP, NOT_EVALUATED] = Field(default=10, ge=0)
    """Steps between evaluations; 0: none in between."""
    at_start: Annotated[bool, NEXT_STEP, NOT_EVALUATED] = True
    """Evaluate the untrained model."""
    at_end: Annotated[bool, NEXT_STEP, NOT_EVALUATED] = True
    """Evaluate after the last step."""


class EvaluationConfig(BaseEvaluation):
    """When and how the policy is evaluated on `data.eval`."""

    prompts: Annotated[int, EVALUATED] = Field(default=0, ge=0)
    """Prompts per evaluation, always the same ones; 0: all."""
    beside: Annotated[bool, NEXT_STEP, NOT_EVALUATED] = False
    """Evaluate while training continues: one engine keeps the weights and samples for the evaluation, the others go on.
    Metrics of a step then arrive some steps later. The last evaluation is made as usual, when training is over."""
    sampling: Annotated[EvalSampling, EVALUATED] = EvalSampling()
    """How responses are sampled."""
    solved_at: Annotated[float | None, EVALUATED] = None
    """A sample with at least this reward counts as solved: `eval/accuracy` is the share of such samples, and pass@k
    counts them. null: the weight of the only reward component with a weight, if that is `choice`,
    `exact_match`, `last_number`, `numeric`, `regex`, `reasoning_gym` or `python_tests`; for any other reward there is
    neither metric."""


class WeightSyncConfig(Frozen):
    """How new weights reach the engines."""

    backend: Literal["auto", TransferBackend] = Field(default="auto", description=describe_backends())
    delta: Literal["auto", "off"] = "auto"
    """`auto`: with a back-end that writes a file, other nodes get a delta to the version that they have if it is
    smaller; the reconstructed weights are verified as a whole. `off`: they always get all weights."""
    url: Annotated[str | None, Consequences(path="store")] = None
    """Where the back-end store keeps weights: `s3://bucket/folder`, `gs://bucket/folder`,
    `abfs://container@account.dfs.core.windows.net/folder`, or `file:///folder` on a disk that all nodes mount.
    pyarrow's options follow as a query (`?region=eu-west-1&endpoint_override=host:port`); credentials come from the
    environment of the nodes. A run leaves nothing there, unless its node dies."""


class AuditConfig(Frozen):
    """Compares the log-probs of sampled tokens in the engines and in the trainer with plain float32 transformers."""

    at_start: bool = False
    """Compare before the first step, and refuse the run if rounding does not explain the gap."""
    tokens: int = Field(default=256, ge=64)
    """Sampled tokens that are compared, at least."""
    response_tokens: int = Field(default=64, ge=1)
    """Longest response that is sampled for it, in tokens."""


class BestConfig(Frozen):
    """Keeps the checkpoint of the steps with the best evaluations: each is saved right after its evaluation."""

    metric: Annotated[str, _OTHER_BEST] = Field(min_length=1)
    """A metric of the evaluation, such as `eval/accuracy`, or `eval/math/avg` of a set with a name."""
    mode: Annotated[Literal["max", "min"], _OTHER_BEST] = "max"
    """Whether a high or a low value is good."""
    keep: int = Field(default=1, ge=1)
    """Best checkpoints kept, besides the newest ones. The model before training is none."""


class CheckpointConfig(Frozen):
    """When the run's state is saved."""

    every_steps: int = Field(default=10, ge=0)
    """Steps between checkpoints; 0: only at the end."""
    keep: int = Field(default=3, ge=1)
    """Newest checkpoints kept."""
    async_save: bool = False
    """Write checkpoints while training continues, which waits only until each trainer has copied its state to host
    memory (`troupe plan` counts it). The last one of a run is written before it ends."""
    path: Annotated[str | None, Consequences(path="store")] = None
    """URL of an object store (s3, gs, abfs or file, with pyarrow's options as a query) for copies of checkpoints, made
    in the background, in a folder with the run's name. A run resumes from there if its folder has no equally new
    one."""
    best: BestConfig | None = None
    """Keep the best checkpoint as well (`troupe export --best`); null: only the newest ones are kept."""
    patience: int | None = Field(default=None, ge=1)
    """End the run after so many evaluations in a row whose `best.metric` is not better than the best before, including
    the model's before training; null: the run has all of its steps."""


class RolloutCheckpointConfig(CheckpointConfig):
    """When the state of a run on rollouts is saved, and what it contains."""

    samples_mib: int = Field(default=1024, ge=0)
    """Most MiB of a checkpoint for finished samples of groups that are not trained yet, which a resumed run takes over;
    0: it samples them again."""


class BaseFailures(Frozen):
    """Which failures are tolerated, and when the run stops."""

    on_bad_row: Literal["skip", "stop"] = "skip"
    """What an unusable row of the data does: `skip` counts and skips it, `stop` stops the run."""
    nonfinite_steps: int = Field(default=3, ge=1)
    """Consecutive updates of a role with a gradient that is not finite before the run stops."""
    failed_saves: int = Field(default=3, ge=0)
    """Checkpoints in a row that may fail (disk full, read-only) before the run ends; training continues until then."""
    run_restarts: int = Field(default=5, ge=0)
    """Restarts of the whole run by `troupe run --supervise` without a new checkpoint in between."""
    stopped_s: float = Field(default=5.0, ge=1.0)
    """Seconds after which a worker with a stopped process (SIGSTOP, a frozen container) counts as lost."""
    hung_s: float = Field(default=120.0, gt=0.0)
    """Seconds after which a call that computes on policy, critic or reference counts as hung if it has also taken 10
    times as long as the longest such call before, of at least 5; until then the timeouts of `schedule` apply."""
    steps_per_restart: int = Field(default=100, ge=0)
    """Steps without a loss of the role after which one of the restarts below counts no more; 0: all count for the whole
    run."""
    trainer_restarts: int = Field(default=3, ge=0)
    """Restarts of policy and critic in place (from the last checkpoint, repeating the updates since) that are
    tolerated."""
    replay_steps: int = Field(default=16, ge=0)
    """Steps since the last checkpoint whose batches stay in the object store, so that restarted trainers can repeat
    them. After more steps than that, a lost trainer ends the run."""


class FailureConfig(BaseFailures):
    """Which failures are tolerated, and when the run stops."""

    engine_restarts: int = Field(default=3, ge=0)
    """Restarts of rollout engines that are tolerated."""
    environment_restarts: int = Field(default=10, ge=0)
    """Restarts of environment workers that are tolerated, of each environment."""
    judge_restarts: int = Field(default=3, ge=0)
    """Restarts of judge workers that are tolerated."""
    reward_restarts: int = Field(default=3, ge=0)
    """Restarts of reward workers that are tolerated."""
    reference_restarts: int = Field(default=3, ge=0)
    """Restarts of reference workers that are tolerated, and as many of the reference's engines."""
    max_attempts: int = Field(default=3, ge=1)
    """Attempts at a group before it is dropped."""
    max_failed_fraction: float = Field(default=0.5, ge=0.0, le=1.0)
    """Share of a step's samples that may fail before the run stops."""
    health_interval_s: float = Field(default=20.0, gt=0.0)
    """Seconds between health checks of every engine."""
    health_misses: int = Field(default=3, ge=1)
    """Consecutive health checks that an engine misses before it counts as lost."""


SinkName = Literal["tensorboard", "wandb", "mlflow", "trackio", "swanlab"]
"""A destination of metrics."""


class PrometheusConfig(Frozen):
    """An endpoint `/metrics`, without authentication."""

    port: int = Field(default=9464, ge=1, le=65535)
    """Port to listen on."""
    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on; the default is reached from the same node only."""


class ProfileConfig(Frozen):
    """Updates that are recorded with torch's profiler. Recording slows the update down and takes memory."""

    steps: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1)
    """Steps whose first update of each trained model is recorded."""
    ranks: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(0,), min_length=1)
    """Ranks that record it. If ranks share their micro-batches (`sequence_parallel_size`), groups of ranks, whose first
    rank records it."""


class BaseOutput(Frozen):
    """What the run writes, besides its log, metrics and checkpoints."""

    folder: Annotated[str, Consequences(path="path")] = Field(default="runs", min_length=1)
    """Folder of runs: each is written to a folder in it, named after the spec."""
    sinks: tuple[SinkName, ...] = ()
    """Where metrics go besides `metrics.jsonl`: `tensorboard` (event files in the run folder), `wandb`, `mlflow`,
    `trackio`, `swanlab` (packages of these names, configured by their own environment variables)."""
    project: str = Field(default="troupe", min_length=1)
    """Project of the run; MLflow's experiment."""
    prometheus: PrometheusConfig | None = None
    """Serve the metrics of the latest step to Prometheus, from the controller's node."""
    profile: ProfileConfig | None = None
    """Write traces of chosen updates to `profile/` in the run folder, on the node of each rank, for `chrome://tracing`
    or Perfetto."""
    replay_steps: int = Field(default=32, ge=0)
    """Newest steps whose batches are kept for `troupe replay`; 0: none."""
    replay_gib: float = Field(default=2.0, gt=0.0)
    """Bound on what is kept for `troupe replay`, in GiB; the oldest steps go first."""
    keep_gib: float = Field(default=20.0, ge=0.0)
    """GiB that the samples and timelines of the steps may take; the oldest steps are deleted. 0: no bound."""


class OutputConfig(BaseOutput):
    """What the run writes, besides its log, metrics and checkpoints."""

    trajectories: bool = True
    """Write every step's samples as Parquet, and up to 4096 samples of every evaluation."""
    teacher_tokens: bool = False
    """Write the teachers' likeliest tokens with the samples, 8k + 4 bytes for each token and teacher, so that `kd` can
    train on them without the teachers."""
