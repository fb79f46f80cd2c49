"""Bad specs: each is refused with one line that names the file, the line, the field and what is wrong."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest

from troupe.orchestrator.algorithms.table import ALGORITHMS
from troupe.orchestrator.spec.errors import SpecError
from troupe.orchestrator.spec.load import load_rollout_spec
from troupe.workers.contract.config import STEP_ESTIMATORS
from troupe.workers.contract.rewards import REWARD_FUNCTIONS
from troupe.workers.contract.weight_backends import TransferBackend

ROOT = Path(__file__).resolve().parents[3]
BACKENDS = " or ".join(", ".join(map(repr, ["auto", *get_args(TransferBackend)])).rsplit(", ", 1))

CPU = """\
name: base
seed: 3
model:
  path: models/m
roles:
  rollout:
    workers: 1
    cpus: 1
    max_model_len: 512
  policy:
    workers: 1
    learning_rate: 1e-5
    micro_batch_tokens: 2048
  reward:
    functions:
      - name: exact_match
        weight: 1.0
algorithm:
  name: grpo
  group_size: 4
schedule:
  steps: 4
  prompts_per_step: 8
sampling:
  max_tokens: 32
data:
  train:
    kind: jsonl
    path: train.jsonl
  eval:
    kind: jsonl
    path: eval.jsonl
evaluation:
  every_steps: 2
"""

GPU = """\
name: gpu
model: {path: models/m}
roles:
  rollout:
    workers: 2
    cpus: 2
    gpus: 1
  policy:
    workers: 2
    gpus: 1
  critic:
    gpus: 1
  reference:
    gpus: 1
  reward:
    model: {path: models/r}
algorithm:
  name: ppo
schedule:
  steps: 4
  prompts_per_step: 8
weight_sync:
  backend: auto
data:
  train: {kind: parquet, path: train.parquet}
"""


@dataclass(frozen=True)
class Case:
    """A good spec with pieces of text replaced, and the one line that must come back (without the file's name)."""

    name: str
    line: str
    edits: tuple[tuple[str, str], ...]

    def spoil(self, text: str) -> str:
        """The good spec with this case's edits."""
        for old, new in self.edits:
            assert old in text
            text = text.replace(old, new, 1)
        return text


def case(name: str, line: str, *edits: tuple[str, str]) -> Case:
    """A case with its edits, (old, new) each."""
    return Case(name, line, edits)


ONE = "  train:\n    kind: jsonl\n    path: train.jsonl"
TWO = """\
  train:
    - name: math
      kind: jsonl
      path: math.jsonl
      repeats: 2
    - name: code
      kind: jsonl
      path: code.jsonl
      rewards: [{name: length}]"""


JUDGE = "rubric: Is it?, endpoint: {url: 'http://localhost', model: m}"


def mixed_case(name: str, line: str, old: str, new: str, *edits: tuple[str, str]) -> Case:
    """A case with two sources, of which a piece is replaced."""
    assert old in TWO
    return case(name, line, (ONE, TWO.replace(old, new, 1)), *edits)


NAMED = (("  reward:\n", "  environment: {games: {name: guess_number}, single: {name: single_turn}}\n  reward:\n"),)

CPU_CASES = [
    case("no_name", "1: name: is required", ("name: base\n", "")),
    case("no_model", "1: model: is required", ("model:\n  path: models/m\n", "")),
    case("no_path", "3: model.path: is required", ("  path: models/m", "  dtype: float32")),
    case(
        "no_reward",
        "5: roles.reward: is required",
        ("  reward:\n    functions:\n      - name: exact_match\n        weight: 1.0\n", ""),
    ),
    case("no_steps", "21: schedule.steps: is required", ("  steps: 4\n", "")),
    case(
        "no_kind",
        "27: data.train.kind: is required (for example jsonl)",
        ("    kind: jsonl\n    path: train.jsonl", "    path: train.jsonl"),
    ),
    case("top_typo", "24: samplng: unknown field (did you mean 'sampling'?)", ("sampling:", "samplng:")),
    case("role_typo", "6: roles.rolout: unknown field (did you mean 'rollout'?)", ("  rollout:", "  rolout:")),
    case(
        "field_typo",
        "12: roles.policy.learning_rte: unknown field (did you mean 'learning_rate'?)",
        ("    learning_rate: 1e-5", "    learning_rte: 1e-5"),
    ),
    case(
        "elsewhere",
        (
            "20: algorithm.learning_rate: unknown field (it belongs at roles.policy.learning_rate or "
            "roles.critic.learning_rate)"
        ),
        ("  group_size: 4", "  learning_rate: 1e-5"),
    ),
    case(
        "elsewhere2",
        "3: max_staleness: unknown field (it belongs at schedule.max_staleness)",
        ("seed: 3", "seed: 3\nmax_staleness: 1"),
    ),
    case(
        "nowhere",
        "26: sampling.frobnicate: unknown field (fields of sampling: temperature, top_p, top_k, min_p, max_tokens, "
        "stop, structured)",
        ("  max_tokens: 32", "  max_tokens: 32\n  frobnicate: 1"),
    ),
    case(
        "function_typo",
        "17: roles.reward.functions.0.wieght: unknown field (did you mean 'weight'?)",
        ("        weight: 1.0", "        wieght: 1.0"),
    ),
    case(
        "source_typo",
        (
            "30: data.train.colum: unknown field (fields of data.train: path, limit, kind, where, system, "
            "template, max_chars, dedupe, prompt, system_column, answer, options, metadata, candidates)"
        ),
        ("    path: train.jsonl", "    path: train.jsonl\n    colum: x"),
    ),
    case(
        "wrong_kind_field",
        (
            "30: data.train.recipes: unknown field (fields of data.train: path, limit, kind, where, system, "
            "template, max_chars, dedupe, prompt, system_column, answer, options, metadata, candidates)"
        ),
        ("    path: train.jsonl", "    path: train.jsonl\n    recipes: []"),
    ),
    case(
        "merge_key",
        (
            "23: schedule.<<: unknown field (fields of schedule: steps, epochs, minibatches, start_timeout_s, "
            "score_timeout_s, train_timeout_s, step_timeout_s, prompts_per_step, max_staleness, "
            "generate_timeout_s, sync_timeout_s)"
        ),
        ("  steps: 4", "  steps: 4\n  <<: {}"),
    ),
    case(
        "url_folder",
        "2: output.folder: is not a folder: a run writes to a disk of the driver (on a cluster a shared one)",
        ("name: base", "name: base\noutput: {folder: s3://b/x}"),
    ),
    case("name_number", "1: name: expected text, got 5", ("name: base", "name: 5")),
    case(
        "text_int",
        "7: roles.rollout.workers: expected a whole number, got 'two'",
        ("    workers: 1\n    cpus", "    workers: two\n    cpus"),
    ),
    case("quoted_int", "22: schedule.steps: expected a whole number, got '4'", ("  steps: 4", '  steps: "4"')),
    case("float_int", "22: schedule.steps: expected a whole number, got 4.5", ("  steps: 4", "  steps: 4.5")),
    case("bool_int", "22: schedule.steps: expected a whole number, got true", ("  steps: 4", "  steps: true")),
    case(
        "yes_bool",
        "10: roles.rollout.enforce_eager: expected true or false, got 'yes'",
        ("    max_model_len: 512", "    max_model_len: 512\n    enforce_eager: yes"),
    ),
    case(
        "underscore",
        "13: roles.policy.micro_batch_tokens: expected a whole number, got '2_048'",
        ("    micro_batch_tokens: 2048", "    micro_batch_tokens: 2_048"),
    ),
    case(
        "quoted_float",
        "12: roles.policy.learning_rate: expected a number, got '1e-5'",
        ("    learning_rate: 1e-5", "    learning_rate: '1e-5'"),
    ),
    case("null_int", "22: schedule.steps: expected a whole number, got nothing", ("  steps: 4", "  steps:")),
    case("section_scalar", "24: sampling: expected a section, got 32", ("sampling:\n  max_tokens: 32", "sampling: 32")),
    case(
        "section_null",
        "21: schedule: expected a section, got nothing",
        ("schedule:\n  steps: 4\n  prompts_per_step: 8", "schedule:"),
    ),
    case(
        "section_list",
        "33: evaluation: expected a section, got a list",
        ("evaluation:\n  every_steps: 2", "evaluation:\n  - every_steps: 2"),
    ),
    case(
        "list_scalar",
        "26: sampling.stop: expected a list, got 'END'",
        ("  max_tokens: 32", "  max_tokens: 32\n  stop: END"),
    ),
    case(
        "list_item",
        "28: sampling.stop.1: expected text, got 5",
        ("  max_tokens: 32", "  max_tokens: 32\n  stop:\n    - a\n    - 5"),
    ),
    case(
        "functions_map",
        "15: roles.reward.functions: expected a list, got a section",
        ("      - name: exact_match\n        weight: 1.0", "      name: exact_match"),
    ),
    case(
        "betas_long",
        "12: roles.policy.adam_betas: takes at most 2 entries, got 3",
        ("    learning_rate: 1e-5", "    adam_betas: [0.9, 0.95, 0.99]"),
    ),
    case(
        "betas_range",
        "12: roles.policy.adam_betas.1: must be at least 0 and less than 1, got 1.5",
        ("    learning_rate: 1e-5", "    adam_betas: [0.9, 1.5]"),
    ),
    case(
        "empty_recipes",
        "31: data.train.recipes: needs 1 or more entries, got 0",
        (
            "    kind: jsonl\n    path: train.jsonl",
            "    kind: reasoning_gym\n    size: 4\n    seed: 1\n    recipes: []",
        ),
    ),
    case(
        "name_chars",
        "1: name: may hold lowercase letters, digits and, between them, '-', got '../../etc'",
        ("name: base", "name: ../../etc"),
    ),
    case(
        "name_upper",
        "1: name: may hold lowercase letters, digits and, between them, '-', got 'Base'",
        ("name: base", "name: Base"),
    ),
    case("name_long", "1: name: may have at most 63 characters, got 64", ("name: base", "name: " + "a" * 64)),
    case("seed_negative", "2: seed: must be at least 0, got -1", ("seed: 3", "seed: -1")),
    case(
        "workers_zero",
        "7: roles.rollout.workers: must be at least 1, got 0",
        ("    workers: 1\n    cpus", "    workers: 0\n    cpus"),
    ),
    case("cpus_zero", "8: roles.rollout.cpus: must be greater than 0, got 0", ("    cpus: 1", "    cpus: 0")),
    case("gpus_negative", "8: roles.rollout.gpus: must be at least 0, got -1", ("    cpus: 1", "    gpus: -1")),
    case(
        "lr_zero",
        "12: roles.policy.learning_rate: must be greater than 0, got 0",
        ("    learning_rate: 1e-5", "    learning_rate: 0"),
    ),
    case(
        "inf",
        "12: roles.policy.learning_rate: must be a finite number, got .inf",
        ("    learning_rate: 1e-5", "    learning_rate: .inf"),
    ),
    case(
        "overflow",
        "12: roles.policy.learning_rate: must be a finite number, got 1e999",
        ("    learning_rate: 1e-5", "    learning_rate: 1e999"),
    ),
    case(
        "temperature",
        "25: sampling.temperature: must be at least 0.01, got 0",
        ("  max_tokens: 32", "  temperature: 0"),
    ),
    case(
        "temperature_that_vllm_raises",
        "25: sampling.temperature: must be at least 0.01, got 0.009",
        ("  max_tokens: 32", "  temperature: 0.009"),
    ),
    case(
        "evaluation_temperature_that_vllm_raises",
        "35: evaluation.sampling.temperature: must be 0 (greedy) or at least 0.01, got 0.005: "
        "vLLM would sample at 0.01",
        ("  every_steps: 2", "  sampling:\n    temperature: 0.005"),
    ),
    case(
        "clip_high", "20: algorithm.clip_range: must be less than 1, got 1.0", ("  group_size: 4", "  clip_range: 1.0")
    ),
    case(
        "dual_clip",
        "20: algorithm.dual_clip: must be greater than 1 (or 0, off), got 0.5",
        ("  group_size: 4", "  dual_clip: 0.5"),
    ),
    case(
        "zero_stage",
        "12: roles.policy.zero_stage: expected 0, 1, 2 or 3, got 4",
        ("    learning_rate: 1e-5", "    zero_stage: 4"),
    ),
    case(
        "dtype",
        "5: model.dtype: expected 'bfloat16', 'float16' or 'float32', got 'bfloat' (did you mean 'bfloat16'?)",
        ("  path: models/m", "  path: models/m\n  dtype: bfloat"),
    ),
    case(
        "lr_schedule",
        ("12: roles.policy.schedule: expected 'constant', 'linear' or 'cosine', got 'cosin' (did you mean 'cosine'?)"),
        ("    learning_rate: 1e-5", "    schedule: cosin"),
    ),
    case(
        "backend",
        f"3: weight_sync.backend: expected {BACKENDS}, got 'ncl' (did you mean 'nccl'?)",
        ("seed: 3", "seed: 3\nweight_sync: {backend: ncl}"),
    ),
    case(
        "kind_value",
        (
            "28: data.train.kind: expected one of 'jsonl', 'json', 'parquet', 'csv', 'datasets', 'hub', "
            "'reasoning_gym', got 'jsonlines' (did you mean 'jsonl'?)"
        ),
        ("    kind: jsonl\n    path: train.jsonl", "    kind: jsonlines\n    path: train.jsonl"),
    ),
    case(
        "algorithm_name",
        "19: algorithm.name: no algorithm 'grop' (did you mean 'grpo'?)",
        ("  name: grpo", "  name: grop"),
    ),
    case(
        "algorithm_unknown",
        (
            "19: algorithm.name: no algorithm 'zzz' (`troupe algorithms` lists those on rollouts, such as grpo, "
            "and on offline data, such as dpo)"
        ),
        ("  name: grpo", "  name: zzz"),
    ),
    case(
        "reward_name",
        ("16: roles.reward.functions.0.name: no reward function 'exactmatch' (did you mean 'exact_match'?)"),
        ("      - name: exact_match", "      - name: exactmatch"),
    ),
    case(
        "reward_unknown",
        (
            f"16: roles.reward.functions.0.name: no reward function 'zzz' (shipped: {', '.join(REWARD_FUNCTIONS)}; "
            "your own: package.module:function)"
        ),
        ("      - name: exact_match", "      - name: zzz"),
    ),
    case(
        "judge_without_a_judge",
        ("16: roles.reward.functions.0.name: needs a role `judge`, or args.endpoint with the url and the model of one"),
        ("      - name: exact_match", "      - name: judge"),
    ),
    case(
        "judge_that_nobody_asks",
        "14: roles.judge: no reward function asks it: add the function `judge`, or remove the role",
        ("  reward:\n", "  judge: {model: {path: models/j}}\n  reward:\n"),
    ),
    case(
        "judge_without_room",
        "14: roles.judge.max_tokens: leaves no room for a question: must be less than roles.judge.max_model_len, 64",
        ("  reward:\n", "  judge: {model: {path: models/j}, max_model_len: 64, max_tokens: 64}\n  reward:\n"),
        ("      - name: exact_match", "      - name: judge"),
    ),
    case(
        "judge_at_a_temperature_that_vllm_does_not_have",
        ("14: roles.judge.temperature: must be 0 (greedy) or at least 0.01, got 0.001: vLLM would sample at 0.01"),
        ("  reward:\n", "  judge: {model: {path: models/j}, temperature: 0.001}\n  reward:\n"),
        ("      - name: exact_match", "      - name: judge"),
    ),
    case(
        "judge_on_two_gpus",
        "14: roles.judge.gpus: an engine with tensor_parallel_size 1 uses one GPU; raise workers or that",
        ("  reward:\n", "  judge: {model: {path: models/j}, gpus: 2}\n  reward:\n"),
        ("      - name: exact_match", "      - name: judge"),
    ),
    case(
        "structured_twice",
        "26: sampling.structured: set one of regex, choice, json_schema, grammar",
        ("  max_tokens: 32", "  max_tokens: 32\n  structured: {regex: a, choice: [b]}"),
    ),
    case(
        "batched_shipped_function",
        "17: roles.reward.functions.0.batched: exact_match takes one response at a time; remove it",
        ("        weight: 1.0", "        batched: true"),
    ),
    case(
        "process_of_one_reward",
        (
            "17: roles.reward.functions.0.process: dcpo takes one reward for a response; remove it or use one of "
            f"{', '.join(name for name, row in ALGORITHMS.items() if row.advantage.estimator in STEP_ESTIMATORS)}"
        ),
        ("      - name: exact_match\n        weight: 1.0", "      - name: mine.rewards:judge\n        process: true"),
        ("  name: grpo", "  name: dcpo"),
    ),
    case(
        "process_without_steps",
        (
            "17: roles.reward.functions.0.process: exact_match returns no steps; shipped functions that do: "
            "environment, letter_share, equations"
        ),
        ("        weight: 1.0", "        process: true"),
    ),
    case(
        "process_without_weight",
        "18: roles.reward.functions.1.process: has no effect with weight 0; remove it",
        ("        weight: 1.0", "        weight: 1.0\n      - {name: equations, weight: 0.0, process: true}"),
    ),
    case(
        "failed_fraction",
        "4: failures.max_failed_fraction: must be at most 1, got 1.5",
        ("seed: 3", "seed: 3\nfailures:\n  max_failed_fraction: 1.5"),
    ),
    case("empty_path", "29: data.train.path: may not be empty", ("    path: train.jsonl", "    path: ''")),
    case(
        "grpo_critic",
        "14: roles.critic: grpo has no critic; remove the role or use one of "
        "actor_critic, actor_critic_gae, ppo, ppo_kl_limit, ppo_max, ppo_penalty",
        ("  reward:", "  critic:\n    workers: 1\n  reward:"),
    ),
    case(
        "kl_target_without_kl",
        "20: algorithm.kl.target: adapts a KL term in the reward, which this spec lacks; set algorithm.kl.coef above 0",
        ("  name: grpo", "  name: reinforce\n  kl: {target: 1.0}"),
    ),
    case(
        "kl_target_in_the_loss",
        "20: algorithm.kl.target: adapts a KL term in the reward, which this spec lacks",
        ("  name: grpo", "  name: grpo\n  kl: {target: 1.0}"),
    ),
    case(
        "kl_stop_of_one_update",
        "20: algorithm.kl_stop: needs more than one update a step (schedule.epochs times schedule.minibatches)",
        ("  name: grpo", "  name: grpo\n  kl_stop: 0.1"),
    ),
    case(
        "penalty_on_the_change_of_one_update",
        "19: algorithm.name: kl_cov needs more than one update a step (schedule.epochs times schedule.minibatches)",
        ("  name: grpo", "  name: kl_cov"),
    ),
    case(
        "structured_for_a_divergence",
        "25: sampling.structured: dppo_tv compares a token's probability with the sampler's, which is among the "
        "permitted tokens; set sampling.top_p below 1 too, or use another algorithm",
        ("  name: grpo", "  name: dppo_tv"),
        ("sampling:", 'sampling:\n  structured: {regex: "[0-9]+"}'),
    ),
    case(
        "pass_of_the_whole_group",
        "20: algorithm.pass_k: must be less than the samples of a group, 4, got 4",
        ("  name: grpo", "  name: pass_at_k\n  pass_k: 4"),
    ),
    case(
        "structured_without_correction",
        "20: algorithm.importance.mode: samples come from the permitted tokens (sampling.structured), and only the "
        "correction accounts for that; use truncate or mask",
        ("  name: grpo", "  name: grpo\n  importance: {mode: none}"),
        ("sampling:", 'sampling:\n  structured: {regex: "[0-9]+"}'),
    ),
    case(
        "top_p_of_nothing", "25: sampling.top_p: must be greater than 0, got 0", ("sampling:", "sampling:\n  top_p: 0")
    ),
    case(
        "min_p_of_all",
        "25: sampling.min_p: must be less than 1, got 1",
        ("sampling:", "sampling:\n  min_p: 1"),
    ),
    case(
        "likelihood_with_a_truncated_reference",
        "21: algorithm.kl.coef: raft trains on the whole distribution, but the reference is scored among the tokens "
        "that were left by sampling.top_p, top_k or min_p; set it to 0 or remove these",
        ("  name: grpo", "  name: raft\n  kl: {coef: 0.1}"),
        ("  reward:", "  reference: {colocate_with: policy}\n  reward:"),
        ("sampling:", "sampling:\n  top_k: 5"),
    ),
    case(
        "distill_without_teacher",
        "5: roles.reference: is required: distill has a reference",
        ("  name: grpo", "  name: distill"),
    ),
    case(
        "option_of_another_objective",
        "20: algorithm.clip_range: raft does not use it; remove it",
        ("  name: grpo", "  name: raft\n  clip_range: 0.1"),
    ),
    case(
        "alarm_of_nothing",
        "18: failures.alarm: has no limit: set kl, repetition or response_tokens",
        ("algorithm:", "failures: {alarm: {action: stop}}\nalgorithm:"),
    ),
    case(
        "alarm_without_reference",
        "18: failures.alarm.kl: needs the role reference: the divergence is measured from it",
        ("algorithm:", "failures: {alarm: {kl: 0.1}}\nalgorithm:"),
    ),
    case(
        "ptx_without_texts",
        "27: data.ptx: is required: algorithm.ptx_coef is 0.5",
        ("group_size: 4", "group_size: 4\n  ptx_coef: 0.5"),
    ),
    case(
        "texts_without_ptx",
        "30: data.ptx: has no effect without algorithm.ptx_coef above 0",
        ("  eval:", "  ptx: {kind: jsonl, path: texts.jsonl}\n  eval:"),
    ),
    case(
        "texts_longer_than_the_budget",
        "31: data.ptx.max_tokens: 4096 is more than roles.policy.micro_batch_tokens, 2048",
        ("group_size: 4", "group_size: 4\n  ptx_coef: 0.5"),
        ("  eval:", "  ptx: {kind: jsonl, path: texts.jsonl, max_tokens: 4096}\n  eval:"),
    ),
    case(
        "fewer_texts_than_minibatches",
        "32: data.ptx.texts_per_step: 2 texts are too few for 4 minibatches",
        ("group_size: 4", "group_size: 4\n  ptx_coef: 0.5"),
        ("prompts_per_step: 8", "prompts_per_step: 8\n  minibatches: 4"),
        ("  eval:", "  ptx: {kind: jsonl, path: texts.jsonl, texts_per_step: 2}\n  eval:"),
    ),
    case(
        "texts_of_one_name",
        "33: data.ptx.1.name: two sources have the name 'news'",
        ("group_size: 4", "group_size: 4\n  ptx_coef: 0.5"),
        (
            "  eval:",
            "  ptx:\n    - {name: news, kind: jsonl, path: a.jsonl}\n    - name: news\n      kind: jsonl\n"
            "      path: b.jsonl\n  eval:",
        ),
    ),
    case(
        "texts_longer_than_the_budget_in_a_list",
        "32: data.ptx.0.max_tokens: 4096 is more than roles.policy.micro_batch_tokens, 2048",
        ("group_size: 4", "group_size: 4\n  ptx_coef: 0.5"),
        ("  eval:", "  ptx:\n    - {name: news, kind: jsonl, path: a.jsonl, max_tokens: 4096}\n  eval:"),
    ),
    case(
        "texts_without_name",
        "32: data.ptx.0.name: is required",
        ("group_size: 4", "group_size: 4\n  ptx_coef: 0.5"),
        ("  eval:", "  ptx:\n    - {kind: jsonl, path: a.jsonl}\n  eval:"),
    ),
    case(
        "texts_of_no_kind",
        "30: data.ptx.kind: is required (for example jsonl)",
        ("  eval:", "  ptx: {path: texts.jsonl}\n  eval:"),
    ),
    case(
        "ptx_negative",
        "21: algorithm.ptx_coef: must be at least 0, got -1",
        ("group_size: 4", "group_size: 4\n  ptx_coef: -1"),
    ),
    case(
        "ppo_no_critic",
        "5: roles.critic: is required: ppo has a critic",
        ("  name: grpo\n", "  name: ppo\n  kl: {coef: 0}\n"),
    ),
    case(
        "ppo_default_kl",
        ("5: roles.reference: is required: algorithm.kl.coef is 0.05, the default of ppo (0 needs no reference)"),
        ("  reward:", "  critic:\n    workers: 1\n  reward:"),
        ("name: grpo", "name: ppo"),
    ),
    case(
        "group_of_one",
        "20: algorithm.group_size: grpo compares samples of a group: needs at least 2",
        ("  group_size: 4", "  group_size: 1"),
    ),
    case(
        "kl_no_reference",
        "5: roles.reference: is required: algorithm.kl.coef is 0.1 (0 needs no reference)",
        ("  group_size: 4", "  group_size: 4\n  kl: {coef: 0.1}"),
    ),
    case(
        "unused_gae",
        "21: algorithm.gae_lambda: grpo does not use it; remove it",
        ("  group_size: 4", "  group_size: 4\n  gae_lambda: 0.9"),
    ),
    case(
        "unused_value_clip",
        "21: algorithm.value_clip: grpo does not use it; remove it",
        ("  group_size: 4", "  group_size: 4\n  value_clip: 0.2"),
    ),
    case(
        "clip_twice",
        ("21: algorithm.clip_high: clip_range is set too; give either clip_range or clip_low and clip_high"),
        ("  group_size: 4", "  clip_range: 0.2\n  clip_high: 0.28"),
    ),
    case(
        "no_room",
        "25: sampling.max_tokens: 512 leaves no room for a prompt in roles.rollout.max_model_len, 512",
        ("  max_tokens: 32", "  max_tokens: 512"),
    ),
    case(
        "micro_small",
        ("13: roles.policy.micro_batch_tokens: 256 cannot hold one sequence of roles.rollout.max_model_len, 512"),
        ("    micro_batch_tokens: 2048", "    micro_batch_tokens: 256"),
    ),
    case(
        "too_few_rows",
        ("23: schedule.prompts_per_step: 1 prompts of 4 samples are too few for 1 policy workers times 8 minibatches"),
        ("  prompts_per_step: 8", "  prompts_per_step: 1\n  minibatches: 8"),
    ),
    case(
        "warmup_long",
        "12: roles.policy.warmup_updates: must be less than the run's 4 updates",
        ("    learning_rate: 1e-5", "    warmup_updates: 4\n    schedule: linear"),
    ),
    case(
        "step_timeout",
        "23: schedule.generate_timeout_s: 9000 is longer than step_timeout_s, 7200",
        ("  steps: 4", "  steps: 4\n  generate_timeout_s: 9000"),
    ),
    case("empty_stop", "26: sampling.stop.0: may not be empty", ("  max_tokens: 32", "  max_tokens: 32\n  stop: ['']")),
    case(
        "fewest_workers",
        "9: roles.rollout.min_workers: 2 is more than workers, 1",
        ("    cpus: 1\n", "    cpus: 1\n    min_workers: 2\n"),
    ),
    case(
        "most_workers",
        "10: roles.rollout.max_workers: 2 is less than workers, 3",
        ("    workers: 1\n    cpus: 1\n", "    workers: 3\n    cpus: 1\n    min_workers: 1\n    max_workers: 2\n"),
    ),
    case(
        "autoscale_to_where",
        "6: roles.rollout.max_workers: is required with autoscale: the largest number of engines",
        ("    cpus: 1\n", "    cpus: 1\n    autoscale: {max_wait: 0.5}\n"),
    ),
    case(
        "autoscale_both_ways",
        "10: roles.rollout.autoscale.min_wait: must be less than max_wait, 0.5",
        ("    cpus: 1\n", "    cpus: 1\n    max_workers: 2\n    autoscale: {max_wait: 0.5, min_wait: 0.5}\n"),
    ),
    case(
        "self",
        "12: roles.policy.colocate_with: a role cannot be colocated with itself",
        ("    learning_rate: 1e-5", "    colocate_with: policy"),
    ),
    case(
        "unknown_role",
        (
            "12: roles.policy.colocate_with: expected 'rollout', 'policy', 'critic', 'reference', 'reward', "
            "'environment' or 'judge', got 'referee' (did you mean 'reference'?)"
        ),
        ("    learning_rate: 1e-5", "    colocate_with: referee"),
    ),
    case(
        "missing_role",
        "12: roles.policy.colocate_with: there is no role critic",
        ("    learning_rate: 1e-5", "    colocate_with: critic"),
    ),
    case(
        "unsupported",
        (
            "12: roles.policy.colocate_with: policy cannot be colocated with reward; possible: reference with policy, "
            "rollout with policy"
        ),
        ("    learning_rate: 1e-5", "    colocate_with: reward"),
    ),
    case(
        "cycle",
        (
            "13: roles.policy.colocate_with: policy cannot be colocated with reference (and they name each other); "
            "possible: reference with policy, rollout with policy"
        ),
        ("    micro_batch_tokens: 2048", "    colocate_with: reference\n  reference:\n    colocate_with: policy"),
    ),
    case(
        "colocated_workers",
        "16: roles.reference.workers: has no effect inside the policy's workers; remove it",
        ("  reward:", "  reference:\n    colocate_with: policy\n    workers: 2\n  reward:"),
    ),
    case(
        "colocated_labels",
        "16: roles.reference.node_labels: has no effect inside the policy's workers; remove it",
        ("  reward:", "  reference:\n    colocate_with: policy\n    node_labels: {zone: a}\n  reward:"),
    ),
    case(
        "sleep_on_cpu",
        "9: roles.rollout.sleep: kv_cache needs a GPU: vLLM's CPU build releases no memory; remove it",
        ("    cpus: 1", "    cpus: 1\n    sleep: kv_cache"),
    ),
    case(
        "colocated_cpu",
        (
            "9: roles.rollout.colocate_with: rollout and policy can share GPUs only; leave gpus out of both, or "
            "remove this"
        ),
        ("    cpus: 1", "    cpus: 1\n    colocate_with: policy\n    gpus: 0"),
    ),
    case(
        "tensor_parallel_cpu",
        "8: roles.rollout.cpus: tensor_parallel_size 2 on the CPU needs at least 2 cores",
        ("    cpus: 1", "    cpus: 1\n    tensor_parallel_size: 2"),
    ),
    case(
        "half_gpu",
        "9: roles.rollout.gpus: rollout and policy must both run on GPUs or both on the CPU",
        ("    cpus: 1", "    cpus: 1\n    gpus: 1"),
    ),
    case(
        "offload_cpu",
        "12: roles.policy.offload_optimizer: has no effect on the CPU; remove it",
        ("    learning_rate: 1e-5", "    offload_optimizer: true"),
    ),
    case(
        "liger_cpu",
        "12: roles.policy.kernels: liger needs GPUs; use torch on the CPU",
        ("    learning_rate: 1e-5", "    kernels: liger"),
    ),
    case(
        "ipc_cpu",
        "4: weight_sync.backend: ipc needs GPUs; on the CPU use shm (or auto)",
        ("seed: 3", "seed: 3\nweight_sync:\n  backend: ipc"),
    ),
    case(
        "store_without_url",
        "3: weight_sync.url: the back-end store needs a URL, such as s3://bucket/folder",
        ("seed: 3", "seed: 3\nweight_sync: {backend: store}"),
    ),
    case(
        "store_of_another_kind",
        "3: weight_sync.url: expected a URL of s3, gs, abfs or file, such as s3://bucket/folder, got 'https://bucket/folder'",
        ("seed: 3", "seed: 3\nweight_sync: {backend: store, url: 'https://bucket/folder'}"),
    ),
    case(
        "store_with_credentials",
        "3: weight_sync.url: a spec holds no credentials; give them to the nodes' environment",
        ("seed: 3", "seed: 3\nweight_sync: {backend: store, url: 's3://key:secret@bucket/folder'}"),
    ),
    case(
        "url_without_store",
        "3: weight_sync.url: only the back-end store uses a URL; set weight_sync.backend: store, or remove it",
        ("seed: 3", "seed: 3\nweight_sync: {url: 's3://bucket/folder'}"),
    ),
    case(
        "checkpoints_of_another_kind",
        "3: checkpoint.path: expected a URL of s3, gs, abfs or file, such as s3://bucket/folder, got '/shared/runs'",
        ("seed: 3", "seed: 3\ncheckpoint: {path: /shared/runs}"),
    ),
    case(
        "checkpoints_with_credentials",
        "3: checkpoint.path: a spec holds no credentials; give them to the nodes' environment",
        ("seed: 3", "seed: 3\ncheckpoint: {path: 's3://key:secret@bucket/folder'}"),
    ),
    case(
        "checkpoints_with_a_signature",
        "3: checkpoint.path: a spec holds no credentials; give them to the nodes' environment",
        ("seed: 3", "seed: 3\ncheckpoint: {path: 'gs://bucket/folder?sig=abc'}"),
    ),
    case(
        "checkpoints_in_azure",
        "3: checkpoint.path: write abfs://container@account.dfs.core.windows.net/folder",
        ("seed: 3", "seed: 3\ncheckpoint: {path: 'az://container/folder'}"),
    ),
    case(
        "checkpoints_with_a_key_of_azure",
        "3: checkpoint.path: a spec holds no credentials; give them to the nodes' environment",
        ("seed: 3", "seed: 3\ncheckpoint: {path: 'abfs://container:key@account.dfs.core.windows.net/folder'}"),
    ),
    case(
        "nccl_cpu",
        "4: weight_sync.backend: nccl needs GPUs; on the CPU use shm (or auto)",
        ("seed: 3", "seed: 3\nweight_sync:\n  backend: nccl"),
    ),
    case(
        "no_reward_at_all",
        "14: roles.reward: scores nothing: set functions, model or both",
        ("    functions:\n      - name: exact_match\n        weight: 1.0", "    workers: 1"),
    ),
    case(
        "zero_weight",
        "14: roles.reward: every weight is 0: there is nothing to learn",
        ("        weight: 1.0", "        weight: 0"),
    ),
    case(
        "unknown_component",
        "21: algorithm.dynamic_sampling_on: no reward component 'exact_mach' (did you mean 'exact_match'?)",
        ("name: grpo\n", "name: dapo\n"),
        ("  group_size: 4", "  group_size: 4\n  dynamic_sampling_on: exact_mach"),
    ),
    case(
        "component_without_dynamic_sampling",
        "21: algorithm.dynamic_sampling_on: has no effect without algorithm.dynamic_sampling above 0",
        ("  group_size: 4", "  group_size: 4\n  dynamic_sampling_on: exact_match"),
    ),
    case(
        "curriculum_component",
        "31: data.curriculum.component: no reward component 'style' (there are: exact_match)",
        ("    path: train.jsonl", "    path: train.jsonl\n  curriculum:\n    component: style"),
    ),
    case(
        "curriculum_floor",
        "31: data.curriculum.floor: must be at least 0.01, got 0",
        ("    path: train.jsonl", "    path: train.jsonl\n  curriculum:\n    floor: 0"),
    ),
    case(
        "candidates_of_grpo",
        "30: data.train.candidates: grpo trains on the policy's samples only; remove it or use one of raft",
        ("    path: train.jsonl", "    path: train.jsonl\n    candidates: given"),
    ),
    case(
        "options_without_answer",
        "30: data.train.answer: is required: it names the right one of the options",
        ("    path: train.jsonl", "    path: train.jsonl\n    answer: null\n    options: choices"),
        ("name: exact_match", "name: letter_share"),
    ),
    case(
        "candidates_of_eval",
        "33: data.eval.candidates: has no effect: the evaluation scores the policy's samples only; remove it",
        ("    path: eval.jsonl", "    path: eval.jsonl\n    candidates: given"),
    ),
    case(
        "masked_raft",
        "21: algorithm.mask_truncated: raft trains on one sample of a group and does not use it; remove it",
        ("name: grpo\n", "name: raft\n"),
        ("  group_size: 4", "  group_size: 4\n  mask_truncated: true"),
    ),
    case(
        "same_name_in_two_modules",
        "18: roles.reward.functions.1.label: two components have the label 'f'; set another label for one of them",
        ("exact_match\n        weight: 1.0", "a:f\n        weight: 1.0\n      - name: b.c:f"),
    ),
    case(
        "same_label",
        (
            "18: roles.reward.functions.1.label: two components have the label 'exact_match'; set another label "
            "for one of them"
        ),
        ("        weight: 1.0", "        weight: 1.0\n      - name: exact_match"),
    ),
    case(
        "reward_gpu",
        "15: roles.reward.gpus: reward functions run on the CPU; only a reward model uses a GPU",
        ("    functions:", "    gpus: 1\n    functions:"),
    ),
    case(
        "reward_model_weight",
        "15: roles.reward.model_weight: has no effect without a reward model",
        ("    functions:", "    model_weight: 2.0\n    functions:"),
    ),
    *(
        case(
            f"reward_model_{name}",
            f"15: roles.reward.{name}: {why}",
            ("    functions:", f"    {fields}\n    functions:"),
            *more,
        )
        for name, why, fields, more in (
            ("model_level", "has no effect without a reward model", "model_level: min", ()),
            (
                "model_separator",
                "has no effect on scores of responses; set model_level",
                'model_separator: ";"\n    model: {path: m}',
                (),
            ),
        )
    ),
    case(
        "reward_of_steps_for_responses",
        (
            "15: roles.reward.model_level: dcpo takes one reward for a response; remove it or use one of "
            f"{', '.join(name for name, row in ALGORITHMS.items() if row.advantage.estimator in STEP_ESTIMATORS)}"
        ),
        ("    functions:", "    model_level: step\n    model: {path: m}\n    functions:"),
        ("  name: grpo", "  name: dcpo"),
    ),
    case(
        "slow_function",
        "17: roles.reward.functions.0.timeout_s: must be less than schedule.score_timeout_s, 600",
        ("        weight: 1.0", "        timeout_s: 600"),
    ),
    case(
        "gym_reward",
        "16: roles.reward.functions.0.name: scores reasoning_gym tasks only, but data.train is jsonl",
        ("exact_match", "reasoning_gym"),
        ("  eval:\n    kind: jsonl\n    path: eval.jsonl\nevaluation:\n  every_steps: 2\n", ""),
    ),
    case(
        "no_answer",
        ("16: roles.reward.functions.0.name: compares with the correct answer, but data.train.answer is null"),
        ("    path: train.jsonl", "    path: train.jsonl\n    answer: null"),
    ),
    case(
        "template",
        "30: data.train.template: must contain {prompt}, which stands for the row's text",
        ("    path: train.jsonl", "    path: train.jsonl\n    template: 'Q: {question}'"),
    ),
    case(
        "eval_without_data", "30: evaluation: needs data.eval", ("  eval:\n    kind: jsonl\n    path: eval.jsonl\n", "")
    ),
    case(
        "eval_never",
        "33: evaluation: never runs: set every_steps, at_start or at_end, or remove the section",
        ("  every_steps: 2", "  every_steps: 0\n  at_start: false\n  at_end: false"),
    ),
    case(
        "beside_on_one_engine",
        (
            "35: evaluation.beside: needs two engines or more: one evaluates while others sample "
            "(roles.rollout.workers: 1)"
        ),
        ("  every_steps: 2", "  every_steps: 2\n  beside: true"),
    ),
    case(
        "beside_nothing",
        "36: evaluation.beside: has no effect: the only evaluation is that after the last step; set every_steps, or "
        "remove it",
        ("    workers: 1\n    cpus: 1", "    workers: 2\n    cpus: 1"),
        ("  every_steps: 2", "  every_steps: 0\n  at_start: false\n  beside: true"),
    ),
    case(
        "greedy_samples",
        "35: evaluation.sampling.samples: greedy samples are all the same; set a temperature above 0",
        ("  every_steps: 2", "  sampling:\n    samples: 4"),
    ),
    case(
        "same_seed",
        "28: data.eval.seed: must differ from data.train.seed, 1: the tasks would be the same",
        (
            "  train:\n    kind: jsonl\n    path: train.jsonl",
            "  train: {kind: reasoning_gym, seed: 1, size: 8, recipes: [{name: gcd}]}",
        ),
        (
            "  eval:\n    kind: jsonl\n    path: eval.jsonl",
            "  eval: {kind: reasoning_gym, seed: 1, size: 8, recipes: [{name: gcd}]}",
        ),
    ),
    case(
        "recipe_seed",
        "33: data.train.recipes.0.args.seed: set data.train.seed instead",
        (
            "    kind: jsonl\n    path: train.jsonl",
            (
                "    kind: reasoning_gym\n    seed: 1\n    size: 8\n    recipes:\n      - name: gcd\n        "
                "args: {seed: 4}"
            ),
        ),
    ),
    case(
        "recipes_size",
        "30: data.train.size: 1 prompts cannot cover 2 recipes",
        (
            "    kind: jsonl\n    path: train.jsonl",
            "    kind: reasoning_gym\n    seed: 1\n    size: 1\n    recipes: [{name: gcd}, {name: lcm}]",
        ),
    ),
    case("duplicate", "3: seed: given twice (first on line 2)", ("seed: 3", "seed: 3\nseed: 4")),
    case(
        "duplicate_deep",
        "9: roles.rollout.workers: given twice (first on line 7)",
        ("    cpus: 1", "    cpus: 1\n    workers: 2"),
    ),
    case(
        "tag",
        "2: seed: tags are not allowed, got 'tag:yaml.org,2002:python/object/apply:os.system'",
        ("seed: 3", "seed: !!python/object/apply:os.system [touch canary]"),
    ),
    case("str_tag", "2: seed: tags are not allowed, got 'tag:yaml.org,2002:int'", ("seed: 3", "seed: !!int 3")),
    case(
        "anchor",
        "2: seed: anchors and aliases (& and *) are not allowed; write the value out",
        ("seed: 3", "seed: &x 3"),
    ),
    case(
        "alias",
        "22: schedule.steps: anchors and aliases (& and *) are not allowed; write the value out",
        ("  steps: 4", "  steps: *x"),
    ),
    case("tab", "22: not valid YAML: found character that cannot start any token", ("  steps: 4", "\tsteps: 4")),
    case("unclosed", "3: not valid YAML: did not find expected ',' or ']'", ("seed: 3", "seed: [3")),
    case(
        "two_docs", "3: a second document starts here; a spec is one document", ("seed: 3", "seed: 3\n---\nname: other")
    ),
    case("big_int", "2: seed: the number has more than 18 digits", ("seed: 3", "seed: " + "9" * 5000)),
    case("complex_key", "2: a key must be text", ("seed: 3", "? [a, b]\n: 3")),
    case(
        "control",
        "2: not valid YAML: a character that YAML does not allow (control characters are not allowed)",
        ("seed: 3", "seed: \u0001"),
    ),
]

CPU_CASES += [
    mixed_case(
        "mixed_typo",
        "29: data.train.0.wieght: unknown field (did you mean 'weight'?)",
        "kind: jsonl",
        "wieght: 1\n      kind: jsonl",
    ),
    mixed_case("mixed_no_name", "28: data.train.0.name: is required", "name: math\n      kind", "kind"),
    mixed_case(
        "mixed_no_kind",
        "28: data.train.0.kind: is required (for example jsonl)",
        "      kind: jsonl\n      path: math.jsonl",
        "      path: math.jsonl",
    ),
    mixed_case("mixed_twice", "32: data.train.1.name: two sources have the name 'math'", "name: code", "name: math"),
    mixed_case(
        "mixed_name",
        "28: data.train.0.name: may hold lowercase letters, digits and, between them, '-', got 'a/b'",
        "name: math",
        "name: a/b",
    ),
    mixed_case("mixed_weight", "31: data.train.0.weight: must be greater than 0, got 0", "repeats: 2", "weight: 0"),
    mixed_case(
        "mixed_passes",
        "31: data.train.0.repeats: a run would end when all passes are over: give one source no limit (0)",
        "path: code.jsonl",
        "path: code.jsonl\n      repeats: 1",
    ),
    mixed_case(
        "mixed_group",
        "31: data.train.0.group_size: grpo compares samples of a group: needs at least 2",
        "repeats: 2",
        "group_size: 1",
    ),
    mixed_case(
        "mixed_longer",
        "31: data.train.0.max_tokens: must be at most sampling.max_tokens, 32, the longest response of the run; "
        "raise that",
        "repeats: 2",
        "max_tokens: 33",
    ),
    mixed_case(
        "mixed_reward_typo",
        "35: data.train.1.rewards.0.name: no reward function 'lenght' (did you mean 'length'?)",
        "name: length",
        "name: lenght",
    ),
    mixed_case(
        "mixed_reward_field",
        "35: data.train.1.rewards.0.wieght: unknown field (did you mean 'weight'?)",
        "name: length",
        "name: length, wieght: 1",
    ),
    mixed_case(
        "mixed_reward_without_answer",
        "36: data.train.1.rewards.0.name: compares with the correct answer, but data.train.1.answer is null",
        "rewards: [{name: length}]",
        "answer: null\n      rewards: [{name: numeric}]",
    ),
    mixed_case(
        "mixed_tests_in_no_answer",
        (
            "36: data.train.1.rewards.0: reads test cases from the answer, but data.train.1.answer is null; "
            "set args.tests to their column"
        ),
        "rewards: [{name: length}]",
        "answer: null\n      rewards: [{name: python_tests}]",
    ),
    mixed_case(
        "mixed_tests_in_no_column",
        "36: data.train.1.rewards.0.args.tests: 'tests' is not in data.train.1.metadata; add it there",
        "rewards: [{name: length}]",
        "metadata: [cases]\n      rewards: [{name: python_tests, args: {tests: tests}}]",
    ),
    mixed_case(
        "mixed_judge_template_in_no_column",
        "36: data.train.1.rewards.0.args.template: 'level' is not in data.train.1.metadata; add it there",
        "rewards: [{name: length}]",
        f"metadata: [cases]\n      rewards: [{{name: judge, args: {{{JUDGE}, template: '{{response}} {{level}}'}}}}]",
    ),
    mixed_case(
        "mixed_judge_criteria_in_no_column",
        "36: data.train.1.rewards.0.args.criteria: 'answer' is not in data.train.1.metadata; add it there",
        "rewards: [{name: length}]",
        f"metadata: [cases]\n      rewards: [{{name: judge, args: {{{JUDGE}, criteria: answer}}}}]",
    ),
    mixed_case(
        "mixed_reward_zero",
        "35: data.train.1.rewards: every weight is 0: there is nothing to learn",
        "name: length",
        "name: length, weight: 0",
    ),
    mixed_case(
        "mixed_component",
        "20: algorithm.dynamic_sampling_on: no reward component 'exact_match' in the rewards of code "
        "(there are: length)",
        "path: math",
        "path: math",
        ("group_size: 4", "dynamic_sampling_on: exact_match\n  dynamic_sampling: 1"),
    ),
    mixed_case(
        "mixed_unused_role",
        "15: roles.reward.functions: has no effect: every source of data.train sets rewards; leave them out "
        "of one source, and give its functions here",
        "repeats: 2",
        "rewards: [{name: numeric}]",
        ("  eval:\n    kind: jsonl\n    path: eval.jsonl\nevaluation:\n  every_steps: 2\n", ""),
    ),
    mixed_case(
        "mixed_judge",
        "35: data.train.1.rewards.0.name: needs a role `judge`, or args.endpoint with the url and the model of one",
        "name: length",
        "name: judge",
    ),
    case(
        "mixed_empty",
        "27: data.train: needs 1 or more entries, got 0",
        (ONE, "  train: []"),
    ),
    mixed_case(
        "mixed_no_environment",
        "31: data.train.0.environment: has no effect: there is no role environment; remove it",
        "repeats: 2",
        "environment: none",
    ),
    mixed_case(
        "mixed_environment_of_nobody",
        "14: roles.environment: no source of data.train plays in it (environment: none); remove the role",
        "repeats: 2",
        "environment: none",
        ("      rewards: [{name: length}]", "      environment: none"),
        ("  reward:\n", "  environment: {name: guess_number}\n  reward:\n"),
        ("  eval:\n    kind: jsonl\n    path: eval.jsonl\nevaluation:\n  every_steps: 2\n", ""),
    ),
    mixed_case(
        "mixed_environment_reward",
        "37: data.train.1.rewards.0.name: scores episodes only, but the samples of data.train.1 are single responses",
        "rewards: [{name: length}]",
        "environment: none\n      rewards: [{name: environment}]",
        ("  reward:\n", "  environment: {name: guess_number}\n  reward:\n"),
    ),
    mixed_case(
        "mixed_signal_of_another_source",
        "37: data.train.1.dynamic_sampling_on: no reward component 'exact_match' in the rewards of code (there are: "
        "length)",
        "rewards: [{name: length}]",
        "rewards: [{name: length}]\n      dynamic_sampling_on: exact_match",
        ("  group_size: 4", "  group_size: 4\n  dynamic_sampling: 2"),
    ),
    mixed_case(
        "mixed_signal_without_dynamic_sampling",
        "36: data.train.1.dynamic_sampling_on: has no effect without algorithm.dynamic_sampling above 0",
        "rewards: [{name: length}]",
        "rewards: [{name: length}]\n      dynamic_sampling_on: length",
    ),
    mixed_case(
        "mixed_signal_of_nobody",
        "22: algorithm.dynamic_sampling_on: has no effect: every source of data.train sets its own; remove it",
        "repeats: 2",
        "dynamic_sampling_on: exact_match",
        ("rewards: [{name: length}]", "rewards: [{name: length}]\n      dynamic_sampling_on: length"),
        ("  group_size: 4", "  group_size: 4\n  dynamic_sampling: 2\n  dynamic_sampling_on: exact_match"),
    ),
    mixed_case(
        "mixed_mask_of_one_sample",
        "32: data.train.0.mask_truncated: raft trains on one sample of a group and does not use it; remove it",
        "repeats: 2",
        "repeats: 2\n      mask_truncated: true",
        ("name: grpo", "name: raft"),
    ),
    mixed_case(
        "environment_unknown",
        "32: data.train.0.environment: no environment 'gmaes' (did you mean 'games'?)",
        "repeats: 2",
        "environment: gmaes",
        *NAMED,
    ),
    mixed_case(
        "environment_far",
        "32: data.train.0.environment: no environment 'chess' (there are: games, single, and none)",
        "repeats: 2",
        "environment: chess",
        *NAMED,
    ),
    mixed_case(
        "environment_unused",
        "14: roles.environment.single: no samples are episodes in it: name it in a source of data.train or a set of "
        "data.eval (environment: single), or remove it",
        "repeats: 2",
        "environment: games",
        *NAMED,
    ),
    case(
        "environment_of_one_source",
        "14: roles.environment.games: no samples are episodes in it: write data.train as a list of sources, which name "
        "theirs (environment: games), or remove it",
        ("  reward:\n", "  environment: {games: {name: guess_number}}\n  reward:\n"),
    ),
    mixed_case(
        "environment_without_names",
        "32: data.train.0.environment: no environment 'games': roles.environment has no names (none: single "
        "responses); remove it",
        "repeats: 2",
        "environment: games",
        ("  reward:\n", "  environment: {name: guess_number}\n  reward:\n"),
    ),
    mixed_case(
        "environment_without_role",
        "31: data.train.0.environment: has no effect: there is no role environment; remove it",
        "repeats: 2",
        "environment: games",
    ),
    mixed_case(
        "environment_called_none",
        "14: roles.environment.none: stands for no environment; use another name",
        "repeats: 2",
        "environment: none",
        ("  reward:\n", "  environment: {none: {name: guess_number}}\n  reward:\n"),
    ),
    mixed_case(
        "environment_called_as_a_field",
        "14: roles.environment.workers: stands for a field of an environment; use another name",
        "repeats: 2",
        "environment: workers",
        (
            "  reward:\n",
            "  environment: {workers: {name: guess_number}, games: {name: guess_number}}\n  reward:\n",
        ),
        ("rewards: [{name: length}]", "environment: games"),
    ),
    mixed_case(
        "environment_name",
        "14: roles.environment.Games: may hold lowercase letters, digits and, between them, '-', got 'Games'",
        "repeats: 2",
        "environment: Games",
        ("  reward:\n", "  environment: {Games: {name: guess_number}}\n  reward:\n"),
    ),
    mixed_case(
        "environment_field",
        "14: roles.environment.games.workrs: unknown field (did you mean 'workers'?)",
        "repeats: 2",
        "environment: games",
        ("  reward:\n", "  environment: {games: {name: guess_number, workrs: 2}}\n  reward:\n"),
    ),
    mixed_case(
        "environment_timeout",
        "14: roles.environment.games.turn_timeout_s: must be at most roles.environment.games.episode_timeout_s, 5",
        "repeats: 2",
        "environment: games",
        (
            "  reward:\n",
            "  environment: {games: {name: guess_number, turn_timeout_s: 6, episode_timeout_s: 5}}\n  reward:\n",
        ),
    ),
    mixed_case(
        "environment_reward_of_a_single_source",
        "36: data.train.1.rewards.0.name: scores episodes only, but the samples of data.train.1 are single responses",
        "rewards: [{name: length}]",
        "rewards: [{name: environment}]",
        ("  reward:\n", "  environment: {games: {name: guess_number}}\n  reward:\n"),
        ("repeats: 2", "environment: games"),
    ),
    case(
        "environment_of_a_set",
        "32: data.eval.hard.environment: no environment 'game' (did you mean 'games'?)",
        (
            "    kind: jsonl\n    path: eval.jsonl",
            "    hard: {kind: jsonl, path: eval.jsonl, environment: game}",
        ),
        ("  reward:\n", "  environment: {games: {name: guess_number}}\n  reward:\n"),
    ),
    case(
        "over_one_source",
        "31: data.curriculum.over_sources: needs several sources in data.train; remove it",
        ("    path: train.jsonl", "    path: train.jsonl\n  curriculum:\n    over_sources: true"),
    ),
]

GPU_CASES = [
    case(
        "undivided_workers",
        "11: roles.policy.sequence_parallel_size: 3 does not divide the role's 2 workers",
        (
            "    workers: 2\n    gpus: 1\n  critic",
            "    workers: 2\n    gpus: 1\n    sequence_parallel_size: 3\n  critic",
        ),
    ),
    case(
        "shared_rows_without_packing",
        "12: roles.policy.packing: must be true with sequence_parallel_size 2: it divides packed rows",
        (
            "    workers: 2\n    gpus: 1\n  critic",
            "    workers: 2\n    gpus: 1\n    sequence_parallel_size: 2\n    packing: false\n  critic",
        ),
    ),
    case(
        "offload_without_zero",
        "11: roles.policy.offload_optimizer: needs zero_stage 1, 2 or 3: without ZeRO nothing is offloaded",
        (
            "    workers: 2\n    gpus: 1\n  critic",
            "    workers: 2\n    gpus: 1\n    offload_optimizer: true\n    zero_stage: 0\n  critic",
        ),
    ),
    case(
        "two_gpus_a_rank",
        "10: roles.policy.gpus: a policy worker uses one GPU; raise workers instead",
        ("    workers: 2\n    gpus: 1", "    workers: 2\n    gpus: 2"),
    ),
    case(
        "engine_gpus",
        ("7: roles.rollout.gpus: an engine with tensor_parallel_size 1 uses one GPU; raise workers or that"),
        ("    cpus: 2\n    gpus: 1", "    cpus: 2\n    gpus: 2"),
    ),
    case(
        "tensor_parallel_gpus",
        "8: roles.rollout.gpus: must equal tensor_parallel_size, 4, got 1",
        ("    cpus: 2", "    cpus: 2\n    tensor_parallel_size: 4"),
    ),
    case(
        "critic_on_cpu",
        "12: roles.critic.gpus: critic and policy must both run on GPUs or both on the CPU",
        ("  critic:\n    gpus: 1", "  critic:\n    gpus: 0"),
    ),
    case(
        "reference_gpus",
        "14: roles.reference.gpus: a reference worker with shards 1 uses one GPU; raise workers or shards",
        ("  reference:\n    gpus: 1", "  reference:\n    gpus: 2"),
    ),
    case(
        "reference_shards",
        "14: roles.reference.gpus: must equal shards, 4, got 2",
        ("  reference:\n    gpus: 1", "  reference:\n    gpus: 2\n    shards: 4"),
    ),
    case(
        "reference_shards_on_cpu",
        "13: roles.reference.cpus: shards 4 on the CPU needs at least 4 cores",
        ("  reference:\n    gpus: 1", "  reference:\n    shards: 4"),
    ),
    case(
        "ipc_apart",
        ("23: weight_sync.backend: ipc needs rollout on the policy's GPUs (roles.rollout.colocate_with: policy)"),
        ("  backend: auto", "  backend: ipc"),
    ),
    case(
        "sleep_alone",
        (
            "8: roles.rollout.sleep: nobody takes the memory of an engine that sleeps on separate GPUs; "
            "remove it or set roles.rollout.colocate_with: policy"
        ),
        ("    gpus: 1\n  policy:", "    gpus: 1\n    sleep: weights\n  policy:"),
    ),
    case(
        "nccl_shared",
        ("24: weight_sync.backend: nccl needs rollout and policy on separate GPUs; here use ipc (or auto)"),
        (
            "    gpus: 1\n  policy:\n    workers: 2\n    gpus: 1",
            "    gpus: 0.4\n    colocate_with: policy\n  policy:\n    workers: 2\n    gpus: 0.5",
        ),
        ("backend: auto", "backend: nccl"),
    ),
    case(
        "shared_too_much",
        "8: roles.rollout.colocate_with: they share one GPU, but ask for 0.6 + 0.5 of it; remove both: each has half",
        (
            "    gpus: 1\n  policy:\n    workers: 2\n    gpus: 1",
            "    gpus: 0.6\n    colocate_with: policy\n  policy:\n    workers: 2\n    gpus: 0.5",
        ),
    ),
    case(
        "shared_spread",
        "9: roles.rollout.strategy: engines are placed with the policy's workers: set roles.policy.strategy",
        (
            "    gpus: 1\n  policy:\n    workers: 2\n    gpus: 1",
            "    gpus: 0.5\n    colocate_with: policy\n    strategy: spread\n  policy:\n    workers: 2\n    gpus: 0.5",
        ),
    ),
    case(
        "shared_accelerator",
        "9: roles.rollout.accelerator: H200, but roles.policy.accelerator is H100: they share GPUs",
        (
            "    gpus: 1\n  policy:\n    workers: 2\n    gpus: 1",
            (
                "    gpus: 0.5\n    colocate_with: policy\n    accelerator: H200\n  policy:\n    workers: 2\n"
                "    accelerator: H100\n    gpus: 0.5"
            ),
        ),
    ),
    case(
        "shared_labels",
        "9: roles.rollout.node_labels: zone is a, but b in roles.policy.node_labels",
        (
            "    gpus: 1\n  policy:\n    workers: 2\n    gpus: 1",
            (
                "    gpus: 0.5\n    colocate_with: policy\n    node_labels: {zone: a}\n  policy:\n    workers: 2\n"
                "    node_labels: {zone: b}\n    gpus: 0.5"
            ),
        ),
    ),
    case(
        "shared_tensor_parallel",
        "9: roles.rollout.colocate_with: needs one engine for every 2 policy workers, got 2 and 2",
        (
            "    gpus: 1\n  policy:\n    workers: 2\n    gpus: 1",
            (
                "    gpus: 2\n    tensor_parallel_size: 2\n    colocate_with: policy\n  policy:\n    workers: "
                "2\n    gpus: 0.5"
            ),
        ),
    ),
    case(
        "deterministic_liger",
        "11: roles.policy.kernels: liger adds in an order that torch does not know: use torch, or remove deterministic",
        ("name: gpu\n", "name: gpu\ndeterministic: true\n"),
        ("  policy:\n    workers: 2\n", "  policy:\n    workers: 2\n    kernels: liger\n"),
    ),
    case(
        "shared_parts_of_several",
        "11: roles.policy.gpus: must be 1: an engine of 2 GPUs shares whole ones; remove it",
        (
            "    gpus: 1\n  policy:\n    workers: 2\n    gpus: 1",
            "    tensor_parallel_size: 2\n    colocate_with: policy\n  policy:\n    workers: 4\n    gpus: 0.5",
        ),
    ),
    case(
        "shared_unequal",
        "8: roles.rollout.colocate_with: needs one engine for each policy worker, got 2 and 1",
        (
            "    gpus: 1\n  policy:\n    workers: 2\n    gpus: 1",
            "    gpus: 0.4\n    colocate_with: policy\n  policy:\n    workers: 1\n    gpus: 0.5",
        ),
    ),
    case(
        "shared_stale",
        "22: schedule.max_staleness: must be 0 where rollout shares the policy's GPUs: engines sleep during updates",
        (
            "    gpus: 1\n  policy:\n    workers: 2\n    gpus: 1",
            "    gpus: 0.4\n    colocate_with: policy\n  policy:\n    workers: 2\n    gpus: 0.5",
        ),
        ("  steps: 4", "  steps: 4\n  max_staleness: 1"),
    ),
    case(
        "reward_model_batch",
        ("17: roles.reward.micro_batch_tokens: 512 cannot hold one sequence of roles.rollout.max_model_len, 1024"),
        ("    model: {path: models/r}", "    model: {path: models/r}\n    micro_batch_tokens: 512"),
    ),
    case(
        "reference_batch",
        ("15: roles.reference.micro_batch_tokens: 512 cannot hold one sequence of roles.rollout.max_model_len, 1024"),
        ("  reference:\n    gpus: 1", "  reference:\n    gpus: 1\n    micro_batch_tokens: 512"),
    ),
    case(
        "warmup_all",
        "13: roles.critic.warmup_steps: must be less than schedule.steps, 4",
        ("  critic:\n    gpus: 1", "  critic:\n    gpus: 1\n    warmup_steps: 4"),
    ),
    case(
        "kl_estimator",
        "19: algorithm.kl.estimator: ppo has its KL term in the reward, which is k1; remove it",
        ("  name: ppo", "  name: ppo\n  kl: {estimator: k3}"),
    ),
    case(
        "label_taken",
        (
            "17: roles.reward.functions.0.label: two components have the label 'reward_model'; set another "
            "label for one of them"
        ),
        (
            "    model: {path: models/r}",
            "    model: {path: models/r}\n    functions: [{name: exact_match, label: reward_model}]",
        ),
    ),
    case(
        "critic_few_rows",
        ("22: schedule.prompts_per_step: 8 prompts of 1 samples are too few for 16 critic workers times 1 minibatches"),
        ("  critic:\n    gpus: 1", "  critic:\n    gpus: 1\n    workers: 16"),
    ),
    case(
        "critic_average",
        "13: roles.critic.ema_decay: only the policy's average is exported; remove it",
        ("  critic:\n    gpus: 1", "  critic:\n    gpus: 1\n    ema_decay: 0.9"),
    ),
    case(
        "unused_std",
        "19: algorithm.normalize_by_std: ppo does not use it; remove it",
        ("  name: ppo", "  name: ppo\n  normalize_by_std: true"),
    ),
]


def _refusal(folder: Path, text: str | bytes, *overrides: str) -> str:
    path = folder / "spec.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(SpecError) as caught:
        load_rollout_spec(path, overrides)
    return str(caught.value).replace(str(path), "FILE")


@pytest.mark.parametrize("text", [CPU, GPU], ids=["cpu", "gpu"])
def test_the_specs_that_the_cases_edit_are_valid(tmp_path: Path, text: str) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    load_rollout_spec(path)


@pytest.mark.parametrize("case", CPU_CASES, ids=lambda case: case.name)
def test_bad_spec_on_cpu(tmp_path: Path, case: Case) -> None:
    assert _refusal(tmp_path, case.spoil(CPU)) == f"FILE:{case.line}"


@pytest.mark.parametrize("case", GPU_CASES, ids=lambda case: case.name)
def test_bad_spec_on_gpu(tmp_path: Path, case: Case) -> None:
    assert _refusal(tmp_path, case.spoil(GPU)) == f"FILE:{case.line}"


def test_all_problems_come_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = CPU.replace("steps: 4", "steps: 0", 1).replace("seed: 3", "sed: 3").replace("cpus: 1", "cpus: no", 1)
    assert _refusal(tmp_path, text).splitlines() == [
        "FILE:2: sed: unknown field (did you mean 'seed'?)",
        "FILE:8: roles.rollout.cpus: expected a number, got 'no'",
        "FILE:22: schedule.steps: must be at least 1, got 0",
    ]


def test_all_combinations_that_cannot_work_come_at_once(tmp_path: Path) -> None:
    text = CPU.replace("group_size: 4", "group_size: 1").replace("max_tokens: 32", "max_tokens: 4096")
    assert _refusal(tmp_path, text).splitlines() == [
        "FILE:20: algorithm.group_size: grpo compares samples of a group: needs at least 2",
        "FILE:25: sampling.max_tokens: 4096 leaves no room for a prompt in roles.rollout.max_model_len, 512",
    ]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("roles.rollout.workers=0", "--set: roles.rollout.workers: must be at least 1, got 0"),
        ("roles.rollout.wrkers=2", "--set: roles.rollout.wrkers: unknown field (did you mean 'workers'?)"),
        ("roles.rollout", "--set: expected FIELD.PATH=VALUE, got 'roles.rollout'"),
        ("=3", "--set: expected FIELD.PATH=VALUE, got '=3'"),
        ("a..b=3", "--set: expected FIELD.PATH=VALUE, got 'a..b=3'"),
        (".".join("a" * 5000) + "=1", "--set: expected FIELD.PATH=VALUE, got '" + ".".join("a" * 30) + ".'"),
        ("seed.deeper=3", "--set: seed.deeper: seed is not a section"),
        (
            "roles.reward.functions.7.weight=1",
            "--set: roles.reward.functions.7.weight: roles.reward.functions is a list with entries 0 to 0",
        ),
        (
            "seed=[1",
            "--set: seed: not valid YAML: did not find expected ',' or ']' (text with special characters is in quotes, "
            "inside of the shell's: --set 'FIELD=\"*.jsonl\"')",
        ),
        ("seed=!!int 3", "--set: seed: tags are not allowed, got 'tag:yaml.org,2002:int'"),
        ("seed=*x", "--set: seed: anchors and aliases (& and *) are not allowed; write the value out"),
        ("algorithm.group_size=1", "--set: algorithm.group_size: grpo compares samples of a group: needs at least 2"),
        ("schedule={steps: 1}", "--set: schedule.prompts_per_step: is required"),
        ("name=\udc80", "--set: name: is not valid Unicode"),
    ],
)
def test_bad_overrides_are_reported_at_the_option(tmp_path: Path, override: str, line: str) -> None:
    assert _refusal(tmp_path, CPU, override) == line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (b"", "FILE:1: the file is empty; a spec starts with `name: ...`"),
        (b"# nothing\n\n", "FILE:1: the file is empty; a spec starts with `name: ...`"),
        (b"--- \n", "FILE:1: the file is empty; a spec starts with `name: ...`"),
        (b"just text\n", "FILE:1: expected a section, got 'just text'"),
        (b"- a\n- b\n", "FILE:1: expected a section, got a list"),
        (b"name: a\nseed: \xff\xfe\n", "FILE:2: is not UTF-8 text"),
        (CPU.encode("utf-16"), "FILE:1: is not UTF-8 text"),
        (b"name: " + b"x" * (1 << 20), "FILE: is larger than 1 MiB: this is not a spec"),
        (b"[" * 1000, "FILE:1: 0.0.0.0: nested deeper than 32: this is not a spec"),
        (b"{a: " * 900 + b"1", "FILE:1: a.a.a.a: nested deeper than 32: this is not a spec"),
        (b"x: [" + b"1," * 200_000 + b"]", "FILE:1: x.19998: more than 20000 values: this is not a spec"),
    ],
    ids=["empty", "comments", "marker", "text", "list", "latin", "utf16", "large", "deep_list", "deep_map", "many"],
)
def test_files_that_are_not_specs(tmp_path: Path, text: bytes, line: str) -> None:
    assert _refusal(tmp_path, text) == line


def test_paths_that_are_not_files(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "spec.yaml").touch()
    for path, message in (
        (tmp_path / "none.yaml", "no such file"),
        (tmp_path, "is a folder, not a spec"),
        (run, f"is a folder, not a spec (did you mean {run}/spec.yaml?)"),
        (Path("/dev/null"), "is not a regular file"),
        (Path("nul\0.yaml"), "cannot be read (embedded null byte)"),
        (Path("x" * 5000), "cannot be read (File name too long)"),
    ):
        with pytest.raises(SpecError) as caught:
            load_rollout_spec(path)
        assert str(caught.value) == f"{path}: {message}".replace("\0", "?")


def test_an_alias_bomb_is_refused_without_growing(tmp_path: Path) -> None:
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
    tracemalloc.start()
    lines = _refusal(tmp_path, bomb).splitlines()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert lines[0] == "FILE:1: a0: anchors and aliases (& and *) are not allowed; write the value out"
    assert peak < 8 << 20


def test_fifty_megabytes_are_refused_without_being_read(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_bytes(b"- a\n" * 12_500_000)
    tracemalloc.start()
    with pytest.raises(SpecError) as caught:
        load_rollout_spec(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(caught.value) == f"{path}: is larger than 1 MiB: this is not a spec"
    assert peak < 8 << 20


@pytest.mark.parametrize(
    "value",
    [
        "!!python/object/apply:os.system ['touch {canary}']",
        "!!python/object/new:subprocess.Popen [['touch', '{canary}']]",
        "!!python/name:os.system",
        "!!python/module:os",
        "!!binary aGVsbG8=",
        "!include /etc/passwd",
        "! text",
    ],
)
def test_a_tag_runs_nothing(tmp_path: Path, value: str) -> None:
    canary = tmp_path / "canary"
    text = CPU.replace("seed: 3", f"seed: {value.format(canary=canary)}")
    assert _refusal(tmp_path, text).startswith("FILE:2: seed: tags are not allowed, got '")
    assert not canary.exists()


def test_a_message_is_one_line_whatever_the_spec_holds(tmp_path: Path) -> None:
    text = CPU.replace("seed: 3", '"a\\nb\\e[31m\\u2028": 1')
    assert _refusal(tmp_path, text).startswith("FILE:2: a?b?[31m?: unknown field")
    text = CPU.replace("name: base", 'name: "a\\n"')
    assert _refusal(tmp_path, text).startswith("FILE:1: name: may hold lowercase letters")


def test_a_bad_spec_is_refused_without_the_stack(tmp_path: Path) -> None:
    """No torch, Ray, Arrow or numpy is loaded to say that a field is misspelt."""
    path = tmp_path / "spec.yaml"
    path.write_text(CPU.replace("seed: 3", "sed: 3"))
    code = (
        "import sys\nfrom troupe.orchestrator.spec.errors import SpecError\n"
        "from troupe.orchestrator.spec.load import load_rollout_spec\n"
        "try: load_rollout_spec(sys.argv[1])\nexcept SpecError: pass\nelse: sys.exit('loaded')\n"
        "print(sorted({'torch', 'ray', 'pyarrow', 'numpy', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
