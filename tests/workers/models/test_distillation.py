"""Divergences from a teacher against plain probabilities in float64, and against another library's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from types import SimpleNamespace
from typing import Any, cast, get_args

import pyarrow as pa
import pytest
import torch
from transformers import LlamaConfig

from tests.workers.models.test_modeling import FAMILIES, SAMPLES, SIZES, save_model
from tests.workers.models.test_token_batch import train_table
from troupe.workers.algorithms.teachers import Teacher, train_columns
from troupe.workers.contract.algorithm_config import AdvantageConfig, DistillConfig, PolicyLossConfig
from troupe.workers.contract.config import PolicyConfig, SamplingConfig, TeacherSettings
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.messages import TEACHER_TOKENS, RankPlan
from troupe.workers.contract.offline_config import ExampleConfig, KdLossConfig, OfflineConfig
from troupe.workers.contract.offline_messages import EXAMPLES
from troupe.workers.contract.trainer_config import TrainerConfig
from troupe.workers.data.examples import ExampleTable, assemble, attach
from troupe.workers.models.distillation import (
    LogitsReader,
    SquareSums,
    TopTeacher,
    TopTokens,
    WholeTeacher,
    bucketed,
)
from troupe.workers.models.modeling import CausalLogprobs, load_causal, score_plan
from troupe.workers.models.ragged import ragged
from troupe.workers.models.token_batch import TokenTable
from troupe.workers.offline import ExamplePolicyWorker
from troupe.workers.policy import PolicyWorker
from troupe.workers.training.deepspeed_engine import TrainEngine
from troupe.workers.training.zero3 import FrozenModule

DIVERGENCES = get_args(DistillConfig.model_fields["divergence"].annotation)
SUPPORTS = get_args(DistillConfig.model_fields["support"].annotation)
TOKENS, VOCABULARY, K = 6, 11, 3


def logits_of(seed: int, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return 3.0 * torch.randn((TOKENS, vocabulary), generator=torch.Generator().manual_seed(seed), dtype=torch.double)


def config_of(**fields: Any) -> DistillConfig:
    return DistillConfig(**({"coef": 1.0, "k": K, "beta": 0.3, "alpha": 0.2} | fields))


def one_teacher(ids: torch.Tensor, logprobs: torch.Tensor, config: DistillConfig) -> TopTeacher:
    return TopTeacher(ids[:, None], logprobs[:, None], torch.ones(len(ids), 1), config)


def teacher_of(config: DistillConfig, teacher: torch.Tensor) -> LogitsReader:
    """The teacher as the updates get it: its likeliest tokens, or states and a head."""
    if config.support == "teacher_top_k":
        ids, logprobs = TopTokens(config.k).read(teacher)
        return one_teacher(ids, logprobs, config)
    return WholeTeacher(teacher * 0.7, lambda states: states, 0.7, config)


def taught(samples: pa.Table, *scored: pa.Table, weights: Sequence[float] = (1.0,)) -> pa.Table:
    """The samples of TRAIN with the tokens of teachers that score all of them."""
    teachers = [
        Teacher(
            "",
            torch.full((len(SAMPLES),), weight),
            torch.empty(0),
            tuple(ragged(table.column(field.name)) for field in TEACHER_TOKENS),
        )
        for table, weight in zip(scored, weights, strict=True)
    ]
    lengths = torch.tensor([len(response) for _, response in SAMPLES])
    for name, column in train_columns(teachers, lengths).items():
        index = samples.schema.get_field_index(name)
        samples = samples.set_column(index, samples.schema.field(index), column)
    return samples


def plainly(student: torch.Tensor, teacher: torch.Tensor, config: DistillConfig) -> torch.Tensor:
    """The divergences by their formulas, in probabilities, token by token."""
    found = []
    for s, t in zip(student.softmax(-1), teacher.softmax(-1), strict=True):
        if config.support != "full":
            chosen = (t if config.support == "teacher_top_k" else s).argsort(descending=True)[: config.k]
            s, t = (torch.cat([one[chosen], 1 - one[chosen].sum(0, keepdim=True)]) for one in (s, t))
        first, second = config.beta * t + (1 - config.beta) * s, config.alpha * t + (1 - config.alpha) * s
        found.append(
            {
                "reverse": (s * (s / t).log()).sum(),
                "forward": (t * (t / s).log()).sum(),
                "jensen_shannon": config.beta * (t * (t / first).log()).sum()
                + (1 - config.beta) * (s * (s / first).log()).sum(),
                "skewed": (t * (t / second).log()).sum(),
            }[config.divergence]
        )
    return torch.stack(found)


def differences(support: str, divergence: str) -> tuple[float, float]:
    """Largest differences of the divergences, and of a gradient, from those of plain probabilities, each relative to
    the largest of these."""
    config, teacher, weights = config_of(support=support, divergence=divergence), logits_of(2), logits_of(3)[:, 0]
    ours, theirs = (logits_of(1).requires_grad_() for _ in range(2))
    (found,), expected = teacher_of(config, teacher).read(ours), plainly(theirs, teacher, config)
    (slope,), (own,) = (
        torch.autograd.grad((one * weights).sum(), at) for one, at in ((found, ours), (expected, theirs))
    )
    pairs = ((found.detach(), expected.detach()), (slope, own))
    value, gradient = (float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    return value, gradient


@pytest.mark.parametrize(("support", "divergence"), product(SUPPORTS, DIVERGENCES))
def test_value_and_gradient_are_those_of_plain_probabilities(support: str, divergence: str) -> None:
    assert max(differences(support, divergence)) < 1e-12


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_losses_of_several_teachers_are_added_each_with_its_weight(divergence: str) -> None:
    """A token may have fewer teachers than another: the others have weight 0, and no gradient."""
    config, shares = config_of(divergence=divergence), torch.rand(TOKENS, 3, dtype=torch.double)
    shares[::2, 1] = 0.0
    ours, theirs = (logits_of(1).requires_grad_() for _ in range(2))
    ids, logprobs = zip(*(TopTokens(K).read(logits_of(seed)) for seed in (2, 3, 4)), strict=True)
    logprobs[1][::2] = 0.0
    teachers = TopTeacher(torch.stack(ids, 1), torch.stack(logprobs, 1), shares, config)
    found = torch.cat(
        [part.read(logits)[0] for part, logits in zip(teachers.split(4), ours.tensor_split(4), strict=True)]
    )
    each = [shares[:, n] * plainly(theirs, logits_of(seed), config) for n, seed in enumerate((2, 3, 4))]
    expected = torch.stack(each).sum(0)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    (slope,), (own,) = (torch.autograd.grad(one.sum(), at) for one, at in ((found, ours), (expected, theirs)))
    torch.testing.assert_close(slope, own, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("support", "divergence"), product(SUPPORTS, DIVERGENCES))
def test_a_student_equal_to_its_teacher_has_neither_loss_nor_gradient(support: str, divergence: str) -> None:
    student = logits_of(1).requires_grad_()
    config = config_of(support=support, divergence=divergence)
    (found,) = teacher_of(config, student.detach()).read(student)
    (gradient,) = torch.autograd.grad(found.sum(), student)
    torch.testing.assert_close(found, torch.zeros_like(found), rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-12)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_truncated_support_is_a_lower_bound_that_rises_with_its_tokens(divergence: str) -> None:
    student, teacher = logits_of(1), logits_of(2)

    def of(**fields: Any) -> torch.Tensor:
        config = config_of(divergence=divergence, **fields)
        return teacher_of(config, teacher).read(student)[0]

    rising = [of(support="teacher_top_k", k=k) for k in range(1, VOCABULARY)]
    for fewer, more in zip(rising, [*rising[1:], of(support="full")], strict=True):
        assert (fewer <= more + 1e-12).all()
    torch.testing.assert_close(rising[-1], of(support="full"))
    assert (rising[0] < 0.9 * rising[-1]).any()


def test_float32_keeps_a_gradient_where_almost_nothing_is_left_to_other_tokens() -> None:
    exact = torch.zeros(1, VOCABULARY, dtype=torch.double)
    exact[0, :K] = 25.0
    slopes = []
    for logits in (exact, exact.float()):
        student = logits.clone().requires_grad_()
        teacher = bucketed(logits.flip(-1), torch.arange(K)[None])
        (found,) = one_teacher(torch.arange(K)[None], teacher, config_of(divergence="forward")).read(student)
        slopes.append(torch.autograd.grad(found.sum(), student)[0].double())
    torch.testing.assert_close(slopes[1], slopes[0], rtol=1e-4, atol=1e-6)


def test_a_teacher_with_a_larger_vocabulary_is_cut_or_refused() -> None:
    student, teacher = logits_of(1), logits_of(2, VOCABULARY + 4)
    whole = config_of(support="full")
    torch.testing.assert_close(
        teacher_of(whole, teacher).read(student), teacher_of(whole, teacher[:, :VOCABULARY]).read(student)
    )
    teacher[:, VOCABULARY:] = torch.tensor([-20.0, 20.0, -20.0, -20.0])
    with pytest.raises(ValueError, match=f"names token {VOCABULARY + 1}, and the policy has only {VOCABULARY}"):
        teacher_of(config_of(), teacher).read(student)
    with pytest.raises(ValueError, match="k must be less than the vocabulary, 11 tokens"):
        teacher_of(config_of(k=VOCABULARY), teacher).read(student)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelConfig, ModelConfig]:
    """A student, and a teacher of another size with the same vocabulary."""
    sizes: dict[str, Any] = SIZES | {"hidden_size": 24, "num_hidden_layers": 1}
    of = (FAMILIES["llama"], LlamaConfig(**sizes))
    first, second = (save_model(one, tmp_path_factory.mktemp(f"model-{number}")) for number, one in enumerate(of))
    return first, second


@pytest.mark.parametrize("support", SUPPORTS)
def test_a_model_compares_its_own_logits_however_they_are_cut(
    support: str, models: tuple[ModelConfig, ModelConfig]
) -> None:
    """From the teacher's table, or its states, to the gradient of the student's weights, in chunks of the head."""
    student, teacher = (load_causal(one) for one in models)
    samples, config = train_table(SAMPLES), config_of(support=support)
    scorer = CausalLogprobs(teacher, 0.7, chunks=2)
    plan = RankPlan(micro_batches=((0, 1), (), (2, 3)), total_loss_tokens=8, total_sequences=4)
    _, scored = score_plan(scorer, plan, [samples], "ref_logprobs", "cpu", TopTokens(K))
    samples = taught(samples, scored)
    table, weights = TokenTable(samples), list(student.parameters())
    rows = [3, 0, 2, 1]  # in another order than the table
    batch = table.batch(rows)
    own, its = (module.distributions(batch).double() for module in (CausalLogprobs(student, 0.7), scorer))
    expected = plainly(own, its, config)
    slopes = []
    for chunks in (1, 3, 20):
        stored = table.teachers(batch)
        assert stored is not None and len(stored[0]) == len(batch.targets)
        whole = WholeTeacher(scorer.teacher_states(batch), scorer.logits_of, 0.7, config)
        reader = whole if config.in_process else TopTeacher(*stored, config)
        logprobs, _, found = CausalLogprobs(student, 0.7, chunks)(batch=batch, reader=reader)
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(logprobs.double(), own.gather(1, batch.targets[:, None])[:, 0], rtol=1e-4, atol=1e-5)
        slopes.append(torch.cat([one.flatten() for one in torch.autograd.grad(found.sum(), weights)]))
    assert float(slopes[0].abs().max()) > 1e-3
    torch.testing.assert_close(slopes[1], slopes[0], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(slopes[2], slopes[0], rtol=1e-3, atol=1e-5)
    assert table.teachers(table.batch([])) is not None and TokenTable(train_table(SAMPLES)).teachers(batch) is None


def test_the_table_of_a_teacher_has_lists_of_k_tokens_and_one_more_log_prob(
    models: tuple[ModelConfig, ModelConfig],
) -> None:
    module = CausalLogprobs(load_causal(models[1]), 1.0)
    plan = RankPlan(micro_batches=((0, 1, 2, 3),), total_loss_tokens=8, total_sequences=4)
    _, scored = score_plan(module, plan, [train_table(SAMPLES)], "ref_logprobs", "cpu", TopTokens(K))
    lengths = [len(response) for _, response in SAMPLES]
    assert [len(one) for one in scored.column("teacher_ids").to_pylist()] == [K * length for length in lengths]
    logprobs: pa.ChunkedArray = scored.column("teacher_logprobs")
    assert [len(one) for one in logprobs.to_pylist()] == [(K + 1) * length for length in lengths]
    everything = torch.tensor([value for row in logprobs.to_pylist() for value in row]).view(-1, K + 1).exp().sum(-1)
    torch.testing.assert_close(everything, torch.ones(sum(lengths)))


def test_square_sums_and_log_probs_give_the_norm_of_the_gradient_by_the_logits(
    models: tuple[ModelConfig, ModelConfig],
) -> None:
    """Of each sampled token, as autograd has it: what the optimal token baseline weighs returns by."""
    module = CausalLogprobs(load_causal(models[0]), 0.7)
    plan = RankPlan(micro_batches=((2, 0), (), (3, 1)), total_loss_tokens=8, total_sequences=4)
    _, scored = score_plan(module, plan, [train_table(SAMPLES)], "old_logprobs", "cpu", SquareSums())
    batch = TokenTable(train_table(SAMPLES)).batch([2, 0, 3, 1])
    logits = module.distributions(batch).double().requires_grad_()
    logprobs = logits.log_softmax(-1).gather(1, batch.targets[:, None])[:, 0]
    (slopes,) = torch.autograd.grad(logprobs.sum(), logits)
    old, squares = (ragged(scored.column(name)).values.double() for name in ("old_logprobs", "square_sums"))
    torch.testing.assert_close(1.0 - 2.0 * old.exp() + squares, slopes.square().sum(-1), rtol=1e-5, atol=1e-7)


def offline_loss(worker: PolicyWorker, samples: pa.Table, scored: pa.Table, plan: RankPlan) -> torch.Tensor:
    """The loss of `kd` on the samples that a worker trains on, with the same models; the reference's scores are
    recorded in the samples or computed for the batch."""
    policy = worker._config
    config = OfflineConfig(
        **{name: value for name, value in policy if name in OfflineConfig.model_fields and name != "loss"},
        loss=KdLossConfig(distill=policy.loss.distill),
        examples=ExampleConfig(max_length=16, micro_batch_tokens=64, sampled=True),
    )
    trainer = ExamplePolicyWorker(config, "policy-0")
    trainer._engine, trainer._reference = worker._engine, worker._reference
    rows = {"score": 0.0, "margin": 0.0, "desirable": True, "member": 0}
    columns = ("prompt_ids", "response_ids", "loss_mask", "teacher_ids", "teacher_logprobs", "teacher_weights")
    tokens = samples.select(columns).to_pylist()
    examples = pa.Table.from_pylist([{"example": n, **rows, **one} for n, one in enumerate(tokens)], schema=EXAMPLES)
    picks = list(zip(samples.column("prompt_uid").to_pylist(), range(len(tokens)), strict=True))
    _, batch = assemble(picks, examples, config.examples)
    names = scored.schema.names
    keys = batch.select(["prompt_uid", "sample_index", "attempt"])
    again = pa.table(
        [*keys.columns, *(scored[name] for name in names[len(keys.columns) + 1 :])],
        names=[*keys.column_names, *names[len(keys.columns) + 1 :]],
    )
    losses = []
    for table in (batch, attach(batch, [again])):
        rows_of = ExampleTable(table)
        cut = rows_of.cut([0, 1, 2, 3], plan, "cpu")
        losses.append(trainer._loss(trainer.engine.module, cut, plan, 0.0).loss)
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0.0)
    return losses[0]


def policy_config(model: ModelConfig, distill: DistillConfig, **teacher: Any) -> PolicyConfig:
    """A policy whose loss is the divergence alone."""
    return PolicyConfig(
        model=model,
        trainer=TrainerConfig(),
        loss=PolicyLossConfig(objective="policy_gradient", distill=distill),
        advantage=AdvantageConfig(estimator="none"),
        sampling=SamplingConfig(temperature=0.7, max_tokens=8),
        run_id="teacher",
        total_updates=1,
        seed=1,
        device="cpu",
        **teacher,
    )


@pytest.mark.parametrize("support", SUPPORTS)
def test_the_policys_loss_has_the_divergence_from_its_teacher(
    support: str, models: tuple[ModelConfig, ModelConfig]
) -> None:
    """A micro-batch of an update, with the trainer's engine replaced by the model alone."""
    distill = config_of(support=support, coef=0.5)
    config = policy_config(models[0], distill, reference_model=models[1])
    student, teacher = (CausalLogprobs(load_causal(one), 0.7, chunks=2) for one in models)
    worker = PolicyWorker(config, "policy-0")
    worker._engine = cast(TrainEngine, SimpleNamespace(module=student, device=torch.device("cpu")))
    worker._reference = FrozenModule(teacher)
    plan = RankPlan(micro_batches=((0, 1, 2, 3),), total_loss_tokens=8, total_sequences=4)
    samples = train_table(SAMPLES)
    _, scored = worker.reference_logprobs(plan, samples)
    assert ("teacher_ids" in scored.column_names) == (support == "teacher_top_k")
    samples = taught(samples, scored) if support == "teacher_top_k" else samples
    batch, output = worker._of_rollouts(TokenTable(samples), plan, 0.0, [0, 1, 2, 3], student)
    own, its = (module.distributions(batch).double() for module in (student, teacher))
    expected = plainly(own, its, distill)
    assert output.loss.item() == pytest.approx(0.5 * float(expected.mean()), rel=1e-4)
    assert float(output.terms["distill_loss"]) == pytest.approx(output.loss.item(), rel=1e-6)
    assert float(output.sums["teacher_divergence"]) == pytest.approx(float(expected.sum()), rel=1e-4)
    weight = student.model.get_parameter("model.embed_tokens.weight")
    (slope,) = torch.autograd.grad(output.loss, [weight])
    assert float(slope.abs().max()) > 1e-3
    (offline,) = torch.autograd.grad(offline_loss(worker, samples, scored, plan), [weight])
    torch.testing.assert_close(offline, slope, rtol=1e-5, atol=1e-7)
    if support == "teacher_top_k":
        with pytest.raises(ValueError, match="the batch lacks the column teacher_ids"):
            worker._of_rollouts(TokenTable(train_table(SAMPLES)), plan, 0.0, [0], student)


@pytest.mark.parametrize("support", ["full", "student_top_k"])
def test_the_policys_average_teaches_with_all_of_its_logits(
    support: str, models: tuple[ModelConfig, ModelConfig]
) -> None:
    """The head runs in chunks of the update, when the weights are the policy's again."""
    distill = config_of(support=support, coef=0.5)
    own = {"teacher.own": TeacherSettings(average=True)}
    config = policy_config(models[0], distill, reference_model=None, teachers=own)
    student, teacher = (CausalLogprobs(load_causal(models[0]), 0.7, chunks=2) for _ in range(2))
    for weight in teacher.parameters():
        weight.data += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(5))

    @contextmanager
    def averaged() -> Iterator[None]:
        pairs = list(zip(student.parameters(), teacher.parameters(), strict=True))
        own = [one.detach().clone() for one, _ in pairs]
        for one, its in pairs:
            one.data.copy_(its.data)
        yield
        for (one, _), before in zip(pairs, own, strict=True):
            one.data.copy_(before)

    worker = PolicyWorker(config, "policy-0")
    engine = SimpleNamespace(module=student, device=torch.device("cpu"), averaged=averaged)
    worker._engine = cast(TrainEngine, engine)
    plan = RankPlan(micro_batches=((0, 1, 2, 3),), total_loss_tokens=8, total_sequences=4)
    table = TokenTable(train_table(SAMPLES, teacher_weights=[[1.0]] * len(SAMPLES)))
    batch, output = worker._of_rollouts(table, plan, 0.0, [0, 1, 2, 3], student)
    own, its = student.sampled_logits(*student.predictors(batch)).double(), teacher.distributions(batch).double()
    expected = 0.5 * plainly(own, its, distill).mean()
    assert expected.item() > 1e-3 and output.loss.item() == pytest.approx(expected.item(), rel=1e-4)
    weights = list(student.parameters())
    slopes = zip(*(torch.autograd.grad(loss, weights) for loss in (output.loss, expected)), strict=True)
    for found, slope in slopes:
        torch.testing.assert_close(found, slope, rtol=1e-3, atol=1e-6)


@pytest.mark.long  # TRL takes half a minute to import
@pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'")
def test_divergences_are_those_of_trl() -> None:
    from trl.experimental.gkd.gkd_trainer import GKDTrainer
    from trl.experimental.sdpo.loss_utils import compute_topk_self_distillation_loss

    student, teacher = logits_of(1), logits_of(2)
    betas = {"reverse": 1.0, "forward": 0.0, "jensen_shannon": 0.3}
    for divergence, beta in betas.items():
        config = config_of(support="full", divergence=divergence)
        theirs = GKDTrainer.generalized_jsd_loss(student, teacher, beta=beta, reduction="sum")
        torch.testing.assert_close(teacher_of(config, teacher).read(student)[0].sum(), theirs, rtol=1e-9, atol=0.0)
        config = config_of(support="student_top_k", divergence=divergence)
        theirs = compute_topk_self_distillation_loss(
            student, teacher, distillation_topk=K, distillation_alpha=beta, distillation_add_tail=True
        )
        torch.testing.assert_close(teacher_of(config, teacher).read(student)[0], theirs, rtol=1e-6, atol=1e-9)
