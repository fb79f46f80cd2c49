"""`troupe env`: commands for environments."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from troupe.orchestrator.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from troupe.orchestrator.spec.rollout import RolloutSpec
    from troupe.workers.contract.config import EnvironmentConfig, ModelConfig

_START_S = 120.0
env_app = typer.Typer(no_args_is_help=True, help="Check environments.")


@env_app.command()
def check(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="YAML spec with a section roles.environment.")],
    say: Annotated[list[str], typer.Option("--say", help="Text of a turn; repeat for further turns.")] = [],  # noqa: B006
    episodes: Annotated[int, typer.Option(min=1, help="Episodes to play, each with a row of data.train.")] = 1,
    set_: Annotated[list[str], typer.Option("--set", metavar="FIELD=VALUE", help="Override a field of the spec.")] = [],  # noqa: B006
) -> None:
    """Play episodes in each environment without a model and print the conversations with their tokens and loss masks.

    With --say the policy's turns are these texts, and the last one is repeated; then it is played with random tokens.
    """
    from troupe.orchestrator.spec.stages import plan_runs, read_document

    planned = [run.spec for run in plan_runs(read_document(spec, set_))]
    for one in planned:
        # A stage's model may not be trained yet; its tokenizer is that of the first stage.
        model = one.model if Path(one.model.path).is_dir() else planned[0].model
        if one.rollouts is not None:
            _check(one.rollouts, model, say, episodes)
    if not any(one.rollouts is not None and one.rollouts.roles.environments() for one in planned):
        raise UsageError(f"{spec}: there is no roles.environment to check")


def _check(spec: RolloutSpec, model: ModelConfig, say: list[str], episodes: int) -> None:
    """Play episodes in each environment of a spec and print them."""
    environments = spec.roles.environments()
    if not environments:
        return
    from troupe.orchestrator.data.mixture import group_settings
    from troupe.orchestrator.data.prompts import load_train_pool
    from troupe.orchestrator.spec.rollout import environment_role
    from troupe.workers.contract.config import EnvironmentConfig

    pool = load_train_pool(spec.data, spec.failures.on_bad_row, plain=spec.model.plain)
    settings = group_settings(spec, pool)
    for name, role in environments.items():
        rows = list(islice((row for row in range(pool.rows) if settings[row].environment == name), episodes))
        if name:
            typer.echo(f"# {environment_role(name)}" + ("" if rows else ": no source of data.train plays in it"))
        if rows:
            _play(spec, model, role.part(EnvironmentConfig), pool.table.take(rows), say)


def _play(spec: RolloutSpec, model: ModelConfig, config: EnvironmentConfig, rows: pa.Table, say: list[str]) -> None:
    """Play an episode with each of these rows of a PROMPTS table, and print them."""
    from troupe.workers.isolation.probe import ProbeFailed, ask

    request = {
        "config": config.model_dump(),
        "model": model.model_dump(),
        "max_tokens": spec.sampling.max_tokens,
        "max_model_len": spec.roles.rollout.max_model_len,
        "rows": rows.select(["messages", "answer", "metadata"]).to_pylist(),
        "said": say,
        "seed": spec.seed,
    }
    try:
        for text in ask(
            "troupe.workers.engine.episode_check:report", request, _START_S + len(rows) * 2 * config.episode_timeout_s
        ):
            typer.echo(text)
    except ProbeFailed as error:
        raise UsageError(error.raised or f"the check failed: {error}") from None
