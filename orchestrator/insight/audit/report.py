"""The report of an audit: metrics, result, and what to do about each cause."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from troupe.orchestrator.errors import TroupeError
from troupe.orchestrator.insight.audit.attribution import Cause, Gap
from troupe.workers.contract.audit import DOUBLED, MISSING, STALE, PromptDifference

_WEIGHTS = "the update did not reach all weights that are used"
_ADAPTER = "the engine does not compute with the adapter of this version"
_ADAPTERS = {MISSING: "no adapter", DOUBLED: "an adapter that counts twice", STALE: "the adapter of before"}
_REMEDIES = {
    ("sampler", "temperature"): "sampling and log-probs must use sampling.temperature: check that nothing else sets a "
    "temperature, and that the engine returns processed log-probs",
    ("trainer", "temperature"): "the trainer must divide its logits by sampling.temperature, once",
    ("sampler", "head"): "the engine computes its output head in a shorter type than model.float32_head and "
    "model.dtype say: check that this version of vLLM supports head_dtype for this model",
    ("trainer", "head"): "the trainer computes its output head in a shorter type than model.float32_head and "
    "model.dtype say: check that the model's head is a linear layer",
    ("sampler", "top_p"): "training samples must not be truncated: remove top-p from the sampler",
    ("sampler", "top_k"): "training samples must not be truncated: remove top-k from the sampler",
    ("sampler", "positions"): "the engine numbers its tokens in another way than the model was trained: check its "
    "version and the model's rope parameters",
    ("trainer", "positions"): "the trainer numbers its tokens in another way than the model was trained: set "
    "roles.policy.packing to false",
    ("sampler", "weights"): f"{_WEIGHTS}: do not train on these samples; start the engines again, and report the model "
    "and the version of vLLM",
    ("trainer", "weights"): "the trainer does not hold the weights of the checkpoint: resume from another one",
    ("sampler", "adapter"): f"{_ADAPTER}: do not train on these samples; start the engines again, and report the model "
    "and the version of vLLM",
    ("trainer", "adapter"): "the trainer does not hold the adapter of the checkpoint: resume from another one",
    ("sampler", "prefix cache"): "the engine reuses states of older weights: set roles.rollout.enable_prefix_caching "
    "to false",
}
_UNEXPLAINED = "compare the versions of vLLM and transformers, and whether both support the model"
_TEMPLATE = "the engine renders prompts in another way than transformers does: check model.chat_template and that all "
_TEMPLATE += "nodes have the same tokenizer files"


class AuditFailed(TroupeError):
    """Sampler and trainer do not agree, and rounding does not explain it."""


@dataclass(frozen=True)
class AuditReport:
    """The findings of one audit."""

    weights: str
    """What was compared: `the initial weights`, or `the checkpoint of step 40`."""
    version: int
    dtype: str
    gaps: tuple[Gap, ...]
    """The gap of every engine and of the trainer."""
    between: float
    """Mean |sampler - trainer| in nats."""
    prompts: int
    prompt_differences: tuple[PromptDifference, ...]
    seconds: dict[str, float]
    """Duration by phase."""

    @property
    def passed(self) -> bool:
        """Whether rounding explains every gap, and prompts are rendered as transformers renders them."""
        return not self.prompt_differences and all(gap.passed for gap in self.gaps)

    @property
    def tokens(self) -> int:
        """Sampled tokens that were compared."""
        return sum(gap.tokens for gap in self.gaps if gap.side == "sampler")

    def lines(self) -> list[str]:
        """The report as text."""
        seconds = ", ".join(f"{name} {value:.1f} s" for name, value in self.seconds.items())
        lines = [f"audit of {self.weights}: {self.tokens} sampled tokens, {self.dtype} ({seconds})"]
        for gap in self.gaps:
            result = "explained by rounding" if gap.passed else "NOT explained by rounding"
            lines.append(
                f"  {gap.worker}: mean gap to the float32 scorer {gap.mean:.2g} nats (99th percentile {gap.p99:.2g}); "
                f"rounding {gap.rounding:.2g}: {result}"
            )
        lines.append(f"  sampler and trainer: mean gap {self.between:.2g} nats")
        if self.prompts:
            same = (
                "all as transformers renders them"
                if not self.prompt_differences
                else "NOT as transformers renders them"
            )
            lines.append(f"  prompts: {self.prompts} compared, {same}")
        lines += [f"  {line}" for line in self.findings()]
        return [*lines, "passed" if self.passed else "FAILED"]

    def findings(self) -> list[str]:
        """A line for every cause, with its remedy."""
        found = [f"{gap.worker}: {_causes(gap)}; {_remedy(gap)}" for gap in self.gaps if not gap.passed]
        for one in self.prompt_differences[:1]:
            found.append(
                f"template: prompt {one.prompt_uid} differs from token {one.position} on: the engine has "
                f"{one.found!r}, transformers has {one.expected!r}; {_TEMPLATE}"
            )
        return found

    def as_json(self) -> dict[str, Any]:
        """The report as JSON-ready data."""
        return asdict(self) | {"passed": self.passed, "findings": self.findings()}

    def require(self) -> None:
        """Raise AuditFailed unless the audit passed."""
        if not self.passed:
            head = (
                "sampler and trainer do not agree, and rounding does not explain it (`troupe audit` has the metrics):"
            )
            raise AuditFailed("\n  ".join([head, *self.findings()]))


def _causes(gap: Gap) -> str:
    first = gap.causes[0]
    if first.kind == "unexplained" and first.samples_only:
        return (
            "the log-probs are right, but the tokens are not drawn from them, and no single cause explains how "
            f"(the best candidates: {first.about})"
        )
    if first.kind == "unexplained":
        return f"no single cause explains the gap of {gap.mean:.2g} nats ({first.about})"
    if first.samples_only:
        return f"the log-probs are right, but the tokens are drawn with {_named(first)}"
    others = " or ".join(_named(cause) for cause in gap.causes)
    return f"{others} explains {first.share:.1%} of the gap of {gap.mean:.2g} nats"


def _named(cause: Cause) -> str:
    words = {
        "temperature": f"temperature {cause.about}",
        "head": f"an output head in {cause.about}",
        "top_p": f"top-p {cause.about}",
        "top_k": f"top-k {cause.about}",
        "positions": f"shifted positions ({cause.about})",
        "weights": f"older weights in {cause.about}",
        "adapter": _ADAPTERS.get(cause.about, cause.about),
        "prefix cache": "a stale prefix cache",
    }
    return words.get(cause.kind, cause.kind)


def _remedy(gap: Gap) -> str:
    return _REMEDIES.get((gap.side, gap.causes[0].kind), _UNEXPLAINED)
