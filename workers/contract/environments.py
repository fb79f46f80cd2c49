"""What an environment and an episode say to each other. Plain data, which also crosses process boundaries as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from troupe.workers.contract.rewards import Feedback
from troupe.workers.contract.text import valid_json, valid_text

Message = dict[str, Any]
"""One message of a conversation: `role`, `content` (text), and for tools `tool_calls`, `tool_call_id` and `name`."""

CALL_MARKERS = (
    *("<tool_call", "<|tool_call", "<｜tool▁call", ":tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<function="),
    *("<function_call>", "<start_function_call>", "<|action_start|>", "<｜DSML｜", "functools["),
)
"""Text with which models begin a call. A turn with one of them and no call that the parser could read is malformed."""

TOOLS, CALLS, RESULTS = "tools", "tool calls in the history", "tool messages (the results of calls)"
"""What a chat template can leave out without an error (`troupe.workers.data.template_forms`)."""

ASSISTANT, USER = "assistant", "user"
"""The players of the environment user_simulator, and the roles of their messages."""

HARBOR_TURNS = 20
"""Turns of the environment harbor before a task's tests run, unless its arguments say another number."""


@dataclass(frozen=True)
class BuiltIn:
    """What follows from the name of a built-in environment."""

    home: str
    """`module:Class` in `workers/agents/environments/`."""
    needs_arguments: bool = False
    tasks: tuple[str, ...] = ()
    """If it has tasks itself, the columns of the rows that name one."""
    reads_answer: bool = False
    """Whether it compares with the answer of the data."""
    offers_tools: bool = False
    """Whether calls of its tools are parsed, and `offered` in its module returns what it adds to prompts."""
    runs_agent: bool = False
    """Whether what it runs keeps the conversation itself."""
    has_players: bool = False
    """Whether it may have several players."""
    gives_feedback: bool = False
    """Whether a text may come with its rewards even if no function of the user scores them."""


ENVIRONMENTS: Mapping[str, BuiltIn] = {
    "agent": BuiltIn("agent:Agent", needs_arguments=True, runs_agent=True),
    "guess_number": BuiltIn("basic:GuessNumber"),
    "gymnasium": BuiltIn("gymnasium:Gymnasium", needs_arguments=True, tasks=("seed",)),
    "harbor": BuiltIn("harbor:Harbor", needs_arguments=True, tasks=("task",), offers_tools=True),
    "openenv": BuiltIn("openenv:OpenEnv", needs_arguments=True),
    "retry": BuiltIn("basic:Retry", reads_answer=True),
    "single_turn": BuiltIn("basic:SingleTurn", reads_answer=True),
    "textarena": BuiltIn(
        "textarena:TextArena", needs_arguments=True, tasks=("seed",), has_players=True, gives_feedback=True
    ),
    "tools": BuiltIn("tools:Tools", reads_answer=True, offers_tools=True),
    "user_simulator": BuiltIn(
        "user_simulator:UserSimulator", needs_arguments=True, has_players=True, gives_feedback=True
    ),
    "verifiers": BuiltIn("verifiers:Verifiers", needs_arguments=True, tasks=("index", "task"), runs_agent=True),
}
"""The built-in environments by name."""

OK = "ok"
"""Status of an episode that came to its end."""
_LAST_TURN = "; the last turn: "
_NOTE_CHARS = 500
_FLAGS = ("done", "restart", "refusable", "logprobs", "raw", "counted")


@dataclass(frozen=True)
class Row:
    """One row of the data, as an environment sees it."""

    messages: tuple[Message, ...]
    """The prompt."""
    answer: str = ""
    """The correct answer, in the form of the data; empty if there is no answer."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Further columns."""
    seed: int = 0
    """Seed of this episode, the same in every run of a spec; use it for everything random."""


@dataclass(frozen=True)
class Observation:
    """What an environment answers."""

    messages: Sequence[Message] = ()
    """Messages to add to the conversation."""
    reward: float | Feedback | None = None
    """Reward of the policy's last turn, or None. It counts from the last token that the policy sampled. The texts of
    an episode's turns with `Feedback` are the sample's, each on a line."""
    rewards: Mapping[str, float | Feedback] = field(default_factory=dict)
    """In a game of several players, the rewards of players by name, each of the player's last turn."""
    done: bool = False
    """Whether the episode ends here. The messages of the last observation are recorded and not shown to the policy."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """Tools that the chat template offers, as JSON schemas of functions; read at the beginning of a conversation."""
    player: str | None = None
    """In a game of several players (`roles.environment.players`), whose turn follows. `messages` continue what this
    player has seen, or begin it."""
    restart: bool = False
    """Whether `messages` are a separate conversation, instead of continuing the one so far. The sample then has
    one more row, with its own prompt."""
    conversation: str = ""
    """Name of the conversation that `messages` continue, or begin if it is new. Conversations of several names can
    alternate, or be sampled at the same time (`also`): each has a row of the sample."""
    stop: Sequence[str] = ()
    """Strings that end the next turn, besides `sampling.stop`."""
    max_tokens: int | None = None
    """Longest next turn, if shorter than `sampling.max_tokens`."""
    structured: Mapping[str, Any] | None = None
    """Form of the next turn: a field of `sampling.structured`, such as `{"regex": "yes|no"}`. The algorithm must
    correct for the sampler (`algorithm.importance.mode`), and `sampling.structured` must not be set."""
    logprobs: bool = False
    """Whether the message of the next step has `logprobs`: for every token of the turn its text and the log-prob that
    it was sampled with, in nats."""
    raw: bool = False
    """Whether `messages` are the prompt itself, without the chat template: their `content` as it is, special tokens
    included, or their `token_ids`. The message of the next step has `token_ids`. A conversation stays in one form."""
    counted: bool = False
    """Whether only the tokens of the prompt are counted: no turn is sampled, and the message of the next step has
    `usage` alone. The conversation must be a new one."""
    also: Sequence[Observation] = ()
    """Separate conversations whose responses are sampled at the same time as the next turn. Read of each are
    `messages`, `tools`, `stop`, `max_tokens`, `structured`, `logprobs`, `refusable`, `raw`, `counted`, `player`, and
    `conversation` with `restart`.
    The message of the next step has their responses as `also`, in this order (fewer if the turns have run out), and the
    sample has a row for each conversation."""
    refusable: bool = False
    """Whether `messages` are a request that may be refused. If the prompt has no room in the model, or the form
    cannot be used, the message of the next step then has `refused` (`code` and `message`), and the environment
    continues with a separate conversation; other episodes end there. If more requests wait than turns are left, the
    episode ends at once."""
    note: str = ""
    """What the user should know of this answer. The first one of each kind, which is the text before its first colon,
    is logged."""
    info: Mapping[str, float] = field(default_factory=dict)
    """Numbers for the metrics: their means are reported as `environment/NAME`."""


@dataclass(frozen=True)
class EpisodeReply:
    """Answer of an environment worker."""

    observation: Observation
    status: str = OK
    """`ok`, or why the episode has failed."""


class EnvironmentGone(RuntimeError):
    """The worker that held the episode has died, or was replaced: the episode starts again on another one."""


def failed_status(turns: int, reason: str, last_turn: str) -> str:
    """Status of an episode that failed after so many turns of the policy; the last one is shown in part."""
    status = f"environment: turn {turns}: {reason}" + (f"{_LAST_TURN}{last_turn[:200]!r}" if turns else "")
    return valid_text(status)


def cause_of(status: str) -> str:
    """What statuses of the same cause have in common: the reason, without the turn and its text."""
    if not status.startswith("environment: "):
        return status
    return "environment: " + status.partition(_LAST_TURN)[0].split(": ", 2)[-1]


def dropped_note(dropped: Sequence[str]) -> str:
    """What it means that a chat template leaves these out, as a line; empty if it leaves out none."""
    if not dropped:
        return ""
    return (
        f"the chat template does not render {', '.join(dropped)}: the policy does not see them. Set "
        "model.chat_template to a template that does, or describe the tools in the system message (args.system of the "
        "environment tools) and answer with messages of the role user"
    )


def cut(text: str, longest: int) -> str:
    """The text, cut at so many characters, with how many are missing."""
    missing = len(text) - longest
    return text if missing <= 0 else f"{text[:longest]}\n[... {missing:,} characters cut]"


def failed(status: str) -> EpisodeReply:
    """The reply for an episode that has failed."""
    return EpisodeReply(Observation(done=True), status)


def read_observation(value: Any) -> Observation:
    """An observation from what an environment returned, or from its JSON. Texts that are not valid (a policy can write
    half a character, and tools return it) keep their escapes. Raises TypeError or ValueError if it is not an
    observation; the message names the field."""
    if isinstance(value, Observation):
        value = vars(value)
    if not isinstance(value, Mapping):
        raise TypeError(f"expected an Observation, got {type(value).__name__}")
    reward = value.get("reward")
    given = dict(value.get("rewards") or {})
    rewards = {valid_text(str(player)): _reward(f"rewards.{player}", one) for player, one in given.items()}
    player = value.get("player")
    if player is not None and (not isinstance(player, str) or not player):
        raise TypeError(f"player: expected a name, got {player!r:.40}")
    info = {valid_text(str(name)): float(number) for name, number in dict(value.get("info") or {}).items()}
    longest = value.get("max_tokens")
    if longest is not None and (isinstance(longest, bool) or not isinstance(longest, int) or longest < 1):
        raise ValueError(f"max_tokens: expected a positive integer, got {longest!r}")
    also = tuple(_conversation(number, one) for number, one in enumerate(value.get("also") or ()))
    own = [(player, _name_of(value)), *((one.player, one.conversation) for one in also)]
    names = [tuple(filter(None, pair)) for pair in own if any(pair)]
    if len(set(names)) < len(names):
        together = ", ".join(map(" ".join, names))
        raise ValueError(f"also: two turns of one conversation at the same time: {together}")
    return Observation(
        messages=tuple(_message(number, message) for number, message in enumerate(value.get("messages") or ())),
        reward=None if reward is None else _reward("reward", reward),
        rewards=rewards,
        player=player,
        tools=read_tools(value.get("tools")),
        conversation=_name_of(value),
        stop=read_stop(value.get("stop") or ()),
        max_tokens=longest,
        also=also,
        structured=read_form(value.get("structured")),
        note=valid_text(str(value.get("note") or ""))[:_NOTE_CHARS],
        info=info,
        **{name: bool(value.get(name, False)) for name in _FLAGS},
    )


def _conversation(number: int, value: Any) -> Observation:
    try:
        read = read_observation(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"also.{number}.{error}") from None
    if not read.messages:
        raise ValueError(f"also.{number}.messages: there are none")
    separate = read.restart or not (read.conversation or read.player)
    return replace(read, reward=None, rewards={}, done=False, restart=separate, also=(), info={})


def _reward(place: str, value: Any) -> float | Feedback:
    """A finite reward, with its text if that is not empty."""
    match value:
        case Feedback(reward, str() as text) | {"reward": reward, "text": str() as text}:
            number = _finite(place, reward)
            return with_text(number, valid_text(text))
        case Feedback(_, text):
            raise TypeError(f"{place}: feedback that is not text: {type(text).__name__}")
        case _:
            return _finite(place, value)


def with_text(reward: float, text: str) -> float | Feedback:
    """A reward with what is said of it, if anything is."""
    return Feedback(reward, text) if text else reward


def parted(reward: float | Feedback) -> tuple[float, str]:
    """The number of a reward, and its text, which is empty without feedback."""
    return (reward.reward, reward.text) if isinstance(reward, Feedback) else (reward, "")


def _finite(place: str, value: Any) -> float:
    try:
        number = float(value)
    except TypeError:
        raise TypeError(f"{place}: expected a number, got {type(value).__name__}") from None
    if not math.isfinite(number):
        raise ValueError(f"{place}: not a finite number: {number}")
    return number


def _name_of(value: Mapping[str, Any]) -> str:
    name = value.get("conversation", "")
    if not isinstance(name, str):
        raise TypeError(f"conversation: expected a name, got {type(name).__name__}")
    return valid_text(name)


def _message(number: int, message: Any) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise TypeError(f"messages.{number}: expected a message with a role, got {type(message).__name__}")
    content = message_text(message.get("content"), f"messages.{number}.content")
    return valid_json({**message, "content": content})


def message_text(content: Any, place: str) -> str:
    """The text of a message's content: text, parts of type `text`, or None. Raises TypeError, ValueError."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence) or not all(isinstance(part, Mapping) for part in content):
        raise TypeError(f"{place}: expected text or a list of parts with a type, got {type(content).__name__}")
    if wrong := [part.get("type") for part in content if part.get("type") != "text"]:
        raise ValueError(f"{place}: parts of type {wrong[0]} are not supported, only text")
    texts = [part.get("text") for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(f"{place}: expected text in each part")
    return "".join(map(str, texts))


def read_tools(tools: Any) -> tuple[dict[str, Any], ...] | None:
    """Tools as JSON schemas of functions, the only kind that chat templates and parsers have, or None if none are
    given. Raises TypeError or ValueError if they are something else; the message names the field."""
    if tools is None:
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise TypeError(f"tools: expected a list of JSON schemas, got {type(tools).__name__}")
    for number, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise TypeError(f"tools.{number}: expected the JSON schema of a function, got {type(tool).__name__}")
        if (kind := tool.get("type", "function")) != "function":
            raise ValueError(f"tools.{number}.type: expected function, got {kind!r:.40}")
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise TypeError(f"tools.{number}.function: expected an object with a name")
        if not isinstance(function.get("description"), str | None):
            raise TypeError(f"tools.{number}.function.description: expected text")
        if not isinstance(function.get("parameters"), Mapping | None):
            raise TypeError(f"tools.{number}.function.parameters: expected a JSON schema")
    return tuple(valid_json(tools))


def read_form(form: Any) -> dict[str, Any] | None:
    """The form of a turn, or None for any text. Raises ValueError for something else."""
    if form is None:
        return None
    # Not at the import of this module: an environment's process starts in a third of the time without pydantic.
    from pydantic import ValidationError

    from troupe.workers.contract.config import StructuredConfig
    from troupe.workers.contract.config_base import first_problem

    try:
        return valid_json(StructuredConfig.model_validate(form).model_dump(exclude_none=True))
    except ValidationError as error:
        raise ValueError(f"structured: {first_problem(error)}") from error


def read_stop(stop: Any) -> tuple[str, ...]:
    """Strings that end a turn. Raises TypeError or ValueError for something else."""
    if not isinstance(stop, Sequence) or isinstance(stop, str) or not all(isinstance(text, str) for text in stop):
        raise TypeError(f"stop: expected a list of texts, got {stop!r:.40}")
    if "" in stop:
        raise ValueError("stop: a text is empty")
    return tuple(map(valid_text, stop))
