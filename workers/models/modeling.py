"""Hugging Face models for the trainers: log-probs or values of response tokens.

transformers is imported when a model is loaded: the driver imports the worker classes and must not wait for it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from troupe.workers.contract.config import CHUNK_LOGITS
from troupe.workers.contract.config_base import Device, Dtype, ModelConfig
from troupe.workers.contract.kept_tokens import BITMAP, bitmap_words
from troupe.workers.contract.messages import RankPlan, ScoreSummary
from troupe.workers.contract.model_files import check_model_files
from troupe.workers.models.adapter_files import add_adapter, read_adapter
from troupe.workers.models.attention import choose_attention
from troupe.workers.models.cpu import OneDnnLinear, use_onednn
from troupe.workers.models.distillation import ColumnReader, LogitsReader
from troupe.workers.models.exact import disable_dropout
from troupe.workers.models.heads import Float32Head, Float32Logits, token_logprobs
from troupe.workers.models.partitioned import Partitioner
from troupe.workers.models.proxy import proxy_for
from troupe.workers.models.ragged import Ragged
from troupe.workers.models.route_replay import RouteReplay
from troupe.workers.models.sequence_parallel import OwnTokens, SequenceGroup, divide
from troupe.workers.models.token_batch import TokenBatch, TokenTable, is_table, not_finite, score_table

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_LEAST_LOGIT = -1e9
"""A logit with probability 0 in float32, whose product with any weight is finite."""


def torch_dtype(name: Dtype) -> torch.dtype:
    """The torch data type with this name."""
    return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[name]


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module in evaluation mode inside the block, and back in its own mode after it."""
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)


def load_causal(config: ModelConfig, partitioner: Partitioner | None = None) -> PreTrainedModel:
    """A causal language model from a local folder: safetensors only, no dropout, no remote code unless configured;
    every rank loads it with a partitioner. Raises OSError if the folder or its weights are missing, ValueError if
    some are (and would be random), the adapter does not fit, or there are other weights."""
    from transformers import AutoModelForCausalLM

    arguments = _load_arguments(config)
    with _reading(config, partitioner):
        loaded: Any = AutoModelForCausalLM.from_pretrained(config.path, output_loading_info=True, **arguments)
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"{config.path}: not a language model: no weights for {', '.join(missing[:5])}")
    _add_adapter(model, config, partitioner)
    _prepared(model, partitioner)
    if config.computes_float32_logits or config.dtype == "float32":
        _multiply_in_float32(model, config.computes_float32_logits)
    return model


def load_value(config: ModelConfig, partitioner: Partitioner | None = None) -> PreTrainedModel:
    """A one-label sequence classifier (critic or reward model) from a folder; see `load_causal`. Of a causal
    language model only the backbone is loaded, and the head is 0, as all values until the first update. Raises
    OSError, and ValueError if the head is not a linear layer named `score`."""
    from transformers import AutoModelForSequenceClassification

    arguments = _load_arguments(config)
    with _reading(config, partitioner):
        model, info = AutoModelForSequenceClassification.from_pretrained(
            config.path, num_labels=1, output_loading_info=True, **arguments
        )
    score = model.get_submodule("score") if hasattr(model, "score") else None
    if not isinstance(score, nn.Linear):
        raise ValueError(f"{config.path}: {type(model).__name__} has no linear head named score")
    if any(name.startswith("score.") for name in info["missing_keys"]):
        nn.init.zeros_(score.weight)
    _add_adapter(model, config, partitioner)
    score.__class__ = Float32Head
    return _prepared(model, partitioner)


def _load_arguments(config: ModelConfig) -> dict[str, Any]:
    if not Path(config.path).is_dir():
        raise FileNotFoundError(f"model folder {config.path} does not exist")
    check_model_files(config.path)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    return {
        "dtype": torch_dtype(config.dtype),
        "trust_remote_code": config.trust_remote_code,
        "local_files_only": True,
        "use_safetensors": True,
        "attn_implementation": choose_attention(config.path, config.trust_remote_code),
    }


def _reading(config: ModelConfig, partitioner: Partitioner | None) -> AbstractContextManager[None]:
    if partitioner is None:
        return nullcontext()
    from transformers import AutoConfig

    found = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code, local_files_only=True)
    return partitioner.reading(config.path, found.get_text_config().vocab_size)


def _add_adapter(model: PreTrainedModel, config: ModelConfig, partitioner: Partitioner | None) -> None:
    """Add the adapter of a model's configuration, if there is one, to its weights."""
    if config.adapter is None:
        return
    if partitioner is not None:
        raise ValueError(
            f"{config.adapter}: an adapter cannot be added to a model that is partitioned while it is read"
        )
    adapter = read_adapter(config.adapter)
    adapter.require_base(config.path)
    add_adapter(model, adapter)


def _prepared(model: PreTrainedModel, partitioner: Partitioner | None) -> PreTrainedModel:
    disable_dropout(model)
    use_onednn(model)
    if partitioner is not None:
        partitioner.finish(model)
    return model


def _multiply_in_float32(model: PreTrainedModel, asked: bool) -> None:
    """Make the output head compute float32 logits, if the configuration asks for it; it keeps its name and weight."""
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear) and type(head) in (nn.Linear, OneDnnLinear):
        head.__class__ = Float32Logits
    elif asked:
        logger.warning("float32_head has no effect: the output head of %s is no linear layer", type(model).__name__)


def head_chunks(vocabulary: int, micro_batch_tokens: int, device: Device) -> int:
    """Chunks of the output head with at most `CHUNK_LOGITS` logits, by the configuration alone: under ZeRO-3 every
    rank must gather the head's weight equally often."""
    return max(1, math.ceil(vocabulary * micro_batch_tokens / CHUNK_LOGITS[device]))


class ModelModule(nn.Module):
    """A module around a Hugging Face model, which computes in training as it does in evaluation: dropout, router
    jitter and sampled experts would let an update's log-probs differ from the sampler's. Only layers that
    recompute their activations are in training mode, as transformers recomputes in no other
    (`check_deterministic`). Micro-batches come by keyword: DeepSpeed's hooks look for tensors in positional
    arguments."""

    model: PreTrainedModel
    masks_padding = True
    """Whether the model gets the mask of a padded batch; `capabilities.adapt` finds out whether it needs it."""
    sequence: SequenceGroup | None = None
    """The workers that share each micro-batch, or None if this one runs all its tokens."""
    replay: RouteReplay | None = None
    """Runs tokens through the experts of `TokenBatch.routes`, or None for the model's own choice."""

    def train(self, mode: bool = True) -> Self:
        """Put the module in training mode, and of its model the layers with gradient checkpointing."""
        super().train(mode)
        for module in self.modules():
            module.training = mode and (module is self or getattr(module, "gradient_checkpointing", False))
        return self

    def inputs(self, own: OwnTokens) -> dict[str, Any]:
        """Arguments of the model, some without `position_ids`. Padding is on the right: a causal model needs no mask
        for it, and the fastest kernels take none."""
        mask = own.attention_mask if self.masks_padding or is_table(own.attention_mask) else None
        arguments = {"input_ids": own.input_ids, "attention_mask": mask, "use_cache": False}
        return arguments if own.position_ids is None else arguments | {"position_ids": own.position_ids}

    def hidden(self, own: OwnTokens) -> torch.Tensor:
        """Last hidden states of the backbone [B, L, hidden size]."""
        return self.model.base_model(**self.inputs(own)).last_hidden_state

    def states(self, batch: TokenBatch) -> tuple[OwnTokens, torch.Tensor]:
        """The tokens of a micro-batch that this worker runs, and their last hidden states [tokens, hidden size]."""
        own = self.own(batch)
        return own, self.hidden(own).flatten(0, 1)

    def own(self, batch: TokenBatch) -> OwnTokens:
        """The tokens of a micro-batch that this worker runs next, with their experts set."""
        own = divide(self.sequence, batch)
        if self.replay is not None:
            self.replay.set(own.routes)
        return own


class CausalLogprobs(ModelModule):
    """Log-probs and entropies of response tokens under a causal language model. The head runs only on positions that
    predict them, in `chunks` chunks with recomputation. Softmax is in float32, of logits divided by
    `temperature`."""

    def __init__(self, model: PreTrainedModel, temperature: float, chunks: int = 1, entropy_grad: bool = False) -> None:
        """`entropy_grad`: propagate gradients through the entropies. Without it they take no memory."""
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
            logger.info("%s computes its logits in a nonstandard way: using full logits", type(model).__name__)

    def forward(
        self, *, batch: TokenBatch, temperature: float | None = None, reader: LogitsReader | None = None
    ) -> tuple[torch.Tensor, ...]:
        """(logprobs, entropies), float32 [T], of the distribution over the tokens in `batch.kept`, and what `reader`
        reads of the distribution over all tokens. `temperature` overrides the module's."""
        temperature = temperature or self.temperature
        own, found = self._outputs(batch)
        at = own.find(batch.positions)
        more = None if reader is None else reader.of(at.chosen)
        measured = self.of_states(found[at.local], batch.targets[at.chosen], temperature, at.of(batch.kept), more)
        return tuple(at.gather(values) for values in measured)

    def of_states(
        self,
        states: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        kept: Ragged | None = None,
        reader: LogitsReader | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """The results of `forward` for the backbone's states [T, hidden size] (or logits) that predict `targets`."""
        head = self.model.get_output_embeddings()
        plain = self.split_head and self.softcap is None and kept is None and reader is None
        if plain and isinstance(head, Float32Logits) and head.bias is None:
            return head(states, targets, self.scale / temperature, self.entropy_grad)
        none: list[None] = [None] * self.chunks
        parts = zip(
            states.tensor_split(self.chunks),
            targets.tensor_split(self.chunks),
            none if kept is None else kept.split(self.chunks),
            none if reader is None else reader.split(self.chunks),
            strict=True,
        )
        if self.recompute and torch.is_grad_enabled():
            results = [checkpoint(self._head, *part, temperature, use_reentrant=False) for part in parts]
        else:
            results = [self._head(*part, temperature) for part in parts]
        return tuple(torch.cat(values) for values in zip(*results, strict=True))

    @torch.no_grad()
    def teacher_states(self, batch: TokenBatch) -> torch.Tensor:
        """What `logits_of` takes, of this worker's response tokens, without gradient."""
        with evaluating(self):
            return self.predictors(batch)[0]

    def current_head(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """`logits_of` with a copy of the weights that the head has now."""
        if not self.split_head:
            return self.logits_of
        weights = {name: one.detach().clone() for name, one in self._own_head.named_parameters()}
        return partial(self.logits, weights=weights)

    def predictors(self, batch: TokenBatch) -> tuple[torch.Tensor, Ragged | None]:
        """What `sampled_logits` takes, of this worker's response tokens."""
        own, found = self._outputs(batch)
        at = own.find(batch.positions)
        return found[at.local], at.of(batch.kept)

    def sampled_logits(self, states: torch.Tensor, kept: Ragged | None) -> torch.Tensor:
        """float32 [T, vocabulary]: logits of the sampled distribution; -inf on tokens that the sampler left out."""
        return _of_sampler(self.logits_of(states), self.temperature, kept)

    @property
    def head_parameters(self) -> list[nn.Parameter]:
        """The parameters that `sampled_logits` reads."""
        head = self.model.get_output_embeddings() if self.split_head else None
        return [] if head is None else list(head.parameters())

    def logits_of(self, states: torch.Tensor) -> torch.Tensor:
        """Logits [T, vocabulary] of states, which without a separate head are the logits."""
        return self.logits(states) if self.split_head else states

    def logits(self, hidden: torch.Tensor, weights: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
        """The model's logits [..., vocabulary] of hidden states, before the temperature. `weights`: of the head, or
        None for its own."""
        head = self._own_head
        logits = head(hidden) if weights is None else functional_call(head, dict(weights), hidden)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    @property
    def _own_head(self) -> nn.Module:
        if (head := self.model.get_output_embeddings()) is None:
            raise ValueError(f"{type(self.model).__name__} has no output head")
        return head

    @torch.no_grad()
    def distributions(self, batch: TokenBatch) -> torch.Tensor:
        """Log-probs of the whole vocabulary, float32 [T, vocabulary], at the module's temperature, without gradient.
        Tokens outside `batch.kept` have -inf."""
        own, found = self._outputs(batch)
        at = own.find(batch.positions)
        logits = self.logits_of(found[at.local])
        return at.gather(torch.log_softmax(_of_sampler(logits, self.temperature, at.of(batch.kept)), -1))

    def _outputs(self, batch: TokenBatch) -> tuple[OwnTokens, torch.Tensor]:
        """`states`, or the model's own logits if the head cannot be run apart."""
        if self.split_head:
            return self.states(batch)
        own = self.own(batch)
        return own, self.model(**self.inputs(own)).logits.flatten(0, 1)

    def _head(
        self,
        states: torch.Tensor,
        targets: torch.Tensor,
        kept: Ragged | None,
        reader: LogitsReader | None,
        temperature: float,
    ) -> tuple[torch.Tensor, ...]:
        logits = self.logits_of(states)
        measured = self._measure(logits, targets, temperature, kept)
        return measured if reader is None else (*measured, *reader.read(_of_sampler(logits, temperature, None)))

    def _measure(
        self, logits: torch.Tensor, targets: torch.Tensor, temperature: float, kept: Ragged | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logits.float()
        # Finite, as the entropy has a product of a logit and its probability, which is 0.
        if not self.split_head:  # the model may mask tokens itself
            logits = logits.clamp(min=_LEAST_LOGIT)
        if kept is not None:
            logits = logits.masked_fill(left_out(kept, logits.shape[-1], logits.device), _LEAST_LOGIT)
        return token_logprobs(logits, None, targets, 1.0 / temperature, self.entropy_grad)


def _of_sampler(logits: torch.Tensor, temperature: float, kept: Ragged | None) -> torch.Tensor:
    """float32 [T, vocabulary]: the logits of the distribution that is sampled; -inf on tokens that were not left."""
    logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    if kept is None:
        return logits
    return logits.masked_fill(left_out(kept, logits.shape[-1], logits.device), -torch.inf)


def left_out(kept: Ragged, vocabulary: int, device: torch.device) -> torch.Tensor:
    """bool [T, vocabulary] on `device`: True on tokens not left to the T sampled ones. Raises ValueError."""
    recorded = kept.lengths > 0
    maps = torch.zeros_like(recorded)
    maps[recorded] = kept.values[kept.starts[recorded]] == BITMAP
    listed = (recorded & ~maps).nonzero().flatten()
    mapped = maps.nonzero().flatten()
    result = torch.zeros(len(kept.lengths), vocabulary, dtype=torch.bool, device=device)
    if len(listed):
        ids = kept.take(listed)
        if int(ids.values.max()) >= vocabulary:
            raise ValueError(f"the sampler kept token {int(ids.values.max())} of a vocabulary of {vocabulary}")
        result[listed.to(device)] = True
        result[listed[ids.sequence()].to(device), ids.values.long().to(device)] = False
    if len(mapped):
        words_of = kept.lengths[mapped]
        if (words_of != words_of[0]).any() or int(words_of[0]) > bitmap_words(vocabulary):
            raise ValueError(f"the sampler's sets of tokens are of another vocabulary than the model's, {vocabulary}")
        words = kept.take(mapped).values.view(len(mapped), -1)[:, 1:].contiguous()
        packed = words.view(torch.uint8).to(device)
        bits = packed[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=device) & 1
        absent = bits.flatten(1)[:, :vocabulary] == 0
        rows = mapped.to(device)
        result[rows] = True  # also ids beyond a bitmap: some models have more logits than the one that sampled
        result[rows, : absent.shape[1]] = absent
    return result


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
    tried = proxy_for(model)
    if tried is not model:
        return tried is not None and CausalLogprobs(tried, temperature=1.0).split_head
    ids = torch.arange(4, device=model.device)[None, :]
    with evaluating(model), torch.no_grad():
        own = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        ours = wrapper.logits(wrapper.hidden(OwnTokens(ids, torch.ones_like(ids), None)))
    tolerance = 1e-2 * float(own.abs().max())
    return own.shape == ours.shape and float((own.float() - ours.float()).abs().max()) <= tolerance


class TokenValues(ModelModule):
    """Values of response tokens: the critic's estimate before each token is sampled."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, *, batch: TokenBatch) -> torch.Tensor:
        """float32 [T]. A state's value does not depend on the sampled token: `targets` and `kept` are unused."""
        own, hidden = self.states(batch)
        at = own.find(batch.positions)
        return at.gather(self.model.get_submodule("score")(hidden[at.local])[:, 0])


class RewardScores(ModelModule):
    """One score per sequence, read at its last token, and optionally scores and log-probs of response tokens."""

    def __init__(self, model: PreTrainedModel, language: CausalLogprobs | None = None) -> None:
        """`model`: from `load_value`. `language`: from `share_backbone`, of the same backbone."""
        super().__init__()
        self.model = model
        self.language = language

    def forward(
        self, *, batch: TokenBatch, read_at: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(scores float32 [B], token scores float32 [N], logprobs float32 [T] or None); `read_at`: int64 [N], the
        tokens, as indices into the flattened ones, or None for none."""
        own, hidden = self.states(batch)
        read = own.find(batch.last if read_at is None else torch.cat([batch.last, read_at]))
        values = read.gather(self.model.get_submodule("score")(hidden[read.local])[:, 0])
        scores, token_scores = values[: len(batch.last)], values[len(batch.last) :]
        if self.language is None:
            return scores, token_scores, None
        at = own.find(batch.positions)
        logprobs, _ = self.language.of_states(hidden[at.local], batch.targets[at.chosen], self.language.temperature)
        return scores, token_scores, at.gather(logprobs)


def share_backbone(
    model: PreTrainedModel, config: ModelConfig, chunks: int, partitioner: Partitioner | None = None
) -> CausalLogprobs:
    """The causal language model that `model` (from `load_value`) was made of, sharing its backbone. Its head becomes
    part of `model` under its own name: it is saved, averaged and exported with it, and the folder loads as
    either. A tied head adds no weights. Raises ValueError without a separate head."""
    causal = load_causal(config, partitioner)
    setattr(causal, causal.base_model_prefix, model.base_model)
    causal.tie_weights()
    language = CausalLogprobs(causal, temperature=1.0, chunks=chunks)
    head = causal.get_output_embeddings()
    if head is None or not language.split_head:
        raise ValueError(f"{config.path}: {type(causal).__name__} has no output head separate from its backbone")
    model.set_submodule(next(name for name, module in causal.named_modules() if module is head), head)
    return language


def longest_row(model: PreTrainedModel, micro_batch_tokens: int) -> int:
    """Most tokens of a row: as many as a micro-batch may have, and as the model has positions."""
    positions: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min(micro_batch_tokens, positions or micro_batch_tokens)


def score(module: nn.Module, batch: TokenBatch) -> torch.Tensor:
    """Log-probs (first output) or values of a batch's response tokens, float32 [T], without gradient or dropout."""
    return _scores(module, batch, None)[0]


@torch.no_grad()
def _scores(module: nn.Module, batch: TokenBatch, reader: ColumnReader | None) -> tuple[torch.Tensor, ...]:
    """`score`, and what `reader` reads."""
    with evaluating(module):
        if reader is not None:
            logprobs, _, *read = module(batch=batch, reader=reader)
            return logprobs, *read
        output = module(batch=batch)
    return output[:1] if isinstance(output, tuple) else (output,)


def score_plan(
    module: nn.Module,
    plan: RankPlan,
    tables: Sequence[pa.Table],
    column: str,
    device: torch.device | str,
    reader: ColumnReader | None = None,
    routed: bool = False,
) -> tuple[ScoreSummary, pa.Table]:
    """`score` of the plan's rows, counted through `tables`, as a token_scores table with the fields of `reader`;
    `routed`: with the experts that the engine chose. An empty micro-batch runs on a filler token: under ZeRO-3 all
    ranks must run equally often."""
    tokens = TokenTable.concat(tables, routed)
    # Copied at the end: on a GPU the next micro-batch is cut while one is computed.
    scores = [_scores(module, batch.to(device), reader) for batch in tokens.batches(plan)]
    rows = [row for micro_batch in plan.micro_batches for row in micro_batch]
    columns = [torch.cat(parts).cpu() for parts in zip(*scores, strict=True)]
    values, *read = columns or [torch.zeros(0)]
    chosen = tokens.table.take(pa.array(rows, pa.int64()))
    fields = reader.fields if reader is not None and columns else ()
    table = score_table(column, chosen, values, tokens.responses.lengths[rows], list(zip(fields, read, strict=True)))
    return ScoreSummary(len(rows), not_finite(table)), table
