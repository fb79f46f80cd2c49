"""Scores sampled tokens in plain float32 transformers, and under every hypothesis that may explain a gap.

The scorer uses none of the code with which sampler and trainer compute log-probs. It loads the model with transformers
as it is, with eager attention, runs one row at a time without padding, and computes in float32. Each hypothesis changes
one thing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from torch import nn
from torch.nn import functional

from troupe.workers.contract.audit import (
    DOUBLED,
    MISSING,
    STALE,
    TIED_EMBEDDING,
    WHOLE_MODEL,
    Floats,
    PromptDifference,
    ScoreRequest,
    TokenScores,
)
from troupe.workers.contract.kept_tokens import kept_of
from troupe.workers.contract.model_files import check_model_files
from troupe.workers.data.plain_text import as_text
from troupe.workers.data.tokenizer import load_chat_tokenizer, load_tokenizer, render, token_ids
from troupe.workers.data.turn_ends import turn_ends
from troupe.workers.models.attention import choose_attention
from troupe.workers.models.modeling import torch_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TEMPERATURES = 17
"""Number of temperatures that are tried: odd, so that the run's own is among them. Others are interpolated."""
_RANGE = 4.0
"""Largest ratio of a temperature that is tried to the run's own, either way."""
_FRACTIONS = tuple(percent / 100 for percent in range(1, 100))
"""Values of top-p and min-p that are tried."""
_TOP_K = (*range(1, 101), *(round(100 * 1.05**step) for step in range(1, 49)))
_BORDER = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}
"""Nats by which the engine's rounding may lift a token into the sampled ones, by the run's data type."""
_WITHIN = 0.9
"""Share of a truncated draw that has no token of the border. A smaller one would favour a top-p below the engine's."""
_HEADS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_TYPES = {**_HEADS, "float8": torch.float8_e4m3fn}
_THETAS = (10_000, 100_000, 500_000, 1_000_000)
_FACTORS = (0.25, 0.5, 2.0, 4.0)
"""Factors of the angles of rotary embeddings, as of a linear scaling that is left out or added."""
_EPSILONS = (1e-5, 1e-6, 1e-8)
_SHOWN_TOKENS = 8
_SHOWN_PROMPTS = 3


Change = tuple[Any, str, Any]
"""An object, an attribute of it, and another value."""


@dataclass(frozen=True)
class _RolloutRow:
    """One row of the ROLLOUTS table."""

    ids: torch.Tensor
    """int64 [1, L]: prompt and response."""
    start: int
    """Length of the prompt."""
    sampled: torch.Tensor
    """bool [response tokens]: which of them the policy sampled."""
    words: tuple[bytes, ...] | None = None
    """The tokens that the sampler left to each response token (`contract/kept_tokens.py`), or None for all of them."""

    @property
    def targets(self) -> torch.Tensor:
        """int64 [T, 1]: the sampled tokens."""
        return self.ids[0, self.start :][self.sampled][:, None]

    @property
    def predicting(self) -> int:
        """Number of the last tokens that predict the response, and of the one after it."""
        return self.ids.shape[1] - self.start + 1

    def of(self, states: torch.Tensor) -> torch.Tensor:
        """Selects from states of the last tokens or of all [1, L, ...] those that predict the sampled ones [T, ...]."""
        return states[0, -self.predicting : -1][self.sampled]

    def left(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [T, V] of the sampled tokens, with -inf at tokens that the sampler left out."""
        if self.words is None:
            return logits
        chosen = [words for words, sampled in zip(self.words, self.sampled.tolist(), strict=True) if sampled]
        kept = np.stack([kept_of(np.frombuffer(words, np.int32), logits.shape[-1]) for words in chosen])
        return logits.masked_fill(~torch.from_numpy(kept), -torch.inf)


def score_tokens(request: ScoreRequest, *tables: pa.Table) -> TokenScores:
    """Log-probs of every token that the policy sampled in ROLLOUTS `tables`, which are followed by as many tables or
    more of the trainer's `old_logprobs` of their rows. Raises ValueError if a row has no log-probs of the trainer."""
    if request.threads:
        torch.set_num_threads(request.threads)
    rollouts = [row for table in tables if "rollout_logprobs" in table.column_names for row in table.to_pylist()]
    scored = {_key(row): row for table in tables if "old_logprobs" in table.column_names for row in table.to_pylist()}
    rollouts = [row for row in rollouts if row["weight_versions"] and any(row["loss_mask"])]
    if missing := [row["prompt_uid"] for row in rollouts if _key(row) not in scored]:
        raise ValueError(f"the trainer scored no tokens of {missing[0]}")
    rows = [_row(row) for row in rollouts]
    tokenizer = _tokenizer(request)
    ends = () if tokenizer is None else turn_ends(tokenizer).ids
    with torch.no_grad():
        model = _load_audited(request, torch.float32)
        exact, hypotheses, draws, tempered, above = _score(request, model, rows, ends)
        if request.thorough:
            hypotheses |= _thorough(request, model, rows)
        rounded = _score_rounded(request, rows)
    prompts, differences = _compare_prompts(request, tokenizer, rollouts)
    masks = [row["loss_mask"] for row in rollouts]
    return TokenScores(
        sampler=_masked([row["rollout_logprobs"] for row in rollouts], masks),
        trainer=_masked([scored[_key(row)]["old_logprobs"] for row in rollouts], masks),
        scorer=exact,
        rounded=rounded,
        hypotheses=hypotheses,
        draws=draws,
        temperatures=_temperatures(request),
        tempered=tempered,
        above=above,
        engine=tuple(row["engine"] for row in rollouts for kept in row["loss_mask"] if kept),
        prompts=prompts,
        prompt_differences=differences,
    )


def _key(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["prompt_uid"], row["sample_index"], row["segment"]


def _row(row: dict[str, Any]) -> _RolloutRow:
    ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
    words = row.get("kept_tokens")
    sampled = torch.tensor(row["loss_mask"], dtype=torch.bool)
    return _RolloutRow(ids, len(row["prompt_ids"]), sampled, None if words is None else tuple(words))


def _masked(values: list[list[float]], masks: list[list[bool]]) -> Floats:
    kept = [
        value for row, mask in zip(values, masks, strict=True) for value, keep in zip(row, mask, strict=True) if keep
    ]
    return np.array(kept, np.float64)


def _load(request: ScoreRequest, folder: str, dtype: torch.dtype, attention: str | None = "eager") -> PreTrainedModel:
    """The model in a folder. Eager attention is its own code: another implementation may leave a part of it out."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    check_model_files(folder)
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        trust_remote_code=request.model.trust_remote_code,
        local_files_only=True,
        use_safetensors=True,
        attn_implementation=attention,
        experts_implementation="eager",  # others refuse float64
    )
    return loaded.eval()


def _load_audited(request: ScoreRequest, dtype: torch.dtype, attention: str | None = "eager") -> PreTrainedModel:
    """The model that sampler and trainer must have. An adapter stays separate from the weights, by peft."""
    model = _load(request, request.weights, dtype, attention)
    return model if request.adapter is None else _with_adapter(model, request.adapter)


def _with_adapter(model: PreTrainedModel, folder: str) -> PreTrainedModel:
    from peft import PeftModel

    adapted: Any = PeftModel.from_pretrained(model, folder, autocast_adapter_dtype=False)
    return adapted.get_base_model().eval()


@contextmanager
def _changed(changes: Iterable[Change]) -> Iterator[None]:
    """Inside the block attributes have other values."""
    own: list[Change] = []
    try:
        for owner, name, value in changes:
            own.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in own:
            setattr(owner, name, value)


def _run(
    model: PreTrainedModel, row: _RolloutRow, positions: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits [T, vocabulary], states that the head reads [T, hidden size]) for the row's sampled tokens."""
    arguments: dict[str, Any] = {"input_ids": row.ids, "attention_mask": torch.ones_like(row.ids), "use_cache": False}
    if positions is not None:
        arguments["position_ids"] = positions[None]
    if "logits_to_keep" in signature(model.forward).parameters:
        arguments["logits_to_keep"] = row.predicting
    output: Any = model(**arguments, output_hidden_states=True)
    return row.of(output.logits), row.of(output.hidden_states[-1])


def _logprobs(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    """[T] log-probs of `targets` [T, 1]."""
    scaled = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
    return (scaled.gather(-1, targets) - scaled.logsumexp(-1, keepdim=True))[:, 0]


def _tempered(
    logits: torch.Tensor, targets: torch.Tensor, temperatures: Iterable[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of `targets` [T, 1], and the probability of all more probable tokens, [T, N] at N temperatures."""
    lower = logits - logits.amax(-1, keepdim=True)
    own = lower.gather(-1, targets)
    more, logprobs, above = lower > own, [], []
    for temperature in temperatures:
        sizes = (lower / temperature).exp_()
        whole = sizes.sum(-1)
        logprobs.append(own[:, 0] / temperature - whole.log())
        above.append(sizes.mul_(more).sum(-1) / whole)
    return torch.stack(logprobs, -1), torch.stack(above, -1)


def _score(
    request: ScoreRequest, model: PreTrainedModel, rows: list[_RolloutRow], ends: Collection[int]
) -> tuple[Floats, dict[str, Floats], dict[str, Floats], Floats, Floats]:
    """Log-probs in float32, under the hypotheses that need no separate pass, and at every temperature; see `above`."""
    temperature, grid = request.temperature, _temperatures(request)
    exact: list[torch.Tensor] = []
    tempered: list[torch.Tensor] = []
    above: list[torch.Tensor] = []
    others: dict[str, list[torch.Tensor]] = {}
    draws: dict[str, list[torch.Tensor]] = {}
    for row in rows:
        full, states = _run(model, row)
        logits = row.left(full)
        exact.append(_logprobs(logits, row.targets, temperature))
        logprobs, places = _tempered(logits, row.targets, grid.tolist())
        tempered.append(logprobs)
        above.append(places)
        for key, found, draw in [
            *_truncated(logits, row.targets, temperature, _BORDER[request.model.dtype]),
            *_endless(logits, row.targets, temperature, ends),
        ]:
            others.setdefault(key, []).append(found)
            draws.setdefault(key, []).append(draw)
        for key, found in _heads(request, model, full, states, row):
            others.setdefault(key, []).append(found)
    columns, drawn = ({key: _joined(parts) for key, parts in found.items()} for found in (others, draws))
    return _joined(exact), columns, drawn, _joined(tempered), _joined(above)


def _tokenizer(request: ScoreRequest) -> Any:
    """The run's tokenizer, or None if it has none and compares no prompts."""
    if request.compare_prompts:
        return load_chat_tokenizer(request.model)
    try:
        return load_tokenizer(request.model)
    except ValueError:
        return None


def _joined(parts: list[torch.Tensor]) -> Floats:
    return torch.cat(parts).double().numpy()


def _temperatures(request: ScoreRequest) -> Floats:
    """Temperatures to try, evenly spaced in their logarithm around the run's own."""
    return request.temperature * np.exp(np.linspace(-np.log(_RANGE), np.log(_RANGE), _TEMPERATURES))


def _truncated(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, border: float
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield key, log-probs [T] as the engine computes them if only the most probable tokens are sampled (top-p, top-k
    and min-p), and the draw [T, 2] (`TokenScores.draws`), of logits [T, V] and targets [T, 1].

    A sampled token may be `border` nats less probable than the last of these tokens. A share of `_WITHIN` is among the
    most probable tokens, the rest among these and the border: a distribution, however many are in the border.
    """
    logprobs = torch.log_softmax(logits.float() / temperature, -1)
    surprise = torch.from_numpy(np.sort(-logprobs.numpy(), -1))  # torch's sort takes ten times as long
    mass = (-surprise).exp().cumsum(-1)
    own, (_, above) = logprobs.gather(-1, targets), _tempered(logits, targets, [temperature])
    fractions = torch.tensor(_FRACTIONS).repeat(len(mass), 1)
    shares = torch.tensor([_WITHIN, 1.0 - _WITHIN])

    def within(surprises: torch.Tensor) -> torch.Tensor:
        return mass.gather(-1, torch.searchsorted(surprise, surprises, right=True) - 1)

    counts = {
        "top_p": (_FRACTIONS, torch.searchsorted(mass, fractions) + 1),  # with the token that reaches top_p
        "min_p": (_FRACTIONS, torch.searchsorted(surprise, surprise[:, :1] - fractions.log(), right=True)),
        "top_k": (_TOP_K, torch.tensor(_TOP_K).repeat(len(mass), 1)),
    }
    for kind, (values, count) in counts.items():
        place = count.clamp(max=mass.shape[-1]) - 1
        last = surprise.gather(-1, place)
        inside = torch.stack([-own <= last, -own <= last + border], -1)
        masses = torch.stack([within(last), within(last + border)], -1)
        numbers = torch.where(inside[..., 1], own - mass.gather(-1, place).log(), -torch.inf)
        before = (above[..., None] / masses).clamp(max=1.0) @ shares
        draws = torch.stack([own + (inside / masses @ shares).log(), before], -1)
        for number, value in enumerate(values):
            yield f"{kind}:{value:g}", numbers[:, number], draws[:, number]


def _endless(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, ends: Collection[int]
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """As `_truncated`, if the tokens that end a turn are never sampled."""
    found = [end for end in ends if end < logits.shape[-1]]
    if found:
        left = logits.index_fill(-1, torch.tensor(found), -torch.inf)
        draw = torch.cat(_tempered(left, targets, [temperature]), -1)
        yield "ends:", draw[:, 0], draw


def _heads(
    request: ScoreRequest, model: PreTrainedModel, logits: torch.Tensor, states: torch.Tensor, row: _RolloutRow
) -> Iterator[tuple[str, torch.Tensor]]:
    """Log-probs with an output head in a shorter type than the run's."""
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear) or not torch.allclose(head(states), logits, rtol=1e-3, atol=1e-3):
        return  # the model does more after its head, or before it
    own = None if request.model.computes_float32_logits else request.model.dtype
    for name, dtype in _HEADS.items():
        if name != own:
            bias = None if head.bias is None else head.bias.to(dtype)
            short = functional.linear(states.to(dtype), head.weight.to(dtype), bias)
            yield f"head:{name}", _logprobs(row.left(short), row.targets, request.temperature)


def _score_rounded(request: ScoreRequest, rows: list[_RolloutRow]) -> Floats:
    """Log-probs that differ from the scorer's by the rounding of the run's data type and head."""
    temperature = request.temperature
    if request.model.dtype == "float32":
        other = _load_audited(request, torch.float64)
    else:  # eager attention would round its weights, which no engine does
        attention = choose_attention(request.weights, request.model.trust_remote_code)
        other = _load_audited(request, torch_dtype(request.model.dtype), attention)
    head = other.get_output_embeddings()
    parts = []
    for row in rows:
        logits, states = _run(other, row)
        if request.model.computes_float32_logits and isinstance(head, torch.nn.Linear):
            bias = None if head.bias is None else head.bias.float()
            full = functional.linear(states.float(), head.weight.float(), bias)
            logits = full if torch.allclose(full, logits.float(), rtol=0.1, atol=0.1) else logits
        parts.append(_logprobs(row.left(logits), row.targets, temperature))
    return _joined(parts)


def _thorough(request: ScoreRequest, model: PreTrainedModel, rows: list[_RolloutRow]) -> dict[str, Floats]:
    """Log-probs at other positions, of the model with one thing changed, with older weights, and the older adapter."""
    found = {}
    for name in ("response+1", "response-1", "response from 0", "all+1"):
        found[f"positions:{name}"] = _pass(model, rows, request.temperature, name)
    for key, changes in _variants(request, model):
        with _changed(changes):
            found[key] = _pass(model, rows, request.temperature)
    if request.previous is not None:
        older = OlderWeights(model, _load(request, request.previous, torch.float32))
        for group in older.changed():
            with older.in_place(group):
                found[f"weights:{group}"] = _pass(model, rows, request.temperature)
    if request.previous_adapter is not None:
        older_model = _with_adapter(_load(request, request.weights, torch.float32), request.previous_adapter)
        found[f"adapter:{STALE}"] = _pass(older_model, rows, request.temperature)
    return found


def _variants(request: ScoreRequest, model: PreTrainedModel) -> Iterator[tuple[str, Iterable[Change]]]:
    """What may be wrong in a model, each as the changes that plant it."""
    for name, dtype in _TYPES.items():
        if name != request.model.dtype:
            yield f"type:{name}", ((weight, "data", weight.to(dtype).float()) for weight in model.parameters())
    for about, changes in _angles(model).items():
        if not all(np.allclose(getattr(module, name), other) for module, name, other in changes):
            yield f"rope:{about}", changes
    norms = [
        (module, name) for module in model.modules() for name in ("variance_epsilon", "eps") if name in vars(module)
    ]
    for value in _EPSILONS:
        changes = [(module, name, value) for module, name in norms if not math.isclose(vars(module)[name], value)]
        if changes:
            yield f"epsilon:{value:g}", changes
    if request.adapter is not None:
        adapted = _adapted(model)
        yield f"adapter:{MISSING}", _counted(adapted.values(), 0.0)
        yield f"adapter:{DOUBLED}", _counted(adapted.values(), 2.0)
        for layer, names in _groups(adapted).items():
            yield f"adapter:{MISSING} in {layer}", _counted([adapted[name] for name in names], 0.0)


def _adapted(model: PreTrainedModel) -> dict[str, Any]:
    """The modules with an adapter, by name."""
    from peft.tuners.lora.layer import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def _counted(modules: Iterable[Any], factor: float) -> list[Change]:
    """The changes with which the adapter of these modules counts `factor` times."""
    return [(one, "scaling", {key: factor * value for key, value in one.scaling.items()}) for one in modules]


def _angles(model: PreTrainedModel) -> dict[str, list[Change]]:
    """Other angles of the model's rotary embeddings: with another base, all scaled, or without the model's scaling."""
    found: dict[str, list[Change]] = {}
    settings: dict[str, Any] = model.config.get_text_config().to_dict().get("rope_parameters") or {}
    for module in model.modules():
        for name, own in module.named_buffers(recurse=False):
            kind, is_angles, _ = name.partition("inv_freq")
            if not is_angles or kind.endswith("original_"):
                continue
            others = {f"of theta {theta}": theta for theta in _THETAS}
            if theta := settings.get(kind.removesuffix("_"), settings).get("rope_theta"):
                others["without their scaling"] = theta
            for about, base in others.items():
                found.setdefault(about, []).append((module, name, base ** (-torch.arange(len(own)) / len(own))))
                if (factor := f"{kind}attention_scaling") in vars(module):
                    found[about].append((module, factor, 1.0))
            for factor in _FACTORS:
                found.setdefault(f"times {factor:g}", []).append((module, name, factor * own))
    return found


def _pass(model: PreTrainedModel, rows: list[_RolloutRow], temperature: float, shift: str = "") -> Floats:
    parts = [_logprobs(row.left(_run(model, row, _positions(row, shift))[0]), row.targets, temperature) for row in rows]
    return _joined(parts)


def _positions(row: _RolloutRow, shift: str) -> torch.Tensor | None:
    """int64 [L]: the positions of a row's tokens under a hypothesis, or None for the model's own."""
    if not shift:
        return None
    positions = torch.arange(row.ids.shape[1])
    response = positions >= row.start
    if shift == "all+1":
        return positions + 1
    if shift == "response from 0":
        return torch.where(response, positions - row.start, positions)
    return positions + response * (1 if shift == "response+1" else -1)


def _compare_prompts(
    request: ScoreRequest, tokenizer: Any, rollouts: list[dict[str, Any]]
) -> tuple[int, tuple[PromptDifference, ...]]:
    """Compares the recorded tokens of every prompt with the tokens of transformers' chat template."""
    if not request.compare_prompts:
        return 0, ()
    compared, differences = 0, []
    for row in {row["prompt_uid"]: row for row in rollouts}.values():
        compared += 1
        messages, found = json.loads(row["messages"]), row["prompt_ids"]
        if request.model.plain or as_text(tokenizer, messages) != messages:
            expected = token_ids(tokenizer, render(tokenizer, messages, open_turn=True))
        else:
            expected = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
        if expected == found:
            continue
        first = next((n for n, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), None)
        first = min(len(expected), len(found)) if first is None else first
        texts = (tokenizer.decode(ids[first : first + _SHOWN_TOKENS]) for ids in (expected, found))
        differences.append(PromptDifference(row["prompt_uid"], first, *texts))
    return compared, tuple(differences[:_SHOWN_PROMPTS])


class OlderWeights:
    """The weights of two versions of a model, in groups: a layer, the embedding, the output head, ... A tied output
    head is a separate group: an engine may hold a copy of it that is older than the embedding."""

    def __init__(self, model: PreTrainedModel, older: PreTrainedModel) -> None:
        """Unties the heads of both models."""
        self._tied = _untie(model)
        _untie(older)
        self._weights = dict(model.named_parameters())
        self._older = dict(older.named_parameters())
        self._groups = _groups(self._weights)
        head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
        embedding = next(name for name, module in model.named_modules() if module is model.get_input_embeddings())
        if self._tied and head in self._groups and embedding in self._groups:
            self._groups[TIED_EMBEDDING] = [*self._groups[embedding], *self._groups[head]]

    def changed(self) -> list[str]:
        """The groups whose weights differ between the versions, the whole model last; none if all are equal."""
        changed = [
            group
            for group, names in self._groups.items()
            if any(not torch.equal(self._weights[name], self._older[name]) for name in names)
        ]
        return [*changed, WHOLE_MODEL] if changed else []

    def in_place(self, group: str) -> AbstractContextManager[None]:
        """Inside the block the model has the older weights of a group."""
        names = list(self._weights) if group == WHOLE_MODEL else self._groups[group]
        return _changed([(self._weights[name], "data", self._older[name].data) for name in names])


def _untie(model: PreTrainedModel) -> bool:
    """Untie the output head; returns whether it was tied."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if not isinstance(head, nn.Linear) or not isinstance(embedding, nn.Embedding):
        return False
    if head.weight is not embedding.weight:
        return False
    head.weight = nn.Parameter(embedding.weight.detach().clone(), requires_grad=False)
    return True


def _groups(weights: Iterable[str]) -> dict[str, list[str]]:
    """Names of weights by module: a numbered layer is one group."""
    groups: dict[str, list[str]] = {}
    for name in weights:
        parts = name.split(".")
        number = next((place for place, part in enumerate(parts) if part.isdigit()), None)
        group = ".".join(parts[:-1] if number is None else parts[: number + 1])
        groups.setdefault(group, []).append(name)
    return groups
