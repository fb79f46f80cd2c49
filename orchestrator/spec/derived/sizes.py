"""Sizes and durations that follow from a spec: lengths, batches, the load of engines, probes."""

from __future__ import annotations

from typing import NamedTuple

from troupe.orchestrator.algorithms import section as algorithms
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.derived.sampling import group_settings, held_out_sets, reward_functions
from troupe.orchestrator.spec.offline import OfflineSpec
from troupe.orchestrator.spec.rollout import RolloutSpec

_KEPT_BYTES = 1024
"""Room for the tokens that the sampler left to one token: 256 of them, more than most distributions have on average."""
_NEW_PROCESS_S = 10.0
"""Start of the process of a reward function, with room for what the function imports."""


class PromptRoom(NamedTuple):
    """Tokens that a prompt may have."""

    tokens: int
    field: str
    """The field that sets the limit."""
    words: str
    """The limit as the subject of a relative clause: "more than the N tokens that WORDS"."""
    environment: str | None = None
    """Name of the environment that episodes begin in with the prompt, or None without episodes."""


def prompt_room(spec: RunSpec, section: str) -> PromptRoom:
    """Tokens that a prompt of this section (`train.0` of a mixture) may have, after reserving a response. A turn of
    an episode needs one token: it may have what the conversation leaves."""
    if (offline := spec.offline) is not None:
        words = f"data.max_length {offline.data.max_length} allows for prompt and response"
        return PromptRoom(offline.data.max_length, "data.max_length", words)
    rollouts: RolloutSpec = spec.rollouts
    sources = zip(rollouts.data.train_sources(), group_settings(rollouts), strict=True)
    lengths = {name: (own.environment, own.max_tokens, f"data.{name}") for name, own in sources}
    for one in held_out_sets(rollouts):
        lengths[one.section] = one.environment, one.sampling.max_tokens, "evaluation"
    environment, response, where = lengths.get(section.partition(" ")[0], (None, None, ""))
    longest, field = rollouts.roles.rollout.max_model_len, "roles.rollout.max_model_len"
    if environment is not None:
        return PromptRoom(longest - 1, field, f"{field} {longest} leaves beside a turn of one token", environment)
    beside = f"a response of {response} in {where}"
    if response is None:
        response = rollouts.sampling.max_tokens
        beside = f"sampling.max_tokens {response}"
    return PromptRoom(longest - response, field, f"{field} {longest} leaves beside {beside}")


def sequence_lengths(spec: RunSpec) -> dict[str, int]:
    """Every limit on the length of a sequence in tokens, by the dotted path of its field."""
    if (offline := spec.offline) is not None:
        return {"data.max_length": offline.data.max_length}
    rollouts: RolloutSpec = spec.rollouts
    lengths = {"roles.rollout.max_model_len": rollouts.roles.rollout.max_model_len}
    texts = rollouts.data.text_sources().items()
    return lengths | {f"data.{section}.max_tokens": source.max_tokens for section, source in texts}


def longest_sequence(spec: RunSpec) -> int:
    """Length of the longest sequence that is trained on, in tokens."""
    return max(sequence_lengths(spec).values())


def batch_description(spec: RunSpec) -> str:
    """Size of a step's batch, as text: `128 samples`."""
    if (offline := spec.offline) is not None:
        return f"{offline.schedule.examples_per_step} examples"
    rollouts: RolloutSpec = spec.rollouts
    return f"{'at most ' if len(rollouts.group_sizes) > 1 else ''}{rollouts.samples_per_step} samples"


def batch_bytes(spec: RunSpec) -> int:
    """Most bytes of the object store that the tables of one step and of steps in progress take."""
    return _rollout_bytes(spec.rollouts) if spec.offline is None else _example_bytes(spec.offline)


def _example_bytes(spec: OfflineSpec) -> int:
    """Bytes of ids, masks, log-probs and a teacher's tokens of at most two answers, pair by pair (EXAMPLE_BATCH)."""
    token = 16 + 8 * spec.algorithm.distillation.stored_k
    return 2 * spec.schedule.examples_per_step * spec.data.max_length * token


def _rollout_bytes(spec: RolloutSpec) -> int:
    """Bytes of prompts and responses at their longest: ROLLOUTS (ids, text of about 4 bytes per token, log-probs,
    masks, kept tokens) for every step in progress; scores and TRAIN once."""
    response = spec.sampling.max_tokens
    prompt = max(1, spec.roles.rollout.max_model_len - response)
    left = min(4 * spec.sampling.top_k or _KEPT_BYTES, _KEPT_BYTES) if spec.sampling.truncates else 0
    left += 8 * algorithms.policy_loss(spec.algorithm).recorded_top_k
    rollouts = spec.sequences_per_step * (prompt * (4 + 4) + response * (4 + 4 + 4 + 1 / 8 + left))
    teachers = max(1, len(spec.roles.teachers()))
    teacher = 2 * 8 * teachers * algorithms.policy_loss(spec.algorithm).distill.stored_k
    train = spec.sequences_per_step * (prompt * 4 + response * (4 + 1 / 8 + 3 * 4 + 6 * 4 + left + teacher))
    return int(rollouts * (1 + spec.schedule.max_staleness) + train)


def engine_load(spec: RolloutSpec) -> int:
    """Most unfinished samples of one engine: two groups can queue in a full engine and take places that free up.
    Episodes that wait for their environment take none: an engine gets as many groups as episodes."""
    episodes = sum(one.workers * one.episodes for one in spec.roles.environments().values())
    episodes = -(-episodes // spec.roles.rollout.workers)
    largest = max(spec.group_sizes)
    return max(spec.roles.rollout.max_num_seqs, largest, episodes) + 2 * largest


def group_scoring_s(spec: RolloutSpec) -> float:
    """Longest time to score a group: every sample may take its function's timeout, then it gets a new process."""
    functions = [function for one in reward_functions(spec).values() for function in one]
    slowest = max((function.timeout_s for function in functions), default=0.0)
    largest = max([*spec.group_sizes, *(one.sampling.samples for one in held_out_sets(spec))])
    return max(spec.schedule.score_timeout_s, largest * (slowest + _NEW_PROCESS_S))


def probe_interval_s(spec: RunSpec) -> float:
    """Seconds between two rounds of health probes of the workers besides the trainers."""
    return spec.schedule.step_timeout_s if spec.rollouts is None else spec.rollouts.failures.health_interval_s
