"""Tries built-in reward functions and levels of tasks before a first run; runs in child processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

from troupe.workers.contract.model_files import check_model_files
from troupe.workers.contract.rewards import is_solved
from troupe.workers.rewards.answer_text import in_thought
from troupe.workers.rewards.loading import load

_SEED = 20_011
"""Seed of the tried tasks, which differ from the run's."""

_NONSENSE = "I do not know."
_BY_CHANCE = {"the answer of another row": 0.15, "an empty response": 0.0, "nonsense": 0.0, "the prompt": 0.5}
"""Wrong responses, and the part of the prompts at which they may happen to be right."""
_WRONG = 50
"""Prompts whose wrong responses are tried."""


def count_earned(request: dict[str, Any]) -> Iterator[tuple[str, int, str]]:
    """What each of several functions gives right and wrong responses, up to the first that tells them apart.

    Args:
        request: `functions` by name, `answers` (the right ones of each prompt), `prompts`, and `enough`, a part.

    Yields:
        The function, the number of right answers that earn 1, and a kind of wrong responses that does, or "".
    """
    answers: list[list[str]] = request["answers"]
    for name in request["functions"]:
        function = load(name, {})
        earned = sum(_earns(function, right[0], right) for right in answers)
        paid = paid_wrong(
            answers, request["prompts"], lambda said, number, f=function: _earns(f, said, answers[number])
        )
        yield name, earned, paid
        if earned >= request["enough"] * len(answers) and not paid:
            return


def paid_wrong(right: Sequence[Sequence[str]], prompts: Sequence[str], earns: Callable[[str, int], bool]) -> str:
    """A kind of wrong responses to the first prompts that earns 1 more often than by chance; empty if none does."""
    given = list(enumerate(right[:_WRONG]))
    others = [next((one[0] for one in chain(right[n:], right) if one and one[0] not in own), "") for n, own in given]
    wrong = (others, [""] * len(given), [_NONSENSE] * len(given), prompts)
    for (kind, chance), said in zip(_BY_CHANCE.items(), wrong, strict=True):
        if sum(earns(said[number], number) for number, _ in given) > chance * len(given):
            return kind
    return ""


def _earns(function: Callable[..., Any], said: str, right: Sequence[str]) -> bool:
    """Whether an answer, as the data have it or in a box, earns 1."""
    metadata = {"right_answers": list(right)} if len(right) > 1 else {}
    try:
        return any(is_solved(function(text, right[0], metadata), 1.0) for text in (said, f"\\boxed{{{said}}}"))
    except (ValueError, IndexError):  # it does not read answers of this form, or there is none
        return False


def sample_levels(request: dict[str, Any]) -> Iterator[list[int]]:
    """Number of right samples of each prompt, for each level in turn.

    Args:
        request: `model` (its folder), `task` (of reasoning-gym), `levels` (its settings, the easiest first), `prompts`,
            `samples` of each prompt, `max_tokens`, and `enough`: from so many prompts with right and wrong samples on,
            no further level is tried.

    Harder levels are tried only while nearly all samples are right.
    """
    import reasoning_gym
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from troupe.workers.data.plain_text import response_text
    from troupe.workers.models.attention import choose_attention

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(request["model"], padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    attention = choose_attention(request["model"], trust_remote_code=False)
    check_model_files(request["model"])
    model: Any = AutoModelForCausalLM.from_pretrained(request["model"], dtype=dtype, attn_implementation=attention)
    model.to(device).eval()
    torch.manual_seed(_SEED)
    for level in request["levels"]:
        entries = list(reasoning_gym.create_dataset(request["task"], size=request["prompts"], seed=_SEED, **level))
        prompts = [_prompt(tokenizer, entry["question"]) for entry in entries]
        batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False).to(device)
        with torch.inference_mode():
            tokens = model.generate(
                **batch,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=request["max_tokens"],
                num_return_sequences=request["samples"],
                pad_token_id=tokenizer.pad_token_id,
            )
        width, opens = batch["input_ids"].shape[1], in_thought(prompts[0])
        texts = [response_text(tokenizer, ids) for ids in tokens[:, width:].tolist()]
        size = request["samples"]
        right = [
            sum(_is_right(text, entry, request["task"], opens) for text in texts[number * size : (number + 1) * size])
            for number, entry in enumerate(entries)
        ]
        yield right
        if sum(0 < count < size for count in right) >= request["enough"] or sum(right) < 0.9 * size * len(right):
            return


def _prompt(tokenizer: Any, question: str) -> str:
    if tokenizer.chat_template is None:
        return question
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def _is_right(text: str, entry: dict[str, Any], task: str, opens_thought: bool) -> bool:
    from troupe.workers.rewards.gym import reasoning_gym

    value = reasoning_gym(text, entry["answer"], {"recipe": task, "entry": entry}, opens_thought=opens_thought)
    return is_solved(value, 1.0)
