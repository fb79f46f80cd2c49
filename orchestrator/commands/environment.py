"""`troupe env`: commands for environments."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from troupe.orchestrator.commands.options import JsonOption, echo_json
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
    as_json: JsonOption = False,
) -> None:
    """Play episodes in each environment without a model and print the conversations with their tokens and loss masks.

    With --say the policy's turns are these texts, and the last one is repeated; then it is played with random tokens.
    """
    from troupe.orchestrator.spec.load import plan_runs, read_document

    planned = [run.spec for run in plan_runs(read_document(spec, set_))]
    played: list[dict[str, Any]] = []
    for one in planned:
        # A stage's model may not be trained yet; its tokenizer is the first stage's.
        model = one.model if Path(one.model.path).is_dir() else planned[0].model
        if one.rollouts is not None:
            found = _play(one.rollouts, model, say, episodes)
            if not as_json:
                for episode in found:
                    typer.echo("\n".join(episode["lines"]))
            played += found
    if not any(one.rollouts is not None and one.rollouts.roles.environments() for one in planned):
        raise UsageError(f"{spec}: there is no roles.environment to check")
    if as_json:
        echo_json([{name: value for name, value in episode.items() if name != "lines"} for episode in played])


def _play(spec: RolloutSpec, model: ModelConfig, say: list[str], episodes: int) -> list[dict[str, Any]]:
    """Play the episodes of one spec, in each of its environments; none without an environment."""
    environments = spec.roles.environments()
    if not environments:
        return []
    from troupe.orchestrator.data.mixture import group_settings
    from troupe.orchestrator.data.prompts import load_train_pool
    from troupe.workers.contract.config import EnvironmentConfig

    pool = load_train_pool(spec.data, spec.failures.on_bad_row, plain=spec.model.plain)
    settings, played = group_settings(spec, pool), list[dict[str, Any]]()
    for name, role in environments.items():
        rows = list(islice((row for row in range(pool.rows) if settings[row].environment == name), episodes))
        found = _episodes(spec, model, role.part(EnvironmentConfig), pool.table.take(rows), say) if rows else []
        if name:
            heading = f"# roles.environment.{name}" + ("" if rows else ": no source of data.train plays in it")
            found = [{"environment": name, **one} for one in found] or [{"environment": name, "lines": []}]
            found[0]["lines"] = [heading, *found[0]["lines"]]
        played += found
    return played


def _episodes(
    spec: RolloutSpec, model: ModelConfig, config: EnvironmentConfig, rows: pa.Table, say: list[str]
) -> list[dict[str, Any]]:
    """Play an episode in an environment with each of these rows of a PROMPTS table."""
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
    timeout_s = _START_S + len(rows) * 2 * config.episode_timeout_s
    try:
        return ask("troupe.workers.engine.episode_check:report", request, timeout_s)
    except ProbeFailed as error:
        raise UsageError(error.raised or f"the check failed: {error}") from None
