"""Hugging Face models as the trainers need them: log-probs or values of response tokens, nothing more.

transformers is imported once a model is loaded: the driver names the classes of workers, and would wait for it in vain.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from workers.config import CHUNK_LOGITS, ModelConfig
from workers.linear import use_onednn
from workers.messages import RankPlan
from workers.tensors import TokenBatch, TokenTable, score_table

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


def load_causal(config: ModelConfig) -> PreTrainedModel:
    """A causal language model from a local folder: safetensors only, no remote code unless asked for, no dropout.

    Raises OSError where the folder or its weights are missing, ValueError where it lacks some of them (a reward model's
    has no output head): they would be random.
    """
    from transformers import AutoModelForCausalLM

    arguments = _load_arguments(config)
    loaded: Any = AutoModelForCausalLM.from_pretrained(config.path, output_loading_info=True, **arguments)
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"{config.path}: not a language model: it has no weights for {', '.join(missing[:5])}")
    return _prepared(model)


def load_value(config: ModelConfig) -> PreTrainedModel:
    """A one-label sequence classifier, which is what a critic and a reward model are, from a local folder.

    From a causal language model's folder the backbone is taken and the head starts at zero: every value is 0 until
    the first update. From a saved critic or reward model the head comes along. Raises ValueError for a head that is
    not a linear layer named `score`.
    """
    from transformers import AutoModelForSequenceClassification

    model, info = AutoModelForSequenceClassification.from_pretrained(
        config.path, num_labels=1, output_loading_info=True, **_load_arguments(config)
    )
    score = model.get_submodule("score") if hasattr(model, "score") else None
    if not isinstance(score, nn.Linear):
        raise ValueError(f"{config.path}: {type(model).__name__} has no linear head named score")
    if any(name.startswith("score.") for name in info["missing_keys"]):
        nn.init.zeros_(score.weight)
    model.set_submodule("score", Float32Head(score))
    return _prepared(model)


class Float32Head(nn.Linear):
    """A linear layer that multiplies in float32 whatever its weights are held in: values need the digits."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """float32 [..., out_features] of [..., in_features]."""
        return F.linear(input.float(), self.weight.float(), None if self.bias is None else self.bias.float())


def _load_arguments(config: ModelConfig) -> dict[str, Any]:
    if not Path(config.path).is_dir():
        raise FileNotFoundError(f"model folder {config.path} does not exist")
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    return {
        "dtype": torch.bfloat16 if config.dtype == "bfloat16" else torch.float32,
        "trust_remote_code": config.trust_remote_code,
        "local_files_only": True,
        "use_safetensors": True,
    }


def _prepared(model: PreTrainedModel) -> PreTrainedModel:
    # With dropout the ratio of new to old policy would not start at 1. The configuration is left as it is.
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    use_onednn(model)
    return model


def head_chunks(vocabulary: int, micro_batch_tokens: int) -> int:
    """Parts the output head works in, so that at most `CHUNK_LOGITS` logits exist at a time.

    It follows from the configuration alone: under ZeRO-3 every rank must gather the head's weight equally often.
    """
    return max(1, math.ceil(vocabulary * micro_batch_tokens / CHUNK_LOGITS))


class CausalLogprobs(nn.Module):
    """Log-probs and entropies of response tokens under a causal language model.

    The output head runs on the positions that predict response tokens only, in `chunks` parts with recomputation in
    the backward pass, so that full logits never exist. Softmax is in float32, on logits divided by `temperature`.
    """

    def __init__(self, model: PreTrainedModel, temperature: float, chunks: int = 1, entropy_grad: bool = False) -> None:
        """`entropy_grad`: let gradients flow through the entropies; else they cost no memory."""
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.chunks = chunks
        self.entropy_grad = entropy_grad
        self.recompute = chunks > 1
        text = model.config.get_text_config()
        self.softcap: float | None = getattr(text, "final_logit_softcapping", None)
        self.scale = _logit_scale(text)
        self.split_head = _head_is_linear(self)
        if not self.split_head:
            logger.info("%s computes its logits in its own way: full logits are used", type(model).__name__)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        positions: torch.Tensor,
        targets: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        temperature: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(logprobs, entropies), float32 [T]; the arguments are those fields of a `TokenBatch`.

        With `position_ids` and no mask, sequences stand end to end in one row, and each starts where they restart at 0.
        With `position_ids` and a mask of who sees whom, they stand behind the prompt they share.
        `temperature`: another one than the module's.
        """
        temperature = temperature or self.temperature
        if not self.split_head:
            logits = self._full_logits(input_ids, attention_mask, positions, position_ids)
            return self._measure(logits, targets, temperature)
        hidden = self.hidden(input_ids, attention_mask, position_ids)
        return self.of_hidden(hidden.flatten(0, 1)[positions], targets, temperature)

    def of_hidden(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(logprobs, entropies), float32 [T], of the backbone's states [T, hidden size] that predict `targets`."""
        parts = zip(hidden.tensor_split(self.chunks), targets.tensor_split(self.chunks), strict=True)
        if self.recompute and torch.is_grad_enabled():
            results = [checkpoint(self._head, *part, temperature, use_reentrant=False) for part in parts]
        else:
            results = [self._head(*part, temperature) for part in parts]
        return torch.cat([logprobs for logprobs, _ in results]), torch.cat([entropies for _, entropies in results])

    def hidden(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Last hidden states of the backbone [B, L, hidden size]."""
        return self.model.base_model(**self._inputs(input_ids, attention_mask, position_ids)).last_hidden_state

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The model's logits [..., vocabulary] of hidden states, before the temperature."""
        head = self.model.get_output_embeddings()
        if head is None:
            raise ValueError(f"{type(self.model).__name__} has no output head")
        logits = head(hidden)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def distributions(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        positions: torch.Tensor,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Log-probs of the whole vocabulary, float32 [T, vocabulary], at the module's temperature, without gradient.

        The arguments are those of :meth:`forward`.
        """
        with torch.no_grad():
            if self.split_head:
                logits = self.logits(self.hidden(input_ids, attention_mask, position_ids).flatten(0, 1)[positions])
            else:
                logits = self._full_logits(input_ids, attention_mask, positions, position_ids)
            return torch.log_softmax(logits.float() / self.temperature, -1)

    def _full_logits(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        positions: torch.Tensor,
        position_ids: torch.Tensor | None,
    ) -> torch.Tensor:
        return self.model(**self._inputs(input_ids, attention_mask, position_ids)).logits.flatten(0, 1)[positions]

    def _inputs(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None
    ) -> dict[str, Any]:
        if attention_mask is not None and attention_mask.ndim == 4:
            # Added to the scores of attention, whatever implementation computes them.
            hidden = torch.zeros(attention_mask.shape, dtype=self.model.dtype, device=attention_mask.device)
            attention_mask = hidden.masked_fill(~attention_mask, torch.finfo(hidden.dtype).min)
        return _inputs(input_ids, attention_mask, position_ids)

    def _head(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._measure(self.logits(hidden), targets, temperature)

    def _measure(
        self, logits: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logits.float()
        if temperature != 1.0:
            logits = logits / temperature
        total = logits.logsumexp(-1)
        logprobs = logits.gather(-1, targets[:, None])[:, 0] - total
        with torch.set_grad_enabled(self.entropy_grad and torch.is_grad_enabled()):
            # -sum p log p = logsumexp - sum p * logit. A forbidden token's logit of -inf has p = 0 and must add 0.
            finite = logits.clamp(min=torch.finfo(logits.dtype).min)
            entropies = total - torch.linalg.vecdot(torch.softmax(logits, -1), finite)
        return logprobs, entropies


def _inputs(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None
) -> dict[str, Any]:
    """Arguments of a model; not every architecture knows `position_ids`."""
    arguments = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
    return arguments if position_ids is None else arguments | {"position_ids": position_ids}


def _logit_scale(text_config: Any) -> float:
    """A factor on the logits: Cohere multiplies by logit_scale, Granite divides by logits_scaling."""
    if getattr(text_config, "logit_scale", None) is not None:
        return float(text_config.logit_scale)
    if getattr(text_config, "logits_scaling", None) is not None:
        return 1.0 / float(text_config.logits_scaling)
    return 1.0


def _head_is_linear(wrapper: CausalLogprobs) -> bool:
    """Whether backbone and head apart give the model's own logits; tried out on a few tokens, so true of any model."""
    model = wrapper.model
    if model.get_output_embeddings() is None or model.base_model is model:
        return False
    ids = torch.arange(4, device=model.device)[None, :]
    training = model.training
    model.eval()
    with torch.no_grad():
        own = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        ours = wrapper.logits(wrapper.hidden(ids, torch.ones_like(ids)))
    model.train(training)
    tolerance = 1e-2 * float(own.abs().max())
    return own.shape == ours.shape and float((own.float() - ours.float()).abs().max()) <= tolerance


class TokenValues(nn.Module):
    """Values of response tokens: what the critic expects before each token is sampled."""

    def __init__(self, model: PreTrainedModel) -> None:
        """`model`: from `load_value`."""
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        positions: torch.Tensor,
        targets: torch.Tensor,
    ) -> torch.Tensor:
        """float32 [T]; `targets` is not read: the value of a state does not depend on the token chosen in it."""
        backbone = self.model.base_model
        hidden = backbone(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        return self.model.get_submodule("score")(hidden.flatten(0, 1)[positions])[:, 0]


class RewardScores(nn.Module):
    """One score per sequence, read at its last token, and, where asked for, log-probs of response tokens too."""

    def __init__(self, model: PreTrainedModel, language: CausalLogprobs | None = None) -> None:
        """`model`: from `load_value`. `language`: from `share_backbone`, of the same backbone."""
        super().__init__()
        self.model = model
        self.language = language

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        positions: torch.Tensor,
        targets: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(scores float32 [B], logprobs float32 [T] or None); the arguments are those fields of a `TokenBatch`."""
        hidden = self.model.base_model(**_inputs(input_ids, attention_mask, None)).last_hidden_state
        last = attention_mask.sum(1) - 1
        scores = self.model.get_submodule("score")(hidden[torch.arange(len(last), device=last.device), last])[:, 0]
        if self.language is None:
            return scores, None
        return scores, self.language.of_hidden(hidden.flatten(0, 1)[positions], targets, self.language.temperature)[0]


def share_backbone(model: PreTrainedModel, config: ModelConfig, chunks: int) -> CausalLogprobs:
    """The causal language model that `model` (from `load_value`) was made of, on the very same backbone.

    Its output head becomes a part of `model`, under the name it has in the causal model: it is saved, averaged and
    exported with it, and who loads the folder as a causal language model finds it. A tied one adds no weights.

    Raises ValueError for an architecture whose output head does not stand apart from its backbone.
    """
    causal = load_causal(config)
    setattr(causal, causal.base_model_prefix, model.base_model)
    causal.tie_weights()
    language = CausalLogprobs(causal, temperature=1.0, chunks=chunks)
    head = causal.get_output_embeddings()
    if head is None or not language.split_head:
        raise ValueError(f"{config.path}: {type(causal).__name__} has no output head apart from its backbone")
    model.set_submodule(next(name for name, module in causal.named_modules() if module is head), head)
    return language


@torch.no_grad()
def packs(module: CausalLogprobs) -> bool:
    """Whether the model keeps sequences apart that stand end to end in one row; tried out, so true of any model."""
    ids = torch.arange(7, device=module.model.device)
    parts = [ids[:3], ids[3:]]
    training = module.training
    module.eval()
    alone = torch.cat([module.hidden(part[None], torch.ones_like(part)[None])[0] for part in parts])
    places = torch.cat([torch.arange(len(part), device=ids.device) for part in parts])
    together = module.hidden(ids[None], None, places[None])[0]
    module.train(training)
    tolerance = 1e-2 * float(alone.abs().max())
    return float((alone.float() - together.float()).abs().max()) <= tolerance


def shares_prompts(module: CausalLogprobs) -> bool:
    """Whether responses behind one copy of their prompt have the log-probs they have alone; tried out, so true of any
    model. One with a window of attention is left out: the trial is too short to show what that does."""
    if getattr(module.model.config.get_text_config(), "sliding_window", None) is not None:
        return False
    prompt, (first, other, last) = [3, 5, 7], ([11, 13], [12, 14], [17, 19, 23])
    tables = [_group(prompt, [first, last]), _group(prompt, [other, last])]
    device = module.model.device
    alone = score(module, tables[0].batch((0, 1)).to(device))
    try:
        together, changed = (score(module, table.shared_batch((0, 1)).to(device)) for table in tables)
    except (TypeError, ValueError, RuntimeError):  # it takes no positions, or no such mask
        return False
    tolerance = 1e-2 * max(1.0, float(alone.abs().max()))
    near = float((alone - together).abs().max()) <= tolerance
    # What a token must not see has weight 0: another response in its place changes not a bit.
    return near and torch.equal(together[len(first) :], changed[len(first) :])


def _group(prompt: list[int], responses: list[list[int]]) -> TokenTable:
    """One prompt's responses."""
    rows = [
        {
            "prompt_uid": "p",
            "sample_index": number,
            "prompt_ids": prompt,
            "response_ids": ids,
            "loss_mask": [True] * len(ids),
        }
        for number, ids in enumerate(responses)
    ]
    return TokenTable(pa.Table.from_pylist(rows))


@torch.no_grad()
def score(module: nn.Module, batch: TokenBatch) -> torch.Tensor:
    """Log-probs (first output) or values of a batch's response tokens, float32 [T], without gradient or dropout."""
    training = module.training
    module.eval()
    where = () if batch.position_ids is None else (batch.position_ids,)
    output = module(batch.input_ids, batch.attention_mask, batch.positions, batch.targets, *where)
    module.train(training)
    return output[0] if isinstance(output, tuple) else output


def score_plan(
    module: nn.Module,
    plan: RankPlan,
    tables: Sequence[pa.Table],
    column: Literal["old_logprobs", "ref_logprobs", "values"],
    device: torch.device | str,
) -> tuple[int, pa.Table]:
    """(rows, table): `score` of the plan's rows as a token_scores table, in the order of the plan.

    Row numbers count through `tables` in order. An empty micro-batch is still run, on a filler token: under ZeRO-3
    all ranks must run equally often.
    """
    tokens = TokenTable.concat(tables)
    scores = [score(module, batch.to(device)).cpu() for batch in tokens.batches(plan.micro_batches)]
    rows = [row for micro_batch in plan.micro_batches for row in micro_batch]
    values = torch.cat(scores) if scores else torch.zeros(0)
    chosen = tokens.table.take(pa.array(rows, pa.int64()))
    return len(rows), score_table(column, chosen, values, tokens.responses.lengths[rows])
