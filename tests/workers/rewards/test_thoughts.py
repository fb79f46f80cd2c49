"""Reward functions learn that the chat template opens the thought, also those inside environments."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest
from transformers import AddedToken

from tests.fakes import fake_spec
from tests.tokenizers import new_tokenizer
from troupe.orchestrator.roles.table import ROLES
from troupe.workers.agents.environments import base
from troupe.workers.agents.episodes.conversation import TurnReader
from troupe.workers.contract.config import EnvironmentConfig
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.environments import Row
from troupe.workers.contract.imports import import_attribute
from troupe.workers.contract.messages import GroupRequest
from troupe.workers.contract.reward_config import RewardFunctionConfig
from troupe.workers.contract.rewards import SHIPPED
from troupe.workers.engine.rows import RowBuilder
from troupe.workers.environment import EnvironmentWorker
from troupe.workers.rewards.loading import locate
from troupe.workers.rewards.thoughts import environment_with_opened_thoughts, with_opened_thoughts

ROW = Row(({"role": "user", "content": "2+3?"},), "5")
TOOLS = ["calculator"]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def thinking(tiny_model: Path, tmp_path: Path) -> ModelConfig:
    """A model whose chat template opens the thought."""
    template = tmp_path / "thinking.jinja"
    template.write_text(TEMPLATE + "{% if add_generation_prompt %}<think>\n{% endif %}")
    return ModelConfig(path=str(tiny_model), chat_template=str(template))


@pytest.mark.parametrize("name", SHIPPED)
def test_every_function_that_has_to_know_is_told(name: str, thinking: ModelConfig) -> None:
    takes = "opens_thought" in inspect.signature(import_attribute(name, *locate(name))).parameters
    told = with_opened_thoughts(RewardFunctionConfig(name=name), thinking)
    assert told.args == ({"opens_thought": True} if takes else {})


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("retry", {"attempts": 1}),
        ("retry", {"attempts": 1, "function": "numeric", "args": {}}),
        ("tools", {"tools": TOOLS, "function": "numeric"}),
        ("tools", {"tools": TOOLS, "function": "last_number", "args": None}),
    ],
)
def test_an_environment_does_not_reward_a_cut_thought(name: str, args: dict[str, Any], thinking: ModelConfig) -> None:
    async def reward(response: str, args: dict[str, Any], finish_reason: str = "stop") -> float | None:
        environment: Any = base.load(name, args)()
        begun = environment.start(ROW)
        await begun if inspect.isawaitable(begun) else begun
        ended = await environment.step({"role": "assistant", "content": response, "finish_reason": finish_reason})
        return ended.reward

    worker = EnvironmentWorker(EnvironmentConfig(name=name, args=args), "environment-0", thinking)
    given: Any = worker._processes._order["args"]
    assert asyncio.run(reward("so it may be 5", given)) == 0.0
    assert not asyncio.run(reward("so it may be 5", given, "length"))
    assert asyncio.run(reward("so it may be 4</think>5", given)) == 1.0
    assert asyncio.run(reward("so it is 5", args)) == 1.0


def test_an_environment_whose_reward_has_nothing_to_know_keeps_its_arguments(thinking: ModelConfig) -> None:
    for name, args in [
        ("retry", {"function": "regex"}),
        ("retry", {"args": {"opens_thought": False}}),
        ("tools", {"tools": TOOLS}),
        ("single_turn", {}),
        ("own.module:Game", {"function": "numeric"}),
    ]:
        config = EnvironmentConfig(name=name, args=args)
        assert environment_with_opened_thoughts(config, thinking) is config
    config = EnvironmentConfig(name="retry")
    assert environment_with_opened_thoughts(config, ModelConfig(path=thinking.path)) is config


def test_environment_workers_know_the_policy() -> None:
    spec = fake_spec(roles={"environment": {"name": "retry"}})
    settings: Any = ROLES["environment"].settings(spec)
    assert settings["environment"].extra == (spec.model,)


def test_a_row_and_a_turn_show_the_tags_of_thoughts_that_are_special_tokens(tiny_model: Path) -> None:
    tokenizer = new_tokenizer(tiny_model)
    tokenizer.add_tokens([AddedToken(tag, special=True, normalized=False) for tag in ("[THINK]", "[/THINK]")])
    ids = tokenizer("[THINK]2 or 3[/THINK]7<|im_end|>", add_special_tokens=False)["input_ids"]
    request = GroupRequest(prompt_uid="p", row=0, attempt=0, samples=1, seed=0)
    prompt = {"messages": "[]", "answer": "7", "metadata": "{}", "source": None}
    row = RowBuilder("rollout-0", tokenizer, request, prompt, [1]).candidate(0, ids)
    message, _ = TurnReader(tokenizer).read(ids, None, cut=False)
    assert row["response"] == message["content"] == "[THINK]2 or 3[/THINK]7"
