"""A frozen reward model: a Hugging Face sequence classifier with one label that scores prompt plus response."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from operator import itemgetter
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification

from troupe.workers.contract.config_base import Device, ModelConfig
from troupe.workers.contract.model_files import check_model_files
from troupe.workers.contract.reward_config import ScoreLevel
from troupe.workers.data.examples import encode_conversation
from troupe.workers.data.plain_text import response_text, token_counts
from troupe.workers.data.tokenizer import load_tokenizer, render, token_ids
from troupe.workers.data.turn_ends import padding_besides, turn_ends
from troupe.workers.models.adapter_files import PREFIX, add_adapter, read_adapter
from troupe.workers.models.attention import choose_attention
from troupe.workers.models.capabilities import ROUNDING, takes_segments
from troupe.workers.models.cpu import use_onednn
from troupe.workers.models.exact import ieee_float32
from troupe.workers.models.heads import Float32Head
from troupe.workers.models.modeling import torch_dtype
from troupe.workers.models.token_batch import segment_table
from troupe.workers.rewards.runner import RewardResult

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_OF_STEPS: Mapping[ScoreLevel, Callable[[Sequence[float]], float]] = {
    "min": min,
    "mean": fmean,
    "last": itemgetter(-1),
    "step": fmean,
}
"""What becomes of the chances of a response's steps, by the level; of other levels the scores' mean is the outcome."""
Places = Sequence[Sequence[int]] | None
"""The places of the scores in each sequence; None: where a classifier reads its score."""


class RewardModel:
    """Scores rollouts in packed or padded batches of bounded size, without gradients."""

    def __init__(self, config: ModelConfig, micro_batch_tokens: int, device: Device) -> None:
        """Load model and tokenizer. Raises ValueError if the model does not have one label, weights are missing and
        would be random, or the folder holds other weights besides, and OSError if the folder does not exist or has no
        safetensors."""
        check_model_files(config.path)
        self.micro_batch_tokens = micro_batch_tokens
        self.device: Device = device
        source: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
        if config.adapter is None:
            labels = AutoConfig.from_pretrained(config.path, **source).num_labels
            if labels != 1:
                raise ValueError(f"{config.path}: a reward model needs exactly one label, got {labels}")
        self.tokenizer: Any = load_tokenizer(config)
        model, report = AutoModelForSequenceClassification.from_pretrained(
            config.path,
            num_labels=1,
            dtype=torch_dtype(config.dtype),
            use_safetensors=True,
            output_loading_info=True,
            attn_implementation=choose_attention(config.path, config.trust_remote_code),
            **source,
        )
        missing = set(report["missing_keys"])
        if config.adapter is not None:
            adapter = read_adapter(config.adapter)
            adapter.require_base(config.path)
            add_adapter(model, adapter)
            missing -= {name.removeprefix(PREFIX) for name in adapter.tensors}
        if missing:
            raise ValueError(f"{config.path}: not a reward model: no weights for {', '.join(sorted(missing)[:5])}")
        _score_in_float32(model)
        use_onednn(model)
        self.model: Any = model.to(device).eval().requires_grad_(False)
        text_config = self.model.config.get_text_config()
        if text_config.pad_token_id is None:
            text_config.pad_token_id = padding_besides(turn_ends(self.tokenizer).ids, text_config, self.tokenizer)
        self.pad_id: int = text_config.pad_token_id
        self.max_tokens: int = text_config.max_position_embeddings
        self.vocab_size: int = text_config.vocab_size
        self.reads_steps = hasattr(self.model, "score")
        self.packs = self._scores_packed_rows()

    def score(
        self, rollouts: pa.Table, level: ScoreLevel = "response", separator: str = "", offset: float = 0.0
    ) -> list[RewardResult]:
        """Score of every row of a ROLLOUTS table less the offset, at the places that `level` names; `separator` ends
        each step but the last. A row that is too long for the model, has a token outside its embedding, has no steps or
        tokens if the level asks for them, or gets a score that is not finite, has a failed outcome."""
        sequences = self.encode(rollouts)
        outcomes = [RewardResult(None, self._unusable(ids)) for ids in sequences]
        steps: list[Mapping[int, int]] = [{} for _ in sequences]
        for number, row in enumerate(rollouts.select(["response"]).to_pylist() if level != "response" else ()):
            steps[number] = self._places(sequences[number], row["response"], separator if level in _OF_STEPS else None)
            if not steps[number]:
                outcomes[number] = RewardResult(None, "error: the reward model's chat template changes the response")
        fitting = [row for row, outcome in enumerate(outcomes) if not outcome.status]
        lengths, forward = {row: len(sequences[row]) for row in fitting}, self._packed if self.packs else self._padded
        for batch in budget_batches(lengths, self.micro_batch_tokens, packed=self.packs):
            places = [list(steps[row].values()) for row in batch] if level != "response" else None
            scores = iter(forward([sequences[row] for row in batch], places))
            for row in batch:
                own = list(islice(scores, max(1, len(steps[row]))))
                wrong = next((score for score in own if not math.isfinite(score)), None)
                found = _outcome(level, list(steps[row]), own, offset)
                outcomes[row] = found if wrong is None else RewardResult(None, f"not a finite number: {wrong}")
        return outcomes

    def _places(self, ids: list[int], text: str, separator: str | None) -> Mapping[int, int]:
        """For the position at which each step of a response ends, the place of the token that has it, or by number the
        places of all its tokens without a separator; empty if the tokens do not have the text. White space alone is no
        step, and the last one ends with the sequence."""

        def decode(some: list[int]) -> str:
            return response_text(self.tokenizer, some)

        shown = decode(ids)
        before = shown.rfind(text)
        if before < 0:
            return {}
        if separator is None:
            # The token of the first character; an empty response has the one that ends the sequence.
            first = token_counts([before + min(1, len(text))], shown, ids, decode)[0] - 1
            return dict(enumerate(range(first, len(ids))))
        cuts = [found.end() for found in re.finditer(re.escape(separator), text) if text[found.end() :].strip()]
        starts = [0, *cuts]
        ends = [end for start, end in zip(starts, cuts, strict=False) if text[start:end].strip()]
        counts = token_counts([before + end for end in ends], shown, ids, decode)
        return dict(zip(ends, (count - 1 for count in counts), strict=True)) | {len(text): len(ids) - 1}

    def _unusable(self, ids: Sequence[int]) -> str:
        """Why the model cannot read a sequence; empty if it can."""
        if not 0 < len(ids) <= self.max_tokens:
            return f"error: {len(ids)} tokens; the reward model takes 1 to {self.max_tokens}"
        outside = max(ids) >= self.vocab_size
        return f"error: token {max(ids)}; the reward model's embedding has {self.vocab_size} rows" if outside else ""

    def encode(self, rollouts: pa.Table) -> list[list[int]]:
        """Token ids of prompt plus response for this model.

        If this model's tokenizer and chat template give the same prompt ids for the messages, the sampled ids are used;
        otherwise, and for the conversation of an episode, it is rendered again from its text, up to the end of the last
        turn: training examples of reward models end there as well. Without a chat template the sampled ids are used, if
        its tokenizer reads them as the policy's does. Raises ValueError if the vocabulary differs, and there is no chat
        template to render the conversation.
        """
        columns = ("messages", "conversation", "response", "prompt_ids", "response_ids")
        rendered: dict[str, list[int]] = {}
        sequences = []
        for row in rollouts.select(columns).to_pylist():
            messages, prompt_ids, response_ids = row["messages"], row["prompt_ids"], row["response_ids"]
            if self.tokenizer.chat_template is None:
                if not self._reads(response_ids, row["response"], episode=bool(row["conversation"])):
                    raise ValueError(
                        "the reward model's vocabulary differs from the policy's, and it has no chat template: "
                        "set roles.reward.model.chat_template"
                    )
                sequences.append(prompt_ids + response_ids)
                continue
            if row["conversation"]:
                sequences.append(encode_conversation(self.tokenizer, json.loads(row["conversation"])))
                continue
            if messages not in rendered:
                opened = render(self.tokenizer, json.loads(messages), open_turn=True)
                rendered[messages] = token_ids(self.tokenizer, opened)
            if rendered[messages] == prompt_ids:
                sequences.append(prompt_ids + response_ids)
            else:
                reply = {"role": "assistant", "content": row["response"]}
                sequences.append(encode_conversation(self.tokenizer, [*json.loads(messages), reply]))
        return sequences

    def gpu_peak(self) -> int:
        """Peak bytes that torch has allocated on the model's GPU; 0 on the CPU."""
        return torch.cuda.max_memory_allocated() if self.device == "cuda" else 0

    def _reads(self, ids: Sequence[int], text: str, *, episode: bool) -> bool:
        """Whether this tokenizer reads the text from the tokens; an episode's end with its last turn."""
        if max(ids, default=0) >= self.vocab_size:
            return False
        read = response_text(self.tokenizer, ids)
        return read.endswith(text) if episode else read == text

    @ieee_float32()
    def _scores_packed_rows(self) -> bool:
        """Whether the head's output at the last tokens of a packed row is the classifier's; tested by running it."""
        if not self.reads_steps or not takes_segments(self.model, self.device):
            return False
        sequences = ([3, 5, 7, 11], [13, 17], [19, 23, 29])
        packed, padded = (torch.tensor(run(sequences)) for run in (self._packed, self._padded))
        # As a fraction of the largest score. States in bfloat16 give a difference of up to 0.03.
        return bool((packed - padded).abs().max() <= ROUNDING[self.model.dtype] * padded.abs().max())

    @torch.inference_mode()
    def _packed(self, sequences: Sequence[Sequence[int]], places: Places = None) -> list[float]:
        """The scores at these places of each sequence, or one per sequence, from one row without padding."""
        ids = torch.tensor([token for sequence in sequences for token in sequence])
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        starts = lengths.cumsum(0) - lengths
        within = torch.arange(len(ids)) - starts.repeat_interleave(lengths)
        # A classifier of transformers reads its score at the last token that is not the padding token.
        last = [max((n for n, token in enumerate(ids_) if token != self.pad_id), default=0) for ids_ in sequences]
        read = [[place] for place in last] if places is None else places
        at = [start + place for start, own in zip(starts.tolist(), read, strict=True) for place in own]
        hidden = self.model.base_model(
            input_ids=ids[None].to(self.device),
            attention_mask=segment_table(starts, lengths, torch.zeros(len(lengths), 2, dtype=torch.int64)),
            position_ids=within[None].to(self.device),
            use_cache=False,
        ).last_hidden_state
        return self.model.score(hidden[0, torch.tensor(at).to(self.device)])[:, 0].float().tolist()

    @torch.inference_mode()
    def _padded(self, sequences: Sequence[Sequence[int]], places: Places = None) -> list[float]:
        """The scores at these places of each sequence, or one per sequence, from one right-padded batch."""
        width = max(len(ids) for ids in sequences)
        input_ids = torch.full((len(sequences), width), self.pad_id, dtype=torch.long)
        mask = torch.zeros((len(sequences), width), dtype=torch.long)
        for row, ids in enumerate(sequences):
            input_ids[row, : len(ids)] = torch.tensor(ids, dtype=torch.long)
            mask[row, : len(ids)] = 1
        inputs = {"input_ids": input_ids.to(self.device), "attention_mask": mask.to(self.device), "use_cache": False}
        if places is None:
            return self.model(**inputs).logits[:, 0].float().tolist()
        hidden = self.model.base_model(**inputs).last_hidden_state
        at = [row * width + place for row, own in enumerate(places) for place in own]
        return self.model.score(hidden.flatten(0, 1)[torch.tensor(at).to(self.device)])[:, 0].float().tolist()


def _outcome(level: ScoreLevel, ends: Sequence[int], scores: Sequence[float], offset: float) -> RewardResult:
    """The outcome of a response with these scores, of steps that end at these positions: sigmoids, as trained."""
    if level not in _OF_STEPS:
        return RewardResult(fmean(scores) - offset)
    chances = [1.0 / (1.0 + math.exp(-max(score, -700.0))) - offset for score in scores]
    steps = tuple(zip(ends, chances, strict=True)) if level == "step" else ()
    return RewardResult(_OF_STEPS[level](chances), steps=steps)


def _score_in_float32(model: PreTrainedModel) -> None:
    """Make the head compute in float32, as in training: a score of 8 to 16 has neighbours 0.06 apart in bfloat16."""
    backbone = set(model.base_model.modules())
    outside = [module for module in model.modules() if module not in backbone]
    heads = [module for module in outside if type(module) is nn.Linear and module.out_features == 1]
    for head in heads:
        head.__class__ = Float32Head
    if not heads and model.dtype != torch.float32:
        rounded = str(model.dtype).removeprefix("torch.")
        logger.warning("scores are rounded to %s: %s has no linear head of one output", rounded, type(model).__name__)


def budget_batches(lengths: dict[int, int], max_tokens: int, *, packed: bool = False) -> Iterator[list[int]]:
    """Split rows into batches of at most `max_tokens` tokens, grouping rows of similar length. Without `packed`,
    padding is included. A longer row forms its own batch."""
    batch: list[int] = []
    total = 0
    for row in sorted(lengths, key=lambda row: lengths[row]):
        total += lengths[row]
        if batch and (total if packed else lengths[row] * (len(batch) + 1)) > max_tokens:
            yield batch
            batch, total = [], lengths[row]
        batch.append(row)
    if batch:
        yield batch
