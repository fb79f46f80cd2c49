"""The base of every configuration model, and what all of them share: devices, data types, temperatures, models."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from troupe.workers.contract.consequences import COUNTED, Consequences

Device = Literal["cpu", "cuda"]


Dtype = Literal["bfloat16", "float16", "float32"]


MIN_TEMPERATURE = 0.01
"""vLLM raises a lower temperature above 0 to this one, and the trainer would divide its logits by another number."""


MAX_TEMPERATURE = 2.0
"""vLLM refuses a request with a higher one."""


NO_TEMPLATE = "none"
"""`model.chat_template` of a model without one."""


class Frozen(BaseModel):
    """Base of every configuration model: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
    consequences: ClassVar[Consequences | None] = None
    """Consequences of the class's fields without their own."""


def first_problem(error: ValidationError) -> str:
    """The first of a validation's errors in one line, with the place of the field."""
    first = error.errors()[0]
    place, text = ".".join(map(str, first["loc"])), str(first["msg"]).removeprefix("Value error, ")
    return f"{place}: {text}" if place else text


def _sampled_as_configured(temperature: float) -> float:
    if 0.0 < temperature < MIN_TEMPERATURE:
        why = f"vLLM would sample at {MIN_TEMPERATURE}"
        raise ValueError(f"must be 0 (greedy) or at least {MIN_TEMPERATURE}, got {temperature}: {why}")
    return temperature


GreedyOrTemperature = Annotated[float, Field(ge=0.0, le=MAX_TEMPERATURE), AfterValidator(_sampled_as_configured)]
"""Softmax temperature; 0: greedy."""


class ModelConfig(Frozen):
    """The pretrained model a role starts from."""

    consequences: ClassVar = COUNTED
    path: Annotated[str, Consequences(path="model")]
    """Folder with a Hugging Face model (config, safetensors, tokenizer), or its name on the hub (`org/name`)."""
    revision: str | None = Field(default=None, min_length=1)
    """Branch, tag or commit of a model on the hub; null: main. A run is pinned to the commit. Folders have none."""
    adapter: Annotated[str | None, Consequences(path="path")] = Field(default=None, min_length=1)
    """Folder of an adapter (LoRA, peft's format) for the model, such as `troupe export` writes. Adapters that train
    (`lora`) start from it, with the same rank, alpha and targets. Elsewhere it is added to the weights when they are
    loaded, in float32 before rounding once."""
    dtype: Dtype = "bfloat16"
    """Data type of the weights and of matrix multiplications. float16 rounds a number less than bfloat16, 11 bits
    instead of 8, so that sampler and trainer agree more closely, but holds none above 65,504: its losses are scaled,
    and an update whose gradient overflows is skipped."""
    float32_head: bool = True
    """Compute logits in float32 from the 16-bit states and weights, in vLLM, in training and in scoring. This brings
    the log-probs of sampler and trainer nearer to each other. Without effect in float32. Values and scores of critics
    and reward models are always computed in float32."""
    trust_remote_code: bool = False
    """Run Python code from the model's folder. Leave it off unless you trust that code."""
    chat_template: Annotated[str | None, Consequences(path="template")] = Field(default=None, min_length=1)
    """Jinja file with the chat template to use instead of the tokenizer's, also in exports; `none`: no template,
    so that a prompt is the text as it stands, after what the tokenizer puts before a text (such as a BOS token); null:
    the tokenizer's own."""

    allow_special: bool = False
    """Whether the text of a special token (such as `<|im_end|>`) in data, in an answer of an environment or in the
    result of a tool becomes that token. False: it is text, so that nobody but the chat template opens or ends a turn.
    Set it for data that has the template's tokens in it."""

    @property
    def plain(self) -> bool:
        """Whether there is no chat template: prompts and responses are texts."""
        return self.chat_template == NO_TEMPLATE

    @property
    def computes_float32_logits(self) -> bool:
        """Whether the output head computes in a different type from the other layers."""
        return self.float32_head and self.dtype != "float32"


class VerifiedModel(ModelConfig):
    """A model whose weights the run has written itself: an engine that loads others does not start."""

    weights_digest: str
    """`troupe.workers.contract.model_files.tensors_digest_of` of its files."""
