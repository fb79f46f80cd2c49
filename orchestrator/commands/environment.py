"""`troupe env`: commands for environments."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from troupe.orchestrator.commands.options import JsonOption, echo_json
from troupe.orchestrator.errors import UsageError

if TYPE_CHECKING:
    from troupe.orchestrator.spec.rollout import RolloutSpec
    from troupe.workers.contract.config import ModelConfig

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
    """Play episodes without a model and print the conversation with its tokens and loss mask.

    With --say the policy's turns are these texts, and the last one is repeated; then it is played with random tokens.
    """
    from troupe.orchestrator.spec.load import plan_runs, read_document

    planned = [run.spec for run in plan_runs(read_document(spec, set_))]
    played: list[dict[str, Any]] = []
    for one in planned:
        # A stage's model may not be trained yet; its tokenizer is that of the first stage.
        model = one.model if Path(one.model.path).is_dir() else planned[0].model
        if one.rollouts is not None:
            found = _play(one.rollouts, model, say, episodes)
            if not as_json:
                for episode in found:
                    typer.echo("\n".join(episode["lines"]))
            played += found
    if not any("environment" in one.roles.present() for one in planned):
        raise UsageError(f"{spec}: there is no roles.environment to check")
    if as_json:
        echo_json([{name: value for name, value in episode.items() if name != "lines"} for episode in played])


def _play(spec: RolloutSpec, model: ModelConfig, say: list[str], episodes: int) -> list[dict[str, Any]]:
    """Play the episodes of one spec; none without an environment."""
    config = spec.environment_config()
    if config is None:
        return []
    from troupe.orchestrator.data.mixture import group_settings
    from troupe.orchestrator.data.prompts import load_train_pool
    from troupe.workers.isolation.probe import ProbeFailed, ask

    pool = load_train_pool(spec.data, spec.failures.on_bad_row, plain=spec.model.plain)
    settings = group_settings(spec, pool)
    rows = list(islice((row for row in range(pool.rows) if settings[row].episodes), episodes))
    request = {
        "config": config.model_dump(),
        "model": model.model_dump(),
        "max_tokens": spec.sampling.max_tokens,
        "max_model_len": spec.roles.rollout.max_model_len,
        "rows": pool.table.take(rows).select(["messages", "answer", "metadata"]).to_pylist(),
        "said": say,
        "seed": spec.seed,
    }
    timeout_s = _START_S + episodes * 2 * config.episode_timeout_s
    try:
        return ask("troupe.workers.engine.episode_check:report", request, timeout_s)
    except ProbeFailed as error:
        raise UsageError(error.raised or f"the check failed: {error}") from None
