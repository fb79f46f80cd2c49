"""What a reward function returns: a number, or the steps of process rewards. Replies to the reward worker."""

from __future__ import annotations

import math
import reprlib
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Any

from troupe.workers.contract.rewards import Feedback
from troupe.workers.contract.text import LONGEST_LINE, one_line

Step = tuple[int, float]
"""(end of the step, its reward)"""
Reply = dict[str, Any]
"""``{"value"}``, for process rewards with ``"steps": [[end, reward], ...]``, with a text as ``"feedback"``; or
``{"failure", "cause"}``: why there is no number, and what failures of the same cause have in common."""
_SHIPPED = str(Path(__file__).parents[1])
_MACHINERY = (
    f"{_SHIPPED}/rewards/child.py",
    f"{_SHIPPED}/rewards/loading.py",
    f"{_SHIPPED}/agents/environments/child.py",
    __file__,
)
"""Files whose frames precede user code's in a traceback."""
_LONGEST = 1000
"""Characters of a failed program's line."""
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


class ProgramFailed(RuntimeError):
    """A program has failed; the message has its last lines."""


@dataclass(frozen=True)
class Steps:
    """Rewards of the steps of one response, which a reward function may return instead of a number.

    ``Steps([(17, 1.0), (42, 0.0)])`` rewards ``response[:17]`` with 1 and ``response[17:42]`` with 0.
    """

    rewards: Sequence[Step]
    """(end, reward) of every step, at least one. Ends are increasing character positions from 1 to ``len(response)``.
    An empty response has one step that ends at 0."""
    outcome: float | None = None
    """Value of the whole response, for the metrics and for a component without `process`, or None for the mean of the
    steps' rewards."""


def as_number(value: Any) -> float | None:
    """The value as a float: a real number, a bool, or a numpy or torch value without dimensions; else None. Raises
    OverflowError for an integer that no float can hold."""
    if not isinstance(value, Real) and getattr(value, "shape", None) == ():
        value = value.item()
    return float(value) if isinstance(value, Real) else None


def checked_steps(rewards: Iterable[object], length: int) -> tuple[Step, ...]:
    """The steps of a response of `length` characters, as plain numbers. Raises ValueError if there are no steps; a step
    is not a position and a finite number; or it does not end after the previous step and within the response."""
    steps: list[Step] = []
    earliest = min(1, length)
    for number, step in enumerate(rewards, 1):
        position, value = step if isinstance(step, Sequence) and len(step) == 2 else (None, None)
        reward = as_number(value)
        if reward is None or not isinstance(position, Integral):
            raise ValueError(f"step {number} is not (end, reward): {reprlib.repr(step)}")
        end = int(position)
        if not math.isfinite(reward):
            raise ValueError(f"the reward of step {number} is not a finite number: {reward}")
        if not earliest <= end <= length:
            raise ValueError(f"step {number} ends at {end}; expected {earliest} to {length}")
        steps.append((end, reward))
        earliest = end + 1
    if not steps:
        raise ValueError("there are no steps")
    return tuple(steps)


def parse_value(value: object, response: str) -> Reply:
    """Reply for the return value of a reward function: a finite real number, steps, either with feedback, or why it is
    none of them."""
    if isinstance(value, Feedback):
        if not isinstance(value.text, str):
            return failure("feedback that is not text", f"{reprlib.repr(value.text)} ({type(value.text).__name__})")
        reply = parse_value(value.reward, response)
        return reply if "failure" in reply else {**reply, "feedback": value.text}
    if isinstance(value, Steps):
        try:
            steps = checked_steps(value.rewards, len(response))
        except ValueError as error:
            return failure("not steps", str(error))
        outcome = fmean(reward for _, reward in steps) if value.outcome is None else value.outcome
        reply = parse_value(outcome, response)
        return reply if "failure" in reply else {**reply, "steps": steps}
    number = as_number(value)
    if number is None:
        return failure("not a number", f"{reprlib.repr(value)} ({type(value).__name__})")
    return {"value": number} if math.isfinite(number) else failure("not a finite number", str(number))


def parse_batch(values: Any, responses: Sequence[str]) -> list[Reply]:
    """Replies for the return value of a batched reward function: a list or an array with one result per response. None
    in the list fails its sample: the function has no result for it. A value that is no such list fails all samples."""
    if hasattr(values, "tolist"):  # an array of numpy or torch, or a column of pandas
        values = values.tolist()
    if not isinstance(values, list | tuple):
        return [failure("not a list", f"{reprlib.repr(values)} ({type(values).__name__})")] * len(responses)
    if len(values) != len(responses):
        return [failure("wrong length", f"{len(values)} results for {len(responses)} samples")] * len(responses)
    return [_parse_entry(value, response) for value, response in zip(values, responses, strict=True)]


def _parse_entry(value: object, response: str) -> Reply:
    if value is None:
        return failure("no result", "the function returned None for this sample")
    try:
        return parse_value(value, response)
    except Exception as error:  # one result must not cost the others theirs
        return describe(error)


def failure(cause: str, detail: str) -> Reply:
    """Reply for a sample without a number."""
    return {"failure": f"{cause}: {detail}", "cause": cause}


def describe(error: BaseException) -> Reply:
    """Reply for an exception: one line of about 300 characters that ends with the user's file and line.

    That of a program has its last lines as well.
    The cause of a shipped function's exception has no place: its message is enough.
    """
    try:
        text = one_line(str(error), _LONGEST if isinstance(error, ProgramFailed) else LONGEST_LINE)
    except Exception:
        text = "(its text cannot be shown)"
    kind = type(error).__name__
    line = f"error: {kind}" + (f": {text}" if text else "")
    if (place := user_place(error)) is None:
        return {"failure": line, "cause": kind}
    file, number = place
    return {"failure": f"{line} ({Path(file).name}:{number})", "cause": f"{kind} at {file}:{number}"}


class ErrorReplies:
    """Describes what user code raises, and prints one traceback for each cause: it is enough to find the fault."""

    def __init__(self) -> None:
        self._shown: set[str] = set()

    def describe(self, error: BaseException) -> Reply:
        reply = describe(error)
        if reply["cause"] not in self._shown:
            self._shown.add(reply["cause"])
            traceback.print_exception(type(error), error, user_traceback(error))
        return reply


def user_place(error: BaseException) -> tuple[str, int] | None:
    """File and line of the user's code that raised: the innermost that is in no library, else the function's own. None
    if the function is a shipped one, or if it was not reached."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(user_traceback(error))]
    if not frames or _within(frames[0][0], (_SHIPPED,)):
        return None
    own = [place for place in frames if not _within(place[0], (_SHIPPED, *_LIBRARIES))]
    if own:
        return own[-1]
    return None if any(_within(file, (_SHIPPED,)) for file, _ in frames) else frames[0]


def user_traceback(error: BaseException) -> TracebackType | None:
    """The part of the traceback that starts in the reward function; None if the function was not reached."""
    here = error.__traceback__
    while here is not None and here.tb_frame.f_code.co_filename in _MACHINERY:
        here = here.tb_next
    return here


def _within(file: str, folders: tuple[str, ...]) -> bool:
    """Whether a file is in one of the folders, or is no file (`<frozen importlib>`)."""
    return file.startswith("<") or any(file.startswith(f"{folder}/") for folder in folders)
