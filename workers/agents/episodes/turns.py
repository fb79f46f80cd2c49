"""What an engine returns for one turn, and the rows and the episode that turns become. Plain data, without vLLM."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from troupe.workers.contract.config import StructuredConfig
from troupe.workers.contract.environments import OK, Message, Observation, parted
from troupe.workers.contract.rewards import Feedback


@dataclass(frozen=True)
class TurnLimits:
    """How one turn is sampled."""

    number: int
    """Its number in the episode; every turn has its own seed."""
    max_tokens: int
    stop: tuple[str, ...] = ()
    """Strings that end it, besides the spec's."""
    structured: StructuredConfig | None = None
    """Its form, instead of the spec's."""


@dataclass(frozen=True)
class SampledTurn:
    """The tokens that the policy sampled in one turn."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    """Log-probs of the sampled tokens, in nats."""
    versions: Sequence[dict[str, int]]
    """Spans `{version, start, end}` over the tokens of the turn."""
    finish_reason: str
    """`stop` or `length`."""
    kept: Sequence[bytes] = ()
    """The tokens that the sampler left to each one (`contract/kept_tokens.py`); none: they are not recorded."""
    likeliest: Sequence[bytes] = ()
    """The likeliest tokens at each one (`SAMPLER_TOKENS`), empty unless they are recorded."""
    routes: bytes | None = None
    """The experts of the prompt's and the turn's tokens (`contract/routes.py`), or None if they are not recorded."""
    problem: str = ""
    """Why it cannot be trained; empty: it can."""
    cached_tokens: int = 0
    """Tokens of the prompt that the engine read from its cache."""
    generate_s: float = 0.0
    first_token_s: float = 0.0
    text: str | None = None
    """Text of the turn of another model, which has no tokens; None if the policy sampled it."""


TurnReward = tuple[int, float, str]
"""(tokens up to the end of the turn, its reward, what the environment says of it)"""
SampleTurn = Callable[[Sequence[int], TurnLimits], Awaitable[SampledTurn]]
"""Samples the turn behind these tokens."""


class RecordedTurns:
    """The sampled turns of an episode until it is finished, so that it can be played again without sampling them.

    A turn is given again if its request is the same to the last token and limit: the turns of an environment that
    answers otherwise than before are sampled from there on.
    """

    def __init__(self, turns: Iterable[tuple[str, SampledTurn]] = ()) -> None:
        """`turns`: turns of an earlier play, each with the digest of its request."""
        self.by_request = dict(turns)
        """The turns by the digest of their request, in the order in which they were sampled."""

    async def sample(self, sample: SampleTurn, ids: Sequence[int], limits: TurnLimits) -> SampledTurn:
        """The recorded turn of this request, or one that `sample` samples, which is recorded then."""
        form = limits.structured and limits.structured.model_dump_json()
        own = repr((limits.number, limits.max_tokens, limits.stop, form)).encode()
        request = hashlib.blake2b(array("i", ids).tobytes() + own, digest_size=16).hexdigest()
        if request not in self.by_request:
            self.by_request[request] = await sample(ids, limits)
        return self.by_request[request]


@dataclass
class Segment:
    """A row of an episode: a prompt, then sampled and added tokens in turn, exactly as the engine saw them."""

    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    kept: list[bytes] = field(default_factory=list)
    """See `SampledTurn.kept`; added tokens have no words."""
    likeliest: list[bytes] = field(default_factory=list)
    """See `SampledTurn.likeliest`; added tokens have none."""
    routes: bytes | None = None
    """See `SampledTurn.routes`; of the last turn that was sampled."""
    versions: list[dict[str, int]] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)
    rewards: list[TurnReward] = field(default_factory=list)
    """Rewards of turns, each at the tokens of the response up to its turn."""

    def sampled(self, turn: SampledTurn) -> None:
        """Append a turn of the policy."""
        start = len(self.response_ids)
        self._append(list(turn.ids), list(turn.logprobs), True, "assistant", turn.kept)
        self.likeliest[start:] = turn.likeliest or [b""] * len(turn.ids)
        self.routes = turn.routes
        self.versions += [
            {"version": span["version"], "start": start + span["start"], "end": start + span["end"]}
            for span in turn.versions
        ]

    def added(self, ids: Sequence[int]) -> None:
        """Append tokens that were not sampled: they have no loss, and their log-prob is recorded as 0."""
        self._append(list(ids), [0.0] * len(ids), False, "environment")

    def _append(
        self, ids: list[int], logprobs: list[float], loss: bool, speaker: str, kept: Sequence[bytes] = ()
    ) -> None:
        start = len(self.response_ids)
        self.kept += kept or [b""] * len(ids)
        self.likeliest += [b""] * len(ids)
        self.response_ids += ids
        self.logprobs += logprobs
        self.loss_mask += [loss] * len(ids)
        if ids:
            self.turns.append({"name": speaker, "start": start, "end": start + len(ids)})

    @property
    def tokens(self) -> int:
        """Prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass
class Played:
    """A finished episode."""

    segments: list[Segment]
    """In the order of their last turns."""
    finish_reason: str = "stop"
    """`stop`: the environment ended it; `length`: out of the model's tokens; or one of `BUDGETS`."""
    status: str = OK
    response: str = ""
    """Text of the last turn."""
    messages: list[Message] = field(default_factory=list)
    """The whole conversation."""
    turns: list[SampledTurn] = field(default_factory=list)
    prompt_tokens: int = 0
    """Tokens of the prompts of all turns."""
    environment_s: float = 0.0
    cut_observations: int = 0
    compactions: int = 0
    """How often a conversation was compacted."""
    restarts: int = 0
    info: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    """The first note of each kind (`Observation.note`)."""
    sides: dict[str, Played] = field(default_factory=dict)
    """What each player of a game has seen and done, by name; none if the environment names no players."""

    def side(self, player: str | None) -> Played:
        """What a player has seen and done so far: the episode itself if the environment names no players."""
        return self if player is None else self.sides.setdefault(player, Played([]))

    def sample(self, player: str) -> Played:
        """The part of a player as an episode, with how the whole one ended."""
        return replace(
            self.side(player),
            finish_reason=self.finish_reason,
            status=self.status,
            environment_s=self.environment_s,
            restarts=self.restarts,
            info=self.info,
            notes=self.notes,
        )

    def outcome(self, player: str) -> float | None:
        """1 if the player has won, 0.5 in a draw and 0 if another one has won, or None without another player."""
        totals = {name: sum(reward for _, reward, _ in side.rewards) for name, side in self.sides.items()}
        others = [total for name, total in totals.items() if name != player]
        if not others:
            return None
        own, best = totals.get(player, 0.0), max(others)
        return 1.0 if own > best else 0.5 if own == best else 0.0

    @property
    def parts(self) -> list[Played]:
        """The episode itself and the parts of its players."""
        return [self, *self.sides.values()]

    @property
    def sampled_turns(self) -> int:
        return sum(len(part.turns) for part in self.parts)

    @property
    def sampled_tokens(self) -> int:
        return sum(len(turn.ids) for part in self.parts for turn in part.turns)

    @property
    def tokens(self) -> int:
        """Tokens of the rows of all players that have a turn."""
        return sum(row.tokens for part in self.parts for row in part.segments if row.response_ids)

    @property
    def rewards(self) -> list[TurnReward]:
        """Rewards of turns, each at the tokens of all segments' responses up to its turn."""
        starts = accumulate((len(segment.response_ids) for segment in self.segments), initial=0)
        rows = zip(starts, self.segments, strict=False)
        return [(start + end, reward, said) for start, segment in rows for end, reward, said in segment.rewards]

    def earn(self, reward: float | Feedback) -> None:
        """Record a reward of the last turn; without one, it is of a row without tokens."""
        self.segments = self.segments or [Segment([0])]
        row = self.segments[-1]
        row.rewards.append((len(row.response_ids), *parted(reward)))

    def hear(self, observation: Observation) -> None:
        """Keep what the environment reports besides messages."""
        self.info |= observation.info
        if observation.note:
            self.notes.setdefault(observation.note.partition(":")[0], observation.note)

    def record(self, segment: Segment, added: Sequence[int], turn: SampledTurn) -> None:
        """Append a turn to its row, behind what was added before it; the row is then the last one."""
        segment.added(added)
        segment.sampled(turn)
        self.turns.append(turn)
        self.segments = [*(other for other in self.segments if other is not segment), segment]
