"""Routing replay: the trainer runs each token through the experts that the engine chose for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from tests.routes import own_routes, train_table
from troupe.workers.contract.algorithm_config import AdvantageConfig, PolicyLossConfig
from troupe.workers.contract.config import PolicyConfig, SamplingConfig, TeacherSettings
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.messages import RankPlan
from troupe.workers.contract.routes import write_routes
from troupe.workers.contract.trainer_config import TrainerConfig
from troupe.workers.models.capabilities import adapt
from troupe.workers.models.modeling import CausalLogprobs, score_plan
from troupe.workers.models.route_replay import RouteReplay
from troupe.workers.models.sequence_parallel import SequenceGroup, divide
from troupe.workers.models.token_batch import TokenTable
from troupe.workers.policy import PolicyWorker
from troupe.workers.training.deepspeed_engine import TrainEngine

LAYERS, EXPERTS, CHOSEN, VOCABULARY = 2, 8, 2, 48
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "initializer_range": 0.5,  # with the default, one expert does what another does
}
LATENT: dict[str, Any] = {
    "moe_intermediate_size": 24,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "n_shared_experts": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
HEADS: dict[str, Any] = {"head_dim": 16}
MIXTURES: dict[str, PreTrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, **HEADS, moe_intermediate_size=24, num_experts=EXPERTS, num_experts_per_tok=CHOSEN
    ),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN),
    "olmoe": OlmoeConfig(**SIZES, num_experts=EXPERTS, num_experts_per_tok=CHOSEN),
    "gpt_oss": GptOssConfig(**SIZES, **HEADS, num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN),
    "deepseek_v3": DeepseekV3Config(**SIZES, **LATENT),
}


def build(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation="eager").eval()


def other_routes(routes: torch.Tensor) -> torch.Tensor:
    """Other experts for every token, each once."""
    return (routes + 1 + torch.arange(LAYERS)[:, None]) % EXPERTS


@pytest.mark.parametrize("name", MIXTURES)
def test_a_model_runs_tokens_through_the_given_experts(name: str) -> None:
    """Its own choice given back changes no bit, another one is what the layers then report, and -1 is the own one."""
    model, ids = build(MIXTURES[name]), torch.arange(1, 13).view(2, 6)
    own = own_routes(model, ids)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        replay = RouteReplay(model)
        replay.set(own.view(2, 6, LAYERS, CHOSEN))
        assert torch.equal(model(input_ids=ids).logits, expected)
        other = other_routes(own)
        other[0] = -1
        replay.set(other.view(2, 6, LAYERS, CHOSEN).to(torch.int16))
        changed = model(input_ids=ids).logits
    forced = own_routes(model, ids)
    assert torch.equal(forced[1:], other[1:]) and torch.equal(forced[0], own[0])
    torch.testing.assert_close(changed[0, 0], expected[0, 0])
    assert not torch.isclose(changed[1], expected[1]).all()
    replay.set(None)
    assert torch.equal(own_routes(model, ids), own)


def test_the_weights_of_given_experts_are_the_routers_own() -> None:
    """A block of Qwen3-MoE against a loop over tokens and experts, in float64."""
    model, tokens = build(MIXTURES["qwen3_moe"], torch.float64), 5
    block: Any = model.get_submodule("model.layers.1.mlp")
    states = torch.randn(1, tokens, 32, dtype=torch.float64)
    chosen = torch.tensor([[3, 1], [0, 7], [5, 2], [6, 4], [1, 0]])
    routes = torch.full((1, tokens, LAYERS, CHOSEN), -1)
    routes[0, :, 1] = chosen
    replay = RouteReplay(model)
    replay.set(routes)
    found = block(states)
    weights, gates, downs = block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj
    for token, state in enumerate(states[0]):
        shares = torch.softmax(weights @ state, -1, dtype=torch.float)[chosen[token]]
        if block.gate.norm_topk_prob:
            shares = shares / shares.sum()
        expected = torch.zeros(32, dtype=torch.float64)
        for share, expert in zip(shares.double(), chosen[token].tolist(), strict=True):
            gate, up = (gates[expert] @ state).chunk(2)
            expected += share * (downs[expert] @ (torch.nn.functional.silu(gate) * up))
        torch.testing.assert_close(found[0, token], expected, atol=1e-9, rtol=0)


def test_layers_that_recompute_choose_the_same_again() -> None:
    """In the backward pass of a micro-batch its routes are still set."""
    gradients: list[list[torch.Tensor]] = []
    for recomputes in (False, True):
        model, ids = build(MIXTURES["qwen3_moe"]), torch.arange(1, 9).view(1, 8)
        given = other_routes(own_routes(model, ids)).view(1, 8, LAYERS, CHOSEN)
        if recomputes:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        RouteReplay(model).set(given)
        model(input_ids=ids).logits.square().sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)


def routed(tokens: int, first: int) -> np.ndarray:
    """Routes whose numbers say which token they belong to."""
    numbers = first + np.arange(tokens)[:, None, None] + 100 * np.arange(LAYERS)[:, None]
    return np.broadcast_to(numbers, (tokens, LAYERS, CHOSEN)).astype(np.uint16)


@pytest.mark.parametrize("form", ["padded", "packed", "shared"])
def test_every_token_of_a_micro_batch_has_its_own_routes(form: str) -> None:
    """Rows of one prompt share its routes; the last token of a response, and rows without routes, have none."""
    prompts, responses = [[1, 2, 3]] * 3 + [[4, 5]], [[10, 11], [12, 13, 14], [15], [20, 21]]
    written = [write_routes(routed(len(p) + len(r) - 1, 0)) for p, r in zip(prompts, responses, strict=True)]
    table = TokenTable(train_table(prompts, responses, [*written[:2], None, written[3]]), routed=True)
    batch = table.batch(range(4)) if form == "padded" else table.packed_batch(range(4), form == "shared")
    routes, ids = batch.routes, batch.input_ids
    assert routes is not None and routes.shape == (*ids.shape, LAYERS, CHOSEN) and routes.dtype == torch.int16
    assert torch.equal(routes[..., 1, :].clamp(min=99) - 100, routes[..., 0, :].clamp(min=-1))
    found: dict[int, set[int]] = {}
    for token, own in zip(ids.flatten().tolist(), routes[..., 0, 0].flatten().tolist(), strict=True):
        found.setdefault(token, set()).add(own)
    alone = {-1} if form != "shared" else set()  # the prompt of the row without routes
    expected = {1: {0} | alone, 2: {1} | alone, 3: {2} | alone, 10: {3}, 11: {-1}, 12: {3}, 13: {4}, 14: {-1}}
    expected |= {15: {-1}, 4: {0}, 5: {1}, 20: {2}, 21: {-1}}
    assert {token: own for token, own in found.items() if token} == expected
    assert found.get(0, {-1}) == {-1}
    assert table.batch([2]).routes is None and TokenTable(table.table).batch([0]).routes is None


def test_the_policy_replays_routes_if_the_spec_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its own log-probs and its updates; as a teacher it chooses for itself."""
    prompts, responses = [[1, 2, 3]], [[10, 11, 12]]
    model = build(MIXTURES["qwen3_moe"])
    routes = other_routes(own_routes(model, torch.tensor([prompts[0] + responses[0]])))[:-1]
    table = train_table(prompts, responses, [write_routes(routes.numpy().astype(np.uint8))])
    found: dict[bool, list[float]] = {}
    for replays in (False, True):
        config = PolicyConfig(
            model=ModelConfig(path="models/m", dtype="float32"),
            trainer=TrainerConfig(micro_batch_tokens=64),
            loss=PolicyLossConfig(),
            advantage=AdvantageConfig(estimator="none"),
            sampling=SamplingConfig(max_tokens=8, router_replay=replays),
            teachers={"teacher.own": TeacherSettings()},
            run_id="routes",
            reference_model=None,
            total_updates=1,
            seed=1,
            device="cpu",
        )
        policy, module = PolicyWorker(config, "policy-0"), CausalLogprobs(build(MIXTURES["qwen3_moe"]), 1.0)
        engine = cast(TrainEngine, SimpleNamespace(module=module, device="cpu"))
        monkeypatch.setattr(policy, "_train_policy", lambda *_: None)
        monkeypatch.setattr(policy, "_engine", engine)
        policy.build()
        plan = RankPlan(((0,),), 3, 1)
        own, teaches = policy.compute_logprobs(plan, table)[1], policy.teacher_logprobs(plan, "teacher.own", table)[1]
        found[replays] = own["old_logprobs"].to_pylist()[0]
        assert teaches["teacher.own"].to_pylist()[0] == pytest.approx(found[False], abs=1e-6)
        batch = TokenTable(table, routed=True).batch([0])
        assert module(batch=batch)[0].tolist() == pytest.approx(found[replays], abs=1e-6)
    assert found[True] != pytest.approx(found[False], abs=1e-2)


def test_workers_that_share_a_row_have_the_routes_of_their_tokens() -> None:
    """A row that they cannot divide evenly is padded, and padding has no routes."""
    sequences = [write_routes(routed(3, 0)), write_routes(routed(3, 10))]
    table = TokenTable(train_table([[1, 2], [3, 4]], [[5], [6, 7]], sequences), routed=True)
    batch = table.packed_batch([0, 1])
    parts = [divide(SequenceGroup(cast(Any, None), 2, rank), batch) for rank in range(2)]
    assert [part.input_ids.tolist() for part in parts] == [[[1, 2, 5, 3]], [[4, 6, 7, 0]]]
    found = [None if part.routes is None else part.routes[0, :, 0, 0].tolist() for part in parts]
    assert found == [[0, 1, 2, 10], [11, 12, -1, -1]]


def test_routes_that_do_not_fit_are_refused() -> None:
    def batch(*routes: np.ndarray) -> None:
        table = train_table([[1]] * len(routes), [[2]] * len(routes), list(map(write_routes, routes)))
        TokenTable(table, routed=True).batch(range(len(routes)))

    with pytest.raises(ValueError, match=r"0-0\[0\].* has routes of 3 tokens"):
        batch(routed(3, 0))
    with pytest.raises(ValueError, match="several models"):
        batch(routed(1, 0), routed(1, 0)[:, :1])
    replay = RouteReplay(build(MIXTURES["qwen3_moe"]))
    with pytest.raises(ValueError, match="routes of 3 layers, and the model has 2"):
        replay.set(torch.zeros(1, 1, 3, CHOSEN))
    with pytest.raises(ValueError, match="LlamaForCausalLM has no routers"):
        RouteReplay(build(LlamaConfig(**SIZES)))


@pytest.mark.parametrize("packed", [False, True])
def test_log_probs_are_those_of_the_given_experts(packed: bool) -> None:
    """Of rows with their own routes, whatever rows are beside them, and only if the caller asks for them."""
    model = build(MIXTURES["qwen3_moe"])
    module = CausalLogprobs(model, temperature=1.0)
    adapt(module, model, "cpu", packed, None)
    prompts, responses = [[1, 2, 3], [1, 2, 3], [4, 5]], [[10, 11], [12, 13, 14], [20, 21]]
    sequences = [p + r for p, r in zip(prompts, responses, strict=True)]
    given = [other_routes(own_routes(model, torch.tensor([one])))[:-1] for one in sequences]
    replay = module.replay = RouteReplay(model)
    table = train_table(prompts, responses, [write_routes(one.numpy().astype(np.uint8)) for one in given])
    plan = RankPlan(((0, 2), (1,)), 7, 3, packed=packed)

    def scored(routed: bool) -> dict[int, list[float]]:
        summary, scores = score_plan(module, plan, [table], "old_logprobs", "cpu", None, routed)
        assert not summary.failed
        return dict(zip(scores["sample_index"].to_pylist(), scores["old_logprobs"].to_pylist(), strict=True))

    with_routes, without = scored(True), scored(False)
    for index, (ids, routes) in enumerate(zip(sequences, given, strict=True)):
        replay.set(torch.cat([routes, torch.full((1, LAYERS, CHOSEN), -1)])[None])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0].float(), -1)
        first = len(prompts[index])
        expected = [float(logprobs[at - 1, ids[at]]) for at in range(first, len(ids))]
        assert with_routes[index] == pytest.approx(expected, abs=1e-5)
        assert without[index] != pytest.approx(expected, abs=1e-3)
