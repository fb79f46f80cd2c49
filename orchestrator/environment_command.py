"""`troupe env`: commands for environments."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.errors import UsageError

if TYPE_CHECKING:
    from orchestrator.spec.rollout import RolloutSpec
    from workers.contract.config import ModelConfig

env_app = typer.Typer(no_args_is_help=True, help="Check environments.")


@env_app.command()
def check(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="YAML spec with a section roles.environment.")],
    say: Annotated[list[str], typer.Option("--say", help="Text of a turn; repeat for further turns.")] = [],  # noqa: B006
    episodes: Annotated[int, typer.Option(min=1, help="Episodes to play, each with a row of data.train.")] = 1,
    set_: Annotated[list[str], typer.Option("--set", metavar="FIELD=VALUE", help="Override a field of the spec.")] = [],  # noqa: B006
) -> None:
    """Play episodes without a model and print the conversation with its tokens and loss mask.

    With --say the policy's turns are these texts, and the last one is repeated; then it is played with random tokens.
    """
    from orchestrator.spec.stages import plan_runs, read_document

    planned = [run.spec for run in plan_runs(read_document(spec, set_))]
    for one in planned:
        # A stage's model may not be trained yet; its tokenizer is that of the first stage.
        model = one.model if Path(one.model.path).is_dir() else planned[0].model
        one.dispatch(lambda loaded, model=model: _check(loaded, model, say, episodes), lambda _: None)
    if not any(one.dispatch(lambda loaded: loaded.roles.environment is not None, lambda _: False) for one in planned):
        raise UsageError(f"{spec}: there is no roles.environment to check")


def _check(spec: RolloutSpec, model: ModelConfig, say: list[str], episodes: int) -> None:
    """Play the episodes of one spec and print them."""
    config = spec.environment_config()
    if config is None:
        return
    from orchestrator.data.prompts import load_pools
    from workers.data.chat import sample_seed
    from workers.data.tokenizer import load_chat_tokenizer
    from workers.engine.tool_calls import tool_parser
    from workers.episodes.check import Rehearsal, describe, rehearse
    from workers.episodes.reader import read_row

    pool, _ = load_pools(spec.data, spec.failures.on_bad_row, plain=spec.model.plain)
    try:
        tokenizer = load_chat_tokenizer(model)
        sizes = (spec.sampling.max_tokens, spec.roles.rollout.max_model_len)
        rehearsal = Rehearsal(config, tokenizer, *sizes, tool_parser(config.tool_parser, tokenizer))
        table = pool.table.slice(0, episodes).to_pylist()
        rows = [read_row(row, sample_seed(spec.seed, number)) for number, row in enumerate(table)]
        for name, said in ((f"{config.name}, turns as given", say), (f"{config.name}, turns of random tokens", [])):
            if said or not name.endswith("given"):
                for played in asyncio.run(rehearse(rehearsal, rows, said, spec.seed)):
                    typer.echo("\n".join([name, *describe(played, tokenizer)]))
    except ValueError as error:
        raise UsageError(str(error)) from error
