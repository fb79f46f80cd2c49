"""Whether the chat template of the policy opens the thought of every response."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from troupe.workers.contract.config import EnvironmentConfig
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.reward_config import RewardFunctionConfig
from troupe.workers.rewards.answer_text import has_thought, in_thought

OPENS_THOUGHT = "opens_thought"
"""Argument of the reward functions that have to know."""
VOTES = "troupe.workers.rewards.numeric:answer_classes"
"""Function that finds the samples of a group that give the same answer."""
_FUNCTIONS = ("choice", "exact_match", "last_number", "numeric", "python_tests", "reasoning_gym", VOTES)
_ENVIRONMENTS = {"retry": "last_number", "tools": None}
"""Built-in environments that score answers with a reward function (their arguments `function` and `args`), and the
function that they take by default."""
_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")


def with_opened_thoughts(function: RewardFunctionConfig, policy: ModelConfig | None) -> RewardFunctionConfig:
    """The function with `opens_thought`, if it has that argument, does not set it and the template opens thoughts.
    Raises OSError or ValueError if the policy's tokenizer cannot be loaded."""
    if policy is None or not _has_to_know(function.name, function.args) or not template_opens_thought(policy):
        return function
    return function.model_copy(update={"args": {**function.args, OPENS_THOUGHT: True}})


def environment_with_opened_thoughts(environment: EnvironmentConfig, policy: ModelConfig | None) -> EnvironmentConfig:
    """As `with_opened_thoughts`, for the reward function of a built-in environment."""
    if policy is None or environment.name not in _ENVIRONMENTS:
        return environment
    function = environment.args.get("function", _ENVIRONMENTS[environment.name])
    args = environment.args.get("args") or {}
    if not isinstance(args, dict) or not _has_to_know(function, args) or not template_opens_thought(policy):
        return environment
    return environment.model_copy(update={"args": {**environment.args, "args": {**args, OPENS_THOUGHT: True}}})


def _has_to_know(function: Any, args: Mapping[str, Any]) -> bool:
    return function in _FUNCTIONS and OPENS_THOUGHT not in args


def template_opens_thought(model: ModelConfig) -> bool:
    """Whether what the chat template writes before a response opens a thought. The tokenizer, whose library takes
    seconds to import, is loaded only if the template has the tag of a thought."""
    if model.plain or not any(has_thought(text) for text in _templates(model)):
        return False
    from troupe.workers.data.tokenizer import load_chat_tokenizer

    messages = [{"role": "user", "content": "?"}]
    prompt = load_chat_tokenizer(model).apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return in_thought(str(prompt))


def _templates(model: ModelConfig) -> list[str]:
    """The texts of the files that a chat template can stand in."""
    files = [Path(model.path) / name for name in _FILES] if model.chat_template is None else [Path(model.chat_template)]
    return [file.read_text(errors="replace") for file in files if file.is_file()]
