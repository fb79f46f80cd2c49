"""Adapters on real DeepSpeed: ZeRO 0-3, one and two ranks, float32 and bfloat16, compared with plain peft and torch.

The groups run one after another, and each loads the checkpoints of the group before: from one rank to two and back.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file

from tests.real.models import save_llama
from tests.real.ranks import meet, rank_context, reported, wait_for_ranks
from tests.real.test_trainer import CASES, MANY_BATCHES, TWO_RANKS, batch, equal, rank_plan, weights_of
from troupe.workers.contract.algorithm_config import AdvantageConfig, CriticLossConfig, PolicyLossConfig
from troupe.workers.contract.config import (
    CriticConfig,
    PolicyConfig,
    ReferenceConfig,
    SamplingConfig,
    TeacherSettings,
)
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.messages import RankPlan
from troupe.workers.contract.offline_config import DpoLossConfig, ExampleConfig, OfflineConfig
from troupe.workers.contract.offline_messages import EXAMPLE_BATCH
from troupe.workers.contract.trainer_config import LoraConfig, TrainerConfig
from troupe.workers.critic import CriticWorker
from troupe.workers.models.adapter_files import DESCRIPTION, Description
from troupe.workers.models.digests import base_digest
from troupe.workers.models.modeling import load_causal
from troupe.workers.offline import ExamplePolicyWorker
from troupe.workers.policy import PolicyWorker
from troupe.workers.reference import ReferenceWorker
from troupe.workers.training.adapter import ModelAdapter
from troupe.workers.training.checkpoint_files import read_shard
from troupe.workers.training.rank import TrainingRank
from troupe.workers.weights.file import read_weights

pytestmark = pytest.mark.long

LORA = LoraConfig(rank=3, alpha=6, rslora=True)
TEACHER = LoraConfig(rank=2, alpha=6, targets=("q_proj", "up_proj"))
"""Adapters of a teacher with the policy's model; their folder is in the model's."""
TARGETS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
GROUPS = {"first": 1, "second": 2, "last": 1}
"""Ranks of the groups, which run in this order; the last one only continues from the second one's checkpoints."""
TIMEOUT_S = 300.0
UPDATES = 3
DPO_UPDATES = 4
BETA = 0.3
PAIRS = [
    ([5, 9, 200], [[17, 18, 900], [40, 41]]),
    ([7], [[300, 301], [302, 5, 6, 8]]),
    ([11, 12, 13, 14], [[21], [22, 23, 24]]),
]
"""(prompt, better and worse answer) of preferences."""


def config(model: str, stage: int, dtype: str, lora: LoraConfig = LORA) -> PolicyConfig:
    """A policy with adapters, and their base model as its reference."""
    source = ModelConfig(path=model, dtype=dtype)  # pyright: ignore[reportArgumentType]
    return PolicyConfig(
        model=source,
        trainer=TrainerConfig(
            learning_rate=1e-2,
            adam_eps=1e-2,
            max_grad_norm=0.5,
            zero_stage=stage,  # pyright: ignore[reportArgumentType]
            gradient_checkpointing=stage == 1,
            threads=1,
            ema_decay=0.5,
        ),
        loss=PolicyLossConfig(kl_coef=0.1),
        advantage=AdvantageConfig(estimator="group"),
        sampling=SamplingConfig(temperature=0.9, max_tokens=8),
        run_id="lora-test",
        reference_model=source,
        teachers={"teacher.math": TeacherSettings()},
        teacher_adapters={"teacher.math": f"{model}/teacher"},
        total_updates=20,
        seed=1,
        device="cpu",
        share_prompts=True,
        lora=lora,
    )


def critic_config(model: str, stage: int) -> CriticConfig:
    """A critic with adapters, whose head trains too."""
    policy = config(model, stage, "float32")
    return CriticConfig(
        model=policy.model,
        trainer=policy.trainer.model_copy(update={"ema_decay": 0.0}),
        loss=CriticLossConfig(value_clip=0.5),
        total_updates=20,
        seed=1,
        device="cpu",
        lora=LORA,
    )


def dpo_config(model: str, stage: int) -> OfflineConfig:
    """DPO with adapters, whose reference is the model without them."""
    policy = config(model, stage, "float32")
    return OfflineConfig(
        model=policy.model,
        trainer=policy.trainer,
        loss=DpoLossConfig(beta=BETA),
        examples=ExampleConfig(max_length=16, micro_batch_tokens=64),
        reference_model=policy.model,
        total_updates=20,
        seed=1,
        device="cpu",
        lora=LORA,
    )


def pairs() -> pa.Table:
    """An EXAMPLE_BATCH table of `PAIRS`."""
    rows = [
        {"prompt_uid": f"p{number}", "sample_index": member, "attempt": 0, "prompt_ids": prompt}
        | {"response_ids": answer, "loss_mask": [True] * len(answer), "ref_logprobs": None}
        | {"score": float(-member), "margin": 0.0, "desirable": True}
        for number, (prompt, answers) in enumerate(PAIRS)
        for member, answer in enumerate(answers)
    ]
    return pa.Table.from_pylist(rows, schema=EXAMPLE_BATCH)


def logprobs(table: pa.Table) -> list[list[float]]:
    """The scores of all rows, by prompt."""
    column = next(name for name in table.column_names if name.endswith(("_logprobs", "teacher.math")))
    rows = zip(table["prompt_uid"].to_pylist(), table[column].to_pylist(), strict=True)
    return [scores for _, scores in sorted(rows, key=lambda row: str(row[0]))]


def tensors(worker: TrainingRank) -> dict[str, torch.Tensor]:
    """The adapters, without their description."""
    return {name: tensor for name, tensor in weights_of(worker).items() if name != DESCRIPTION}


def frozen(worker: TrainingRank) -> dict[str, torch.Tensor]:
    """This rank's part of what does not train."""
    parameters = worker.engine.module.named_parameters()
    return {
        name: getattr(parameter, "ds_tensor", parameter).detach().clone()
        for name, parameter in parameters
        if not parameter.requires_grad
    }


class Scenario:
    """All cases on one rank."""

    def __init__(self, rank: int, world: int, model: str, out: Path) -> None:
        self.rank, self.world, self.model, self.out = rank, world, model, out
        self.plan = rank_plan(TWO_RANKS if world == 2 else MANY_BATCHES, rank)
        self.facts: dict[str, Any] = {}

    def build(self, stage: int, dtype: str) -> PolicyWorker:
        worker = PolicyWorker(config(self.model, stage, dtype), "policy")
        worker.build()
        return worker

    def case(self, stage: int, dtype: str) -> None:
        """Score, update, save, update on; repeat from the checkpoint."""
        name, table = f"{stage}-{dtype}", batch()
        worker = self.build(stage, dtype)
        base, start = frozen(worker), tensors(worker)
        assert sum(part.numel() for part in base.values()) > 100_000
        policy, reference = self.scores(worker)
        teacher = self.taught(worker)
        facts: dict[str, Any] = {"equal at start": policy == reference, "taught": teacher}
        worker.update(self.plan, table)
        digest = worker.digest()
        worker.offload_states()  # as on the GPU of an engine; a worker that resumes keeps them
        facts["offloaded"] = worker.digest() == digest
        checkpoint = self.out / f"checkpoint-{name}"
        worker.save(str(checkpoint))
        for _ in range(UPDATES - 1):
            worker.update(self.plan, table)
            worker.offload_states()
        end, end_digest = tensors(worker), worker.digest()
        # A changes by less than bfloat16 has room for: its gradient is multiplied by B, which starts at 0.
        facts["changed"] = all(not torch.equal(start[key], end[key]) for key in end if "lora_B" in key)
        facts["base unchanged"] = equal(base, frozen(worker))
        policy_end, reference_end = self.scores(worker)
        facts["reference unchanged"] = reference_end == reference
        facts["teacher unchanged"] = self.taught(worker) == teacher
        facts["unmoved by the teacher"] = worker.digest() == end_digest and equal(end, tensors(worker))
        facts["policy changed"] = policy_end != policy
        facts["digest changed"] = digest != end_digest
        facts["saved"] = self.saved(checkpoint, stage)
        facts["logprobs"] = policy_end
        worker.export(str(self.out / f"export-{name}"))
        worker.export(str(self.out / f"average-{name}"), average=True)
        published = worker.publish_weights(3)
        if published is not None:
            received = {key: tensor.clone() for key, tensor in read_weights(published)}
            described = Description.of(received.pop(DESCRIPTION))
            facts["published"] = [equal(received, end), described.base, described.config["r"], published.nbytes]
        worker.release()
        facts["resumed"] = self.resumed(stage, dtype, checkpoint, end, end_digest)
        facts["shortened"] = self.shortened(stage, dtype)
        self.facts[name] = facts

    def scores(self, worker: PolicyWorker) -> tuple[list[list[float]], list[list[float]]]:
        """Log-probs of this rank's rows under the policy and under its reference."""
        return logprobs(worker.compute_logprobs(self.plan, batch())[1]), logprobs(
            worker.reference_logprobs(self.plan, batch())[1]
        )

    def taught(self, worker: PolicyWorker) -> list[list[float]]:
        """Log-probs of this rank's rows under the teacher."""
        return logprobs(worker.teacher_logprobs(self.plan, "teacher.math", batch())[1])

    def separate(self) -> None:
        """Log-probs of this rank's rows under the teacher as a separate model."""
        source = ModelConfig(path=self.model, adapter=f"{self.model}/teacher", dtype="float32")
        settings = {"temperature": 0.9, "micro_batch_tokens": 64, "threads": 1, "device": "cpu"}
        worker = ReferenceWorker(ReferenceConfig(model=source, column="teacher.math", **settings), "teacher")
        worker.start()
        self.facts["separate"] = logprobs(worker.score(self.plan, batch())[1])
        worker.close()

    def started(self, stage: int) -> None:
        """A policy that starts from the teacher's adapter, which is its reference: the scores of both, and after an
        update."""
        own = config(self.model, stage, "float32", TEACHER)
        source = own.model.model_copy(update={"adapter": f"{self.model}/teacher"})
        worker = PolicyWorker(own.model_copy(update={"model": source, "reference_model": source}), "policy")
        worker.build()
        before = self.scores(worker)
        worker.update(self.plan, batch())
        self.facts[f"started-{stage}"] = [*before, *self.scores(worker)]
        worker.release()

    def saved(self, checkpoint: Path, stage: int) -> list[str]:
        """Names of the weights in the checkpoint's model file."""
        of_rank = f"zero_pp_rank_{self.rank}_" if stage == 3 else ""
        file = checkpoint / "state" / f"{of_rank}mp_rank_00_model_states.pt"
        return sorted(read_shard(file, mapped=True)["module"])

    def resumed(
        self, stage: int, dtype: str, checkpoint: Path, end: dict[str, torch.Tensor], digest: str
    ) -> list[bool]:
        """Whether the remaining updates give the same weights again."""
        worker = self.build(stage, dtype)
        worker.load(str(checkpoint))
        for _ in range(UPDATES - 1):
            worker.update(self.plan, batch())
        same = [equal(end, tensors(worker)), worker.digest() == digest]
        worker.release()
        return same

    def shortened(self, stage: int, dtype: str) -> list[bool]:
        """Whether a step that is shortened to a half stops between, and one that is shortened to nothing is undone."""
        worker = self.build(stage, dtype)
        worker.store_distributions(self.plan, batch(), 1, weights=True)
        before = tensors(worker)
        worker.update(self.plan, batch())
        after, whole = tensors(worker), worker.divergence()[0]
        half = worker.shorten_step(0.5)[0]
        middle = tensors(worker)
        halved = all(
            torch.allclose(middle[name].double(), (before[name].double() + after[name].double()) / 2, atol=1e-6)
            for name in before
        )
        none = worker.shorten_step(0.0)[0]
        nearer = (0.0 < half < whole) == (self.rank == 0)  # the other rank's row has no response
        found = [not equal(before, after), halved, nearer, equal(before, tensors(worker)), none == 0.0]
        worker.release()
        return found

    def resharded(self, stage: int, dtype: str, before: Path) -> None:
        """The remaining updates, from the checkpoint of a group of another size."""
        worker = self.build(stage, dtype)
        self.facts[f"resharded-{stage}-{dtype}"] = worker.load(str(before / f"checkpoint-{stage}-{dtype}"))
        for _ in range(UPDATES - 1):
            worker.update(self.plan, batch())
        worker.export(str(self.out / f"resharded-{stage}-{dtype}"))
        worker.release()

    def critic(self, stage: int) -> None:
        """Updates of a critic, of which the last ones are repeated from a checkpoint."""
        worker, table = CriticWorker(critic_config(self.model, stage), "critic"), batch()
        worker.build()
        base, start = frozen(worker), tensors(worker)
        errors = [worker.update(self.plan, table).values["value_error"] for _ in range(2)]
        checkpoint = self.out / f"critic-{stage}"
        worker.save(str(checkpoint))
        errors += [worker.update(self.plan, table).values["value_error"] for _ in range(4)]
        end = tensors(worker)
        changed = [name for name in end if not torch.equal(start[name], end[name])]
        alike = equal(base, frozen(worker))
        worker.release()
        worker = CriticWorker(critic_config(self.model, stage), "critic")
        worker.build()
        worker.load(str(checkpoint))
        for _ in range(4):
            worker.update(self.plan, table)
        self.facts[f"critic-{stage}"] = [errors, changed, alike, equal(end, tensors(worker))]
        worker.export(str(self.out / f"critic-export-{stage}"))
        worker.release()

    def dpo(self, stage: int) -> None:
        """Updates on preferences, in two micro-batches on each rank."""
        worker, table = ExamplePolicyWorker(dpo_config(self.model, stage), "policy"), pairs()
        worker.build()
        layout = [((0, 1), (2, 3, 4, 5))] if self.world == 1 else [((0, 1), (2, 3)), ((4, 5), ())]
        plan = RankPlan(layout[self.rank], 6, len(PAIRS), packed=worker.packs())
        worker.update(plan, self.referred(worker, table))
        table = self.referred(worker, table)  # the reference stays the model without adapters
        metrics = [worker.update(plan, table).values for _ in range(DPO_UPDATES - 1)]
        self.facts[f"dpo-{stage}"] = [line["margin"] for line in metrics]
        worker.export(str(self.out / f"dpo-{stage}"))
        worker.release()

    def referred(self, worker: ExamplePolicyWorker, table: pa.Table) -> pa.Table:
        """The preferences with the log-probs of the reference, which each rank computes for all of them."""
        everything = RankPlan((tuple(range(len(table))),), 6, len(PAIRS), packed=worker.packs())
        return worker.attach(table, worker.reference_logprobs(everything, table)[1])[1]

    def refusals(self) -> None:
        """A checkpoint of adapters of another base model, and targets that the model does not have."""
        other = self.out / "other-base"
        shutil.copytree(self.model, other)
        settings = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps(settings | {"bos_token_id": 7}))
        untaught = config(str(other), 1, "float32").model_copy(update={"teachers": {}, "teacher_adapters": {}})
        worker = PolicyWorker(untaught, "policy")
        worker.build()
        try:
            worker.load(str(self.out / "checkpoint-1-float32"))
        except ValueError as error:
            self.facts["other base"] = str(error)
        worker.release()
        lora = LORA.model_copy(update={"targets": ("q_proj", "query")})
        try:
            PolicyWorker(config(self.model, 1, "float32", lora), "policy").build()
        except ValueError as error:
            self.facts["other targets"] = str(error)


def rank_main(rank: int, world: int, model: str, out: Path, before: Path | None, addresses: Any) -> None:
    """Entry of the process of one rank."""
    os.environ["TORCH_EXTENSIONS_DIR"] = str(out / "compiled")
    with reported(rank, out):
        worker = PolicyWorker(config(model, 0, "float32"), "policy")
        worker.join(meet(worker, rank, world, addresses))
        scenario = Scenario(rank, world, model, out)
        last = out.name.startswith("last")
        for stage, dtype in CASES:
            if not last:
                scenario.case(stage, dtype)
            if before is not None:
                scenario.resharded(stage, dtype, before)
        for stage in () if last else (0, 3):
            scenario.started(stage)
            scenario.critic(stage)
            scenario.dpo(stage)
        if before is None:
            scenario.refusals()
        scenario.separate()
        worker.close()
        (out / f"facts-{rank}.json").write_text(json.dumps(scenario.facts))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied two-layer Llama."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    save_llama(folder, vocab_size=4096, **sizes, tie_word_embeddings=True, initializer_range=0.1)
    (folder / "tokenizer_config.json").write_text('{"made_for": "this test"}')
    source = ModelConfig(path=str(folder), dtype="float32")
    adapter = ModelAdapter(load_causal(source), TEACHER, source)
    torch.manual_seed(2)
    moved = {name: tensor.detach() + 0.1 * torch.randn_like(tensor) for name, tensor in adapter.named_parameters()}
    adapter.write(folder / "teacher", str(folder), moved)
    return folder


@pytest.fixture(scope="module")
def groups(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Output folders of the groups, in order."""
    context = rank_context()
    folders: list[Path] = []
    for name, world in GROUPS.items():
        out, addresses = tmp_path_factory.mktemp(name), context.Queue()
        before = folders[-1] if folders else None
        ranks = [
            context.Process(target=rank_main, args=(rank, world, str(model), out, before, addresses))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        wait_for_ranks(ranks, out, TIMEOUT_S)
        folders.append(out)
    return folders


def facts(folder: Path, rank: int = 0) -> dict[str, Any]:
    return json.loads((folder / f"facts-{rank}.json").read_text())


@pytest.mark.parametrize(("stage", "dtype"), CASES)
def test_only_the_adapters_train_and_are_saved(groups: list[Path], model: Path, stage: int, dtype: str) -> None:
    """At first the policy is its base bit for bit, so that a divergence from the base is exactly 0."""
    for folder, world in zip(groups[:2], GROUPS.values(), strict=False):
        for rank in range(world):
            found = facts(folder, rank)[f"{stage}-{dtype}"]
            for said in ("equal at start", "offloaded", "changed", "base unchanged", "reference unchanged"):
                assert found[said], (said, world, rank)
            assert found["policy changed"] == (rank == 0)  # the other rank's row has no response
            assert found["resumed"] == [True, True]
            assert found["shortened"] == [True] * 5
            assert found["saved"] and all(".lora_" in name for name in found["saved"])
            assert found["digest changed"]
        received, base, rank_of_adapter, nbytes = facts(folder)[f"{stage}-{dtype}"]["published"]
        assert (received, base, rank_of_adapter) == (True, base_digest(model), LORA.rank)
        assert nbytes < (model / "model.safetensors").stat().st_size / 10


@pytest.mark.parametrize(("stage", "dtype"), CASES)
def test_a_teacher_on_the_policys_model_is_the_separate_one(groups: list[Path], stage: int, dtype: str) -> None:
    """Before training and after it, and neither adapters nor digest notice it."""
    tolerance = 1e-5 if dtype == "float32" else 0.1
    for folder, world in zip(groups[:2], GROUPS.values(), strict=False):
        for rank in range(world):
            found, separate = facts(folder, rank)[f"{stage}-{dtype}"], facts(folder, rank)["separate"]
            assert found["teacher unchanged"] and found["unmoved by the teacher"]
            for own, expected in zip(found["taught"], separate, strict=True):
                assert own == pytest.approx(expected, abs=tolerance)
    taught, policy = (facts(groups[0])[f"{stage}-{dtype}"][name] for name in ("taught", "logprobs"))
    assert (
        max(abs(a - b) for one, other in zip(taught, policy, strict=True) for a, b in zip(one, other, strict=True))
        > 0.2
    )


@pytest.mark.parametrize("stage", [0, 3])
def test_an_adapter_that_training_starts_from_stays_the_reference(groups: list[Path], stage: int) -> None:
    for folder, world in zip(groups[:2], GROUPS.values(), strict=False):
        for rank in range(world):
            policy, reference, moved, still = facts(folder, rank)[f"started-{stage}"]
            assert policy == reference == still and (moved != still) == (rank == 0)
            assert [pytest.approx(own, abs=1e-5) for own in policy] == facts(folder, rank)["separate"]


@pytest.mark.parametrize(("stage", "dtype"), CASES)
def test_groups_of_any_size_train_the_same_adapters(groups: list[Path], stage: int, dtype: str) -> None:
    """Also where the first update was made by a group of another size."""
    expected = load_file(groups[0] / f"export-0-{dtype}" / "adapter_model.safetensors")
    tolerance = 1e-5 if dtype == "float32" else 4e-3
    exports = [folder / f"export-{stage}-{dtype}" for folder in groups[:2]]
    exports += [folder / f"resharded-{stage}-{dtype}" for folder in groups[1:]]
    for folder in exports:
        found = load_file(folder / "adapter_model.safetensors")
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=tolerance, msg=f"{folder} {name}")
    assert [facts(folder)[f"resharded-{stage}-{dtype}"] for folder in groups[1:]] == [1, 2]


def test_an_export_loads_in_peft_and_computes_what_the_trainer_does(groups: list[Path], model: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = groups[0] / "export-0-float32"
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, folder).eval()
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(model)
    assert set(settings["target_modules"]) == TARGETS
    rows = sorted(batch().to_pylist(), key=lambda row: row["prompt_uid"])
    for row, expected in zip(rows, facts(groups[0])["0-float32"]["logprobs"], strict=True):
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        with torch.no_grad():
            logits = loaded(ids).logits[0, len(row["prompt_ids"]) - 1 : -1] / 0.9
        chosen = torch.tensor(row["response_ids"], dtype=torch.int64)[:, None]
        found = torch.log_softmax(logits, -1).gather(-1, chosen)[:, 0]
        torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=1e-4)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert sum(".lora_" in name for name, _ in whole.named_parameters()) == 2 * 2 * len(TARGETS)
    average = load_file(groups[0] / "average-0-float32" / "adapter_model.safetensors")
    current = load_file(folder / "adapter_model.safetensors")
    assert average.keys() == current.keys() and not equal(average, current)


def test_a_checkpoint_on_another_base_and_unknown_targets_are_refused(groups: list[Path], model: Path) -> None:
    found = facts(groups[0])
    assert f"belongs to another base model: digest {base_digest(model)}, now " in found["other base"]
    assert (
        "roles.policy.lora.targets: LlamaForCausalLM has no linear layer query; there are: down_"
        in found["other targets"]
    )


@pytest.mark.parametrize("stage", [0, 3])
def test_a_critic_trains_its_adapters_and_its_head_and_exports_both(
    groups: list[Path], model: Path, stage: int
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    head, exports = "base_model.model.score.weight", list[dict[str, torch.Tensor]]()
    for folder in groups[:2]:
        errors, changed, base_alike, resumed = facts(folder)[f"critic-{stage}"]
        assert errors[-1] < errors[0]
        assert head in changed and len(changed) == 1 + 2 * 2 * len(TARGETS)
        assert base_alike and resumed
        exports.append(load_file(folder / f"critic-export-{stage}" / "adapter_model.safetensors"))
    assert exports[0].keys() == exports[1].keys() and exports[0][head].any()
    for name, tensor in exports[0].items():
        torch.testing.assert_close(exports[1][name], tensor, rtol=0, atol=1e-5, msg=name)
    plain = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(plain, groups[0] / f"critic-export-{stage}")
    assert torch.equal(loaded.state_dict()["base_model.model.score.modules_to_save.default.weight"], exports[0][head])


@pytest.mark.parametrize("stage", [0, 3])
def test_dpo_trains_the_adapters_that_plain_peft_and_torch_do(groups: list[Path], model: Path, stage: int) -> None:
    """The reference there is peft's model with its adapters disabled, and the loss is that of the paper (eq. 7)."""
    expected, margins = plain_dpo(model)
    for folder in groups[:2]:
        found = load_file(folder / f"dpo-{stage}" / "adapter_model.safetensors")
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=2e-5, msg=f"{folder} {name}")
        assert facts(folder)[f"dpo-{stage}"] == pytest.approx(margins, abs=1e-4)


def plain_dpo(model: Path) -> tuple[dict[str, torch.Tensor], list[float]]:
    """(adapters after all updates, mean margin of each update but the first), by peft and torch alone."""
    import peft
    from transformers import AutoModelForCausalLM

    base: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(1)
    settings = peft.LoraConfig(
        r=LORA.rank, lora_alpha=6, target_modules=sorted(TARGETS), use_rslora=True, task_type="CAUSAL_LM"
    )
    policy = peft.get_peft_model(base, settings)
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    trainer = dpo_config(str(model), 0).trainer
    optimizer = torch.optim.AdamW(
        trained,
        lr=trainer.learning_rate,
        betas=trainer.adam_betas,
        eps=trainer.adam_eps,
        weight_decay=trainer.weight_decay,
    )

    def logprob(prompt: list[int], answer: list[int]) -> torch.Tensor:
        logits = policy(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        return torch.log_softmax(logits, -1).gather(-1, torch.tensor(answer)[:, None]).sum()

    margins: list[float] = []
    for _ in range(DPO_UPDATES):
        leads: list[torch.Tensor] = []
        for prompt, (better, worse) in PAIRS:
            lead = logprob(prompt, better) - logprob(prompt, worse)
            with policy.disable_adapter(), torch.no_grad():
                reference = logprob(prompt, better) - logprob(prompt, worse)
            leads.append(BETA * (lead - reference))
        optimizer.zero_grad()
        (-torch.nn.functional.logsigmoid(torch.stack(leads)).mean()).backward()
        torch.nn.utils.clip_grad_norm_(trained, trainer.max_grad_norm)
        optimizer.step()
        margins.append(float(torch.stack(leads).detach().mean()))
    return peft.get_peft_model_state_dict(policy), margins[1:]
