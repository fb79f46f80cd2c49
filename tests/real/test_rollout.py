"""The rollout worker on a real engine: samples, log-probs, refused prompts, cancellation and engine death."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import numpy as np
import pyarrow as pa
import pytest
import pytest_asyncio
import torch
from transformers import AutoTokenizer

from tests.real.rollout_helpers import (
    MAX_TOKENS,
    chat,
    load_model,
    prompt_table,
    reference_logprobs,
    rollout_config,
    sampling_config,
    until_sampling,
)
from troupe.workers.agents.episodes.turns import TurnLimits
from troupe.workers.contract.config import StructuredConfig, TeacherEndpointConfig
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.messages import (
    ROLLOUTS,
    GroupRequest,
    GroupSummary,
    RankPlan,
    ReferenceGone,
    ReferenceResponse,
)
from troupe.workers.contract.reward_config import RewardConfig, RewardFunctionConfig
from troupe.workers.engine import generation
from troupe.workers.engine import rows as rows_module
from troupe.workers.engine.errors import EngineClosed, EngineDead
from troupe.workers.engine.prompt_logprobs import prompt_logprobs
from troupe.workers.engine.sleep import EngineSleep
from troupe.workers.models.distillation import bucketed
from troupe.workers.models.modeling import CausalLogprobs, load_causal, score_plan
from troupe.workers.models.prompt_logprobs import PromptLogprobs, ResponseScores, score_response
from troupe.workers.reference_engine import ReferenceEngine
from troupe.workers.reward import RewardWorker
from troupe.workers.rollout import RolloutWorker
from troupe.workers.teacher import TeacherEndpoint

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]

PROMPTS = prompt_table(chat("Name a colour."), chat("What is 2 + 3?"), chat("Count to ten, slowly."))
REQUEST = GroupRequest(prompt_uid="p0", row=0, attempt=2, samples=4, seed=11)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(tiny_model: Path) -> AsyncIterator[RolloutWorker]:
    """One worker for all tests of this file, of which the last ends its engine.

    The engine records the tokens that its sampler leaves, which it does not if the spec does not truncate, and
    returns as many log-probs as a judge or a teacher asks for.
    """
    config = rollout_config(tiny_model).model_copy(update={"engine_options": {"scheduling_policy": "priority"}})
    sampling = config.sampling.model_copy(update={"top_p": 0.8})
    recording = config.model_copy(update={"sampling": sampling, "top_logprobs": 20})
    worker = RolloutWorker(recording, "rollout-0")
    with pytest.raises(EngineClosed, match="not started"):
        await worker.generate(REQUEST, PROMPTS)
    health = await worker.start()
    assert (health.name, health.pid, health.version, health.in_flight) == ("rollout-0", os.getpid(), 0, 0)
    assert health.peak is not None and health.peak.host > 100 * 2**20
    worker.generation.config = config
    yield worker
    await worker.close()
    with pytest.raises(EngineClosed, match="it was closed"):
        await worker.generate(REQUEST, PROMPTS)


async def rows(worker: RolloutWorker, request: GroupRequest, prompts: pa.Table = PROMPTS) -> list[dict[str, Any]]:
    """Generate a group and return its rows."""
    _, table = await worker.generate(request, prompts)
    return table.to_pylist()


async def test_a_group_has_one_row_per_sample_and_a_matching_summary(worker: RolloutWorker) -> None:
    """Checks schema, identity, versions, turns and timings."""
    summary, table = await worker.generate(REQUEST, PROMPTS)
    assert table.schema.equals(ROLLOUTS, check_metadata=True)
    assert (summary.prompt_uid, summary.attempt, summary.engine, summary.refused) == ("p0", 2, "rollout-0", "")
    assert summary.generate_s > 0
    for index, row in enumerate(table.to_pylist()):
        n = len(row["response_ids"])
        assert (row["prompt_uid"], row["sample_index"], row["attempt"]) == ("p0", index, 2)
        assert (row["finish_reason"], n) == ("length", MAX_TOKENS)
        assert len(row["rollout_logprobs"]) == len(row["loss_mask"]) == n
        assert all(row["loss_mask"])
        assert row["weight_versions"] == [{"version": 0, "start": 0, "end": n}]
        assert row["turns"] == [{"name": "assistant", "start": 0, "end": n}]
        assert (row["messages"], row["answer"]) == (PROMPTS["messages"][0].as_py(), "answer 0")
        assert 0 < row["first_token_s"] < row["generate_s"] < summary.generate_s
        sample = summary.samples[index]
        assert (sample.sample_index, sample.prompt_tokens, sample.response_tokens) == (index, len(row["prompt_ids"]), n)
        assert (sample.oldest_version, sample.newest_version, sample.finish_reason) == (0, 0, "length")


async def test_an_option_of_the_spec_reaches_the_engine(worker: RolloutWorker, tiny_model: Path) -> None:
    """And vLLM's refusal of a value names the options."""
    engine: Any = worker.engine.vllm
    assert engine.vllm_config.scheduler_config.policy == "priority"
    config = rollout_config(tiny_model).model_copy(update={"engine_options": {"scheduling_policy": "nonsense"}})
    with pytest.raises(ValueError, match=r"the spec's `engine` \(scheduling_policy\).*nonsense"):
        await RolloutWorker(config, "rollout-1").start()


async def test_a_summary_counts_the_finished_samples_of_running_groups(
    worker: RolloutWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of four samples finish early; a group that ends meanwhile reports them as `finished_ahead`.

    A checkpoint gets them from `finished_samples`; the group ends as it would without.
    """
    tokens = {"long": (1, 1, 1, 400), "short": (8,)}
    params = worker.generation.sampling_params

    def limited(request: GroupRequest, index: int, limits: TurnLimits | None = None) -> Any:
        found = params(request, index, limits)
        found.max_tokens = tokens[request.prompt_uid][index]
        return found

    monkeypatch.setattr(worker.generation, "sampling_params", limited)
    long = asyncio.create_task(worker.generate(replace(REQUEST, prompt_uid="long"), PROMPTS))
    summary, _ = await worker.generate(replace(REQUEST, prompt_uid="short", samples=1), PROMPTS)
    assert (summary.finished_ahead, long.done()) == (3, False)
    (found,), table = await worker.finished_samples()
    assert (found.prompt_uid, found.attempt, long.done()) == ("long", REQUEST.attempt, False)
    summary, whole = await long
    assert summary.finished_ahead == 0
    assert found.samples == summary.samples[:3]
    assert table.to_pylist() == whole.to_pylist()[:3]
    assert (await worker.finished_samples())[0] == ()


async def test_samples_of_a_group_share_cached_prompt_blocks(worker: RolloutWorker) -> None:
    """All samples but the first read whole blocks of the prompt from the cache.

    vLLM's default blocks on the CPU are too large for this, so the worker sets a smaller size.
    """
    prompts = prompt_table(chat("A prompt of more than one block, and fewer than 128 tokens."))
    summary, table = await worker.generate(replace(REQUEST, row=0, prompt_uid="long"), prompts)
    length = len(table["prompt_ids"][0].as_py())
    assert 32 < length <= 128
    shared = (length - 1) // 32 * 32
    assert shared * (REQUEST.samples - 1) <= summary.cached_tokens <= shared * REQUEST.samples


async def test_the_same_seed_gives_the_same_samples(worker: RolloutWorker) -> None:
    """The samples do not depend on concurrent groups, and all samples of all groups are different."""
    alone = [row["response_ids"] for row in await rows(worker, REQUEST)]
    concurrent = [replace(REQUEST, prompt_uid=f"other{i}", row=i % 3, seed=100 + i) for i in range(3)]
    mixed, *others = await asyncio.gather(rows(worker, REQUEST), *(rows(worker, other) for other in concurrent))
    assert [row["response_ids"] for row in mixed] == alone
    drawn = [tuple(ids) for ids in alone] + [tuple(row["response_ids"]) for other in others for row in other]
    assert len(set(drawn)) == len(drawn) == 16


@pytest.mark.parametrize("kept", [(0, 2), (1,), (0, 1, 2, 3)])
async def test_a_group_continues_from_its_finished_samples(worker: RolloutWorker, kept: tuple[int, ...]) -> None:
    """The others are those of the whole group; all rows belong to the new attempt."""
    summary, table = await worker.generate(REQUEST, PROMPTS)
    finished = tuple(summary.samples[index] for index in kept)
    again = replace(REQUEST, attempt=5, finished=finished)
    rest, whole = await worker.generate(again, PROMPTS, table.take(pa.array(kept)))
    assert whole.schema.equals(ROLLOUTS, check_metadata=True)
    assert rest.attempt == 5 and rest.samples == summary.samples
    of_the_batch = {"generate_s", "first_token_s", "rollout_logprobs"}  # the last to round-off
    for row, before in zip(whole.to_pylist(), table.to_pylist(), strict=True):
        same = before["sample_index"] in kept
        names = row.keys() - {"attempt"} - (set() if same else of_the_batch)
        assert row["attempt"] == 5 and {name: row[name] for name in names} == {name: before[name] for name in names}


async def test_greedy_decoding_is_deterministic(worker: RolloutWorker) -> None:
    """`greedy` and temperature 0 give the same response for every seed."""
    greedy = await rows(worker, replace(REQUEST, greedy=True))
    cold = await rows(worker, replace(REQUEST, temperature=0.0, seed=5))
    assert len({tuple(row["response_ids"]) for row in greedy + cold}) == 1


@pytest.mark.parametrize("temperature", [None, 0.3, 1.0])
async def test_logprobs_are_those_of_the_sampled_distribution(
    worker: RolloutWorker, tiny_model: Path, temperature: float | None
) -> None:
    """log softmax(logits / temperature), also at the configured default; greedy samples use temperature 1."""
    model = load_model(tiny_model)
    for row in await rows(worker, replace(REQUEST, temperature=temperature)):
        expected = reference_logprobs(model, row, temperature or 0.7)
        assert torch.allclose(torch.tensor(row["rollout_logprobs"]), expected, atol=1e-4)
    for row in await rows(worker, replace(REQUEST, greedy=True, samples=1)):
        assert torch.allclose(torch.tensor(row["rollout_logprobs"]), reference_logprobs(model, row, 1.0), atol=1e-4)


async def test_logprobs_with_top_p_are_renormalised_over_the_nucleus(worker: RolloutWorker, tiny_model: Path) -> None:
    """They are never below the plain log-probs, and above them by at most log 2 with top_p 0.5."""
    model = load_model(tiny_model)
    for row in await rows(worker, replace(REQUEST, temperature=1.0, top_p=0.5)):
        plain = reference_logprobs(model, row, 1.0)
        gain = torch.tensor(row["rollout_logprobs"]) - plain
        assert (gain > -1e-4).all()
        assert math.log(1.5) < gain.max() <= math.log(2.0) + 1e-3


def ratios(module: CausalLogprobs, table: pa.Table) -> torch.Tensor:
    """float64: exp(trainer's log-prob - sampler's) of every token."""
    plan = RankPlan(tuple((row,) for row in range(table.num_rows)), 1, table.num_rows)
    _, scores = score_plan(module, plan, [table], "old_logprobs", "cpu")
    own, sampled = (
        np.concatenate(column.to_pylist()) for column in (scores["old_logprobs"], table["rollout_logprobs"])
    )
    return torch.from_numpy(own - sampled).exp()


@pytest.mark.parametrize(
    "truncation",
    [
        {"top_p": 0.8},
        {"top_k": 20},
        {"min_p": 0.1},
        {"top_p": 0.8, "top_k": 50, "min_p": 0.02},
        {"top_p": 0.9, "structured": StructuredConfig(regex="([a-z]{1,8} )+")},
    ],
    ids=["top-p", "top-k", "min-p", "all", "with a form"],
)
async def test_the_trainer_computes_among_the_tokens_that_were_left(
    worker: RolloutWorker, tiny_model: Path, truncation: dict[str, Any]
) -> None:
    """Its log-probs are the sampler's, and the ratio of any other policy to the one that sampled has mean 1. Over the
    whole vocabulary the mean is the probability that the policy gives to these tokens."""
    others = [
        replace(REQUEST, prompt_uid="greedy", greedy=True, samples=2),
        replace(REQUEST, prompt_uid="evaluation", temperature=1.0, top_p=0.5, samples=2),
    ]
    with sampling_config(worker, temperature=0.9, **truncation):
        found = await asyncio.gather(
            worker.generate(replace(REQUEST, samples=24), PROMPTS), *(worker.generate(r, PROMPTS) for r in others)
        )
        (_, table), *evaluated = found
    assert [other["kept_tokens"].null_count for _, other in evaluated] == [2, 2]
    module = CausalLogprobs(load_causal(rollout_config(tiny_model).model), 0.9, chunks=3)
    exact, forced = ratios(module, table), ratios(module, table.drop_columns(["kept_tokens"]))
    assert (exact.log().abs() < 2e-4).all()
    assert (forced < 1 + 2e-4).all() and float(forced.mean()) < 0.97
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    moved = ratios(module, table)
    error = float(moved.std()) / math.sqrt(len(moved))
    assert abs(float(moved.mean()) - 1) < 4 * error and error < 0.1
    assert float(moved.std()) > 0.05
    if top_k := truncation.get("top_k"):
        assert max(len(words) for row in table["kept_tokens"].to_pylist() for words in row) <= 4 * top_k


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        (StructuredConfig(regex="Score: (10|[0-9])"), r"Score: (10|[0-9])"),
        (StructuredConfig(choice=("yes", "no way")), "yes|no way"),
        (
            StructuredConfig(json_schema={"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}),
            r'\{\s*"n"\s*:\s*[12]\s*\}',
        ),
        (StructuredConfig(grammar='root ::= "a" | "b" root'), "b*a"),
    ],
    ids=["regex", "choice", "json", "grammar"],
)
async def test_structured_responses_have_their_form(
    worker: RolloutWorker, form: StructuredConfig, pattern: str
) -> None:
    with sampling_config(worker, structured=form):
        found = await rows(worker, replace(REQUEST, temperature=1.0, samples=8))
    finished = [row["response"] for row in found if row["finish_reason"] == "stop"]
    assert finished and all(re.fullmatch(pattern, text) for text in finished), finished


@pytest.mark.parametrize(
    "form",
    [{"regex": "(a"}, {"json_schema": {"type": "objec"}}, {"grammar": "root = "}],
    ids=["regex", "json", "grammar"],
)
async def test_a_form_that_cannot_be_read_is_refused_at_start(tiny_model: Path, form: dict[str, Any]) -> None:
    config = rollout_config(tiny_model)
    sampling = config.sampling.model_copy(update={"structured": StructuredConfig(**form)})
    with pytest.raises(ValueError, match="structured: "):
        await RolloutWorker(config.model_copy(update={"sampling": sampling}), "rollout-9").start()


async def test_logprobs_of_structured_responses_are_those_among_the_permitted_tokens(
    worker: RolloutWorker, tiny_model: Path
) -> None:
    """The importance weight, exp(trainer's log-prob - sampler's), is the mass of the permitted tokens."""
    texts = ("yes", "no way")
    with sampling_config(worker, structured=StructuredConfig(choice=texts)):
        found = await rows(worker, replace(REQUEST, temperature=1.0, samples=8))
    model, tokenizer = load_model(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
    shown = [tokenizer.decode([token]) for token in range(model.config.vocab_size)]
    permitted = [token for token, text in enumerate(shown) if text and any(whole.startswith(text) for whole in texts)]
    for row in found:
        logits = model(torch.tensor([row["prompt_ids"]])).logits[0, -1].float()
        among = torch.log_softmax(logits[permitted], dim=-1)[permitted.index(row["response_ids"][0])]
        assert row["rollout_logprobs"][0] == pytest.approx(float(among), abs=1e-4)
        mass = torch.softmax(logits, dim=-1)[permitted].sum()
        weight = reference_logprobs(model, row, 1.0)[0] - row["rollout_logprobs"][0]
        assert float(weight.exp()) == pytest.approx(float(mass), rel=1e-3)


async def test_a_greedy_answer_has_the_likeliest_tokens_of_the_model(
    worker: RolloutWorker, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probs of temperature 1, from which a judge's score is expected."""
    monkeypatch.setattr(worker.generation, "config", worker.config.model_copy(update={"top_logprobs": 20}))
    request = GroupRequest("judge", 0, 0, 1, seed=0, greedy=True)
    answer, tokenizer = await worker.generation.answer(request, chat("Rate it."))
    flat = rows_module.flat_logprobs(answer)
    prompt = await worker.generation.encode(chat("Rate it."), None)
    with torch.no_grad():
        logits = load_model(tiny_model)(torch.tensor([[*prompt, *answer.token_ids]])).logits[0, len(prompt) - 1 : -1]
    wanted, ids = torch.log_softmax(logits.float(), dim=-1).topk(20)
    for place, (start, end) in enumerate(zip(flat.start_indices, flat.end_indices, strict=True)):
        found = dict(zip(flat.token_ids[start:end], flat.logprobs[start:end], strict=True))
        assert sorted(found.values(), reverse=True) == pytest.approx(wanted[place].tolist(), abs=1e-4)
        assert flat.token_ids[start] == int(ids[place, 0])
    tokens = rows_module.answer_tokens(flat, tokenizer)
    assert "".join(token.text for token in tokens) == tokenizer.decode(list(answer.token_ids))


@pytest.mark.parametrize("k", [0, 8])
async def test_a_whole_sequence_has_the_log_probs_of_the_model(worker: RolloutWorker, tiny_model: Path, k: int) -> None:
    """As a teacher's engine returns them, of a sequence that it did not sample and whose beginning is in its cache."""
    prompt = await worker.generation.encode(chat("Name a colour."), None)
    sequence = [*prompt, 7, 300, 7, 41]
    found = await prompt_logprobs(worker.engine.require_open(), sequence, k, f"teacher/{k}")
    assert isinstance(found, PromptLogprobs)
    scores = score_response(found, sequence, 4, k)
    assert isinstance(scores, ResponseScores)
    with torch.no_grad():
        logits = load_model(tiny_model)(torch.tensor([sequence])).logits[0, -5:-1].float()
    wanted = torch.log_softmax(logits, dim=-1).gather(-1, torch.tensor(sequence[-4:])[:, None])[:, 0]
    assert scores.logprobs == pytest.approx(wanted.numpy(), abs=1e-4)
    if k:
        top = torch.from_numpy(scores.top_ids)
        assert scores.top_logprobs == pytest.approx(bucketed(logits, top).numpy(), abs=1e-4)
        assert torch.equal(logits.gather(-1, top), logits.topk(k).values)


async def test_an_engine_with_frozen_weights_finishes_what_runs_sleeps_and_answers_the_rest(
    worker: RolloutWorker,
) -> None:
    """As a teacher's: what arrives meanwhile waits in it. The CPU build takes part and releases nothing."""
    prompt = await worker.generation.encode(chat("Name a colour."), None)
    sequences = [[*prompt, *range(5 + number, 90 + number)] for number in range(24)]
    memory = EngineSleep("weights", worker.engine, frozen=True)

    async def scored(sequence: list[int], name: str) -> PromptLogprobs:
        found = await prompt_logprobs(worker.engine.require_open(), sequence, 4, f"{name}/{sequence[-1]}")
        assert isinstance(found, PromptLogprobs)
        return found

    wanted = [await scored(sequence, "alone") for sequence in sequences[:3]]
    running = [asyncio.create_task(scored(sequence, "before")) for sequence in sequences]
    await asyncio.sleep(0.02)
    await asyncio.wait_for(memory.sleep(), 60)
    finished = [task for task in running if task.done()]
    late = [asyncio.create_task(scored(sequence, "asleep")) for sequence in sequences[:3]]
    await asyncio.sleep(0.5)
    assert len([task for task in running if task.done()]) - len(finished) <= 1, "only an answer that was on its way"
    assert not any(task.done() for task in late)
    assert (await worker.health()).version == 0
    await memory.sleep()
    await memory.wake()
    await asyncio.wait_for(asyncio.gather(*running, *late), 60)
    for found, whole in zip([*running[:3], *late], 2 * wanted, strict=True):
        assert found.result().logprobs == pytest.approx(whole.logprobs, abs=1e-4)


@asynccontextmanager
async def served(engine: Any, model: Path) -> AsyncIterator[str]:
    """The address of vLLM's server, with this engine and the name `m`."""
    from uvicorn import Config, Server
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args: Any = make_arg_parser(FlexibleArgumentParser()).parse_args(
        ["--model", str(model), "--served-model-name", "m"]
    )
    app = build_app(args, ("generate",), engine.model_config)
    await init_app_state(engine, app.state, args, ("generate",))
    server = Server(Config(app, port=0, log_level="error", lifespan="off"))
    running = asyncio.create_task(server.serve())
    async with asyncio.timeout(60):
        while not server.started:
            await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        await running


async def test_an_endpoint_returns_what_the_engine_behind_it_does(worker: RolloutWorker, tiny_model: Path) -> None:
    """A teacher behind vLLM's own server; an answer has the engine's numbers to the last digit."""
    prompt = await worker.generation.encode(chat("Name a colour."), None)
    sequences = [[*prompt, 7, 300, 7, 41], [*prompt, 5], [3, 4095]]
    engine = worker.engine.require_open()
    async with served(engine, tiny_model) as url:
        model = ModelConfig(path=str(tiny_model))
        config = TeacherEndpointConfig(url=url, model="m", policy=model, top_k=8, longest=1023, retries=0)
        teacher = TeacherEndpoint(config, "teacher.a-0")
        await teacher.start()
        found = await teacher.sequences(sequences)
        await teacher.close()
        with pytest.raises(ValueError, match="max_model_len is 1024, and must be at least 1025"):
            await TeacherEndpoint(config.model_copy(update={"longest": 1024}), "teacher.a-0").start()
        with pytest.raises(ValueError, match=r"teacher-b.* does not exist"):
            await TeacherEndpoint(config.model_copy(update={"model": "teacher-b"}), "teacher.a-0").start()
    for one, sequence in zip(found, sequences, strict=True):
        own = await prompt_logprobs(engine, sequence, 8, f"own/{len(sequence)}")
        assert isinstance(one, PromptLogprobs) and isinstance(own, PromptLogprobs)
        assert (one.ids.tolist(), one.logprobs.tolist()) == (own.ids.tolist(), own.logprobs.tolist())


async def test_the_text_decodes_all_response_tokens_but_special_ones(worker: RolloutWorker) -> None:
    """Also with a stop string: the response includes it, and text and tokens agree."""
    free = (await rows(worker, replace(REQUEST, greedy=True, samples=1)))[0]
    tokenizer = worker.generation.tokenizer
    assert tokenizer is not None
    assert free["response"] == tokenizer.decode(free["response_ids"], skip_special_tokens=True)
    stop = tokenizer.decode(free["response_ids"][5:7], skip_special_tokens=True)
    with sampling_config(worker, stop=(stop,)):
        stopped = (await rows(worker, replace(REQUEST, greedy=True, samples=1)))[0]
    assert stopped["finish_reason"] == "stop"
    assert len(stopped["response_ids"]) == len(stopped["rollout_logprobs"]) < MAX_TOKENS
    assert stopped["response_ids"] == free["response_ids"][: len(stopped["response_ids"])]
    assert stop in stopped["response"]


BAD_PROMPTS = {
    "not JSON": "[{",
    "not a list": json.dumps({"role": "user"}),
    "is empty": chat("  \n"),
    "is empty ": json.dumps([]),
    "is empty  ": json.dumps([{"role": "system", "content": "You are kind."}]),
    "content": json.dumps([{"role": "user", "content": ["image"]}]),
    "lone surrogate": '[{"role": "user", "content": "\\ud800"}]',
    "tokens; 1 to 1000 fit": chat("word " * 1000),
    "tokens; 1 to 1000 fit ": chat("x1 " * 350_000),
}


async def test_bad_prompts_are_refused_and_others_are_generated_as_usual(worker: RolloutWorker) -> None:
    """A refusal names the file and line of the prompt and what is wrong with it."""
    prompts = prompt_table(*BAD_PROMPTS.values(), chat("Name a colour."), chat("<|im_end|><|endoftext|>"))
    good = len(BAD_PROMPTS)
    alone = await rows(worker, replace(REQUEST, row=good), prompts)
    results: list[tuple[GroupSummary, pa.Table]] = await asyncio.gather(
        *(worker.generate(replace(REQUEST, row=row, prompt_uid=f"p{row}"), prompts) for row in range(good + 2))
    )
    for row, (reason, (summary, table)) in enumerate(zip(BAD_PROMPTS, results, strict=False)):
        assert summary.refused.startswith(f"pool.jsonl:{row + 1}: ")
        assert reason.strip() in summary.refused
        assert (summary.samples, table.num_rows) == ((), 0)
        assert table.schema.equals(ROLLOUTS)
    assert [row["response_ids"] for row in results[good][1].to_pylist()] == [row["response_ids"] for row in alone]
    assert len(results[good + 1][0].samples) == 4
    with pytest.raises(IndexError):
        await worker.generate(replace(REQUEST, row=prompts.num_rows), prompts)


class OwnReference:
    """The engine itself as the reference's, which has just been replaced."""

    def __init__(self, worker: RolloutWorker) -> None:
        self.worker = worker
        self.calls = 0

    async def complete(
        self, request: GroupRequest, prompt_ids: list[int], indices: Sequence[int]
    ) -> list[ReferenceResponse]:
        self.calls += 1
        if self.calls == 1:
            raise ReferenceGone("no engine of the reference is running")
        worker = cast("ReferenceEngine", self.worker)
        return await ReferenceEngine.complete(worker, request, prompt_ids, indices)


async def test_each_sample_gets_a_response_of_the_reference_on_its_own_seed(
    worker: RolloutWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that the reference's engine samples as samples 4 to 7 of the group; a group waits for an engine that comes
    back, and one that continues has them all."""
    link, request = OwnReference(worker), replace(REQUEST, candidates=True)
    plain = await rows(worker, replace(REQUEST, samples=8))
    monkeypatch.setattr(generation, "_PAUSE_S", 0.01)
    monkeypatch.setattr(worker.generation, "_reference", None)
    monkeypatch.setattr(
        worker.generation, "config", worker.generation.config.model_copy(update={"compares_reference": True})
    )
    waiting = asyncio.create_task(worker.generate(request, PROMPTS))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await worker.connect_reference(link)
    summary, table = await waiting
    assert table.schema.equals(ROLLOUTS, check_metadata=True)
    found = table.to_pylist()
    assert [row["response_ids"] for row in found] == [row["response_ids"] for row in plain]
    assert len({tuple(row["response_ids"]) for row in found}) == 8
    assert [row["sample_index"] for row in found] == [*range(8)] and link.calls == 2
    for row, one in zip(found[4:], summary.candidates, strict=True):
        assert all(map(math.isnan, row["rollout_logprobs"])) and len(row["rollout_logprobs"]) == MAX_TOKENS
        assert (row["weight_versions"], row["finish_reason"], row["engine"]) == ([], "length", "rollout-0")
        assert 0 < row["first_token_s"] < row["generate_s"] and row["prompt_ids"] == found[0]["prompt_ids"]
        assert (one.sample_index, one.response_tokens) == (row["sample_index"], MAX_TOKENS)
    half = replace(request, finished=summary.samples[:2], attempt=3)
    _, continued = await worker.generate(half, PROMPTS, table)
    assert [row["response_ids"] for row in continued.to_pylist()] == [row["response_ids"] for row in found]
    held_out, _ = await worker.generate(REQUEST, PROMPTS)
    assert held_out.candidates == () and link.calls == 3


async def test_a_group_ends_with_the_error_of_its_reference(
    worker: RolloutWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing of it runs on."""
    lost = AsyncMock(side_effect=RuntimeError("no reference_engine worker is left"))
    monkeypatch.setattr(worker.generation, "_reference", Mock(complete=lost))
    monkeypatch.setattr(
        worker.generation, "config", worker.generation.config.model_copy(update={"compares_reference": True})
    )
    with pytest.raises(RuntimeError, match="no reference_engine worker is left"):
        await worker.generate(replace(REQUEST, candidates=True), PROMPTS)
    assert not worker.engine.running


async def test_candidates_follow_the_samples_as_the_policy_would_write_them(worker: RolloutWorker) -> None:
    """They end their turn, are known to be sampled by no version, and do not change the samples."""
    texts = ["2 + 3 = 5.", "It is five."]
    prompts = PROMPTS.set_column(
        PROMPTS.column_names.index("candidates"),
        PROMPTS.schema.field("candidates"),
        pa.array([None, texts, ["word " * MAX_TOKENS]], PROMPTS.schema.field("candidates").type),
    )
    request = replace(REQUEST, row=1, candidates=True)
    summary, table = await worker.generate(request, prompts)
    assert table.schema.equals(ROLLOUTS, check_metadata=True)
    *samples, first, second = table.to_pylist()
    for name in ("response_ids", "rollout_logprobs", "prompt_ids"):
        plain = await rows(worker, replace(request, candidates=False), prompts)
        assert [row[name] for row in samples] == [row[name] for row in plain]
    assert [row["sample_index"] for row in (first, second)] == [4, 5]
    assert [row["response"] for row in (first, second)] == texts
    for row, one in zip((first, second), summary.candidates, strict=True):
        assert row["response_ids"][-1] == worker.generation.tokenizer.eos_token_id  # pyright: ignore[reportOptionalMemberAccess]
        assert all(map(math.isnan, row["rollout_logprobs"])) and len(row["rollout_logprobs"]) == len(row["loss_mask"])
        assert (row["weight_versions"], row["finish_reason"], row["prompt_ids"]) == (
            [],
            "stop",
            samples[0]["prompt_ids"],
        )
        assert (one.sample_index, one.response_tokens) == (row["sample_index"], len(row["response_ids"]))
    assert len(summary.samples) == 4
    alone, _ = await worker.generate(replace(request, row=0), prompts)
    assert (len(alone.samples), alone.candidates) == (4, ())
    refused, table = await worker.generate(replace(request, row=2), prompts)
    assert refused.refused.startswith("pool.jsonl:3: candidate 0 has ") and table.num_rows == 0
    assert f"more than sampling.max_tokens, {MAX_TOKENS}" in refused.refused


async def test_a_response_without_finite_logprobs_fails_its_sample_alone(
    worker: RolloutWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reward worker does not judge it; the others are trained."""
    values: list[list[float]] = []

    def spoil(completion: Any) -> list[float]:
        values.append(sampled_logprobs(completion))
        if len(values) == 2:
            values[-1][0] = math.nan
        return values[-1]

    sampled_logprobs = rows_module._sampled_logprobs
    monkeypatch.setattr(rows_module, "_sampled_logprobs", spoil)
    summary, table = await worker.generate(REQUEST, PROMPTS)
    status = "engine: a log-prob of the response is not finite"
    assert [sample.status for sample in summary.samples] == ["ok", status, "ok", "ok"]
    rewards = RewardWorker(
        RewardConfig(functions=(RewardFunctionConfig(name="letter_share", args={"letters": "aeiou"}),)), "reward-0"
    )
    try:
        scored, _ = rewards.score(table)
    finally:
        rewards.close()
    assert scored.statuses == ("ok", status, "ok", "ok")
    assert [(fault.cause, fault.samples) for fault in scored.faults] == [(status, 1)]


async def test_a_cancelled_group_is_removed_from_the_engine(worker: RolloutWorker) -> None:
    """No request of the group keeps running, and the next group is generated."""
    task = asyncio.create_task(worker.generate(replace(REQUEST, samples=8), PROMPTS))
    async with asyncio.timeout(60):
        while (await worker.health()).in_flight < 8:
            await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await worker.health()).in_flight == 0
    assert len(await rows(worker, REQUEST)) == 4


async def test_a_dead_engine_process_is_a_clear_error(worker: RolloutWorker) -> None:
    """A running request, a new request and a health probe raise `EngineDead`, which names the signal.

    Last: it costs the engine.
    """
    core: Any = worker.engine.require_live().engine_core
    (engine,) = core.resources.engine_manager.processes
    with sampling_config(worker, max_tokens=900):
        running = asyncio.create_task(worker.generate(replace(REQUEST, samples=8), PROMPTS))
        await until_sampling(worker, 8)
        engine.kill()
        with pytest.raises(EngineDead, match=r"rollout-0 has ended \(SIGKILL\)"):
            await asyncio.wait_for(running, 30)
    with pytest.raises(EngineDead):
        await asyncio.wait_for(worker.generate(REQUEST, PROMPTS), 30)
    with pytest.raises(EngineDead):
        await asyncio.wait_for(worker.health(), 30)
