"""What a run can have: the matrix of runs on rollouts, and the one of offline training."""

from __future__ import annotations

from typing import Any

from tests.pairs.features import Fields, Matrix

ADAPTER, REWARD_MODEL, STORE = "ADAPTER", "REWARD_MODEL", "STORE"
"""Stand for folders: of an adapter of the tiny model (rank 4, alpha 16), of a tiny reward model, and an empty one."""
FAR, RESUMED = "far", "resumed"
"""Values that the spec does not set alone: engines as on another host, and a run that is stopped and resumed."""

_RECIPES = [{"name": "chain_sum", "args": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}]
_SUMS = {"kind": "reasoning_gym", "recipes": _RECIPES, "size": 32, "seed": 1}
_TINY = {"path": ".cache/models/tiny-llama", "dtype": "float32"}
_ENGINE = {"cpus": 0.2, "threads": 1, "max_num_seqs": 32, "max_model_len": 256, "enforce_eager": True} | {
    "kv_cache_gib": 0.1
}
_TRAINER = {"cpus": 0.2, "threads": 1, "micro_batch_tokens": 2048, "learning_rate": 0.01}
_UNRATED = {name: value for name, value in _TRAINER.items() if name != "learning_rate"}
_RATED: Fields = {"roles.policy.learning_rate": 0.01}
"""`trpo` finds the length of its steps itself."""
_VOWELS = {"name": "letter_share", "label": "vowels", "args": {"letters": "aeiou"}}
_JUDGED = {
    "name": "judge",
    "timeout_s": 120,
    "args": {"rubric": "Rate how friendly the response is.", "scale": [0, 10]},
}
_JUDGE = _ENGINE | {"model": _TINY, "max_tokens": 16, "structured": {"regex": "Score: (10|[0-9])"}}
_GAME = {
    "name": "troupe.deploy.examples.games:KuhnPoker",
    "cpus": 0.25,
    "truncated_turns": "continue",
    "players": {"first": "policy", "second": "policy"},
}
_GUESS = {"cpus": 0.2, "name": "guess_number", "args": {"low": 1, "high": 10, "guesses": 2}, "episodes": 16} | {
    "truncated_turns": "continue",  # a random model never ends a turn
    "max_sampled_tokens": 512,
    "compaction": {"at": 0.1, "keep_turns": 1, "summary": "Say what you know."},
}
_MEASURED: Fields = {"roles.reward.models.b.offset?": "answer"}
"""References are no episodes."""
_LORA = {"rank": 4, "alpha": 16}
_EVERY_STEP: Fields = {
    "data.eval": {"vowels": _SUMS | {"size": 8, "seed": 9, "solved_at": 0.4}},
    "evaluation": {"every_steps": 1, "prompts": 4},
    "checkpoint.best": {"metric": "eval/vowels/avg"},
}
_OTHER_REFERENCE = {"cpus": 0.2, "threads": 1, "model": _TINY | {"dtype": "bfloat16"}}
_TEACHER = {"cpus": 0.2, "threads": 1, "model": _TINY | {"path": ".cache/models/tiny-teacher"}}
_TEACHER_ENGINE = _ENGINE | {"kind": "engine", "max_model_len": 257, "model": _TEACHER["model"]}
_TEXTS = {"kind": "jsonl", "path": "deploy/specs/data/texts.jsonl", "max_tokens": 64, "texts_per_step": 4}
_TRAINERS: dict[str, Fields] = {
    "one": {},
    "two": {"roles.policy.workers": 2, "roles.critic.workers?": 2},
    "sequence": {
        "roles.policy": {"workers": 2, "sequence_parallel_size": 2},
        "roles.critic.workers?": 2,
        "roles.critic.sequence_parallel_size?": 2,
    },
}
_ZERO: dict[str, Fields] = {
    f"zero {stage}": {"roles.policy.zero_stage": stage, "roles.critic.zero_stage?": stage} for stage in (1, 2, 3)
}
_TYPES: dict[str, Fields] = {
    "float32": {},
    "bfloat16": {"model.dtype": "bfloat16"},
    "float16": {"model.dtype": "float16"},
    "bfloat16 head": {"model.dtype": "bfloat16", "model.float32_head": False},
}
_COMPUTE: dict[str, Fields] = {
    "kept": {},
    "recomputed": {
        "roles.policy.gradient_checkpointing": True,
        "roles.policy.recompute_every": 2,
        "roles.critic.gradient_checkpointing?": True,
        "roles.policy.recompute_products": False,
        "roles.critic.recompute_products?": False,
    },
}
_AVERAGE: dict[str, Fields] = {"none": {}, "average": {"roles.policy.ema_decay": 0.5}}
_RATE: dict[str, Fields] = {
    "constant": {},
    "cosine": {"roles.policy.schedule": "cosine", "roles.policy.min_lr_ratio": 0.5},
}
_SAVES: dict[str, Fields] = {
    "plain": {},
    "beside": {"checkpoint.async_save": True},
    "copied": {"checkpoint.path": f"file://{STORE}"},
}
_END: dict[str, Fields] = {"whole": {}, RESUMED: {"checkpoint.every_steps": 1}}

LEFT_OUT = {
    **dict.fromkeys(("*.offload_optimizer", "*.kernels", "roles.*.sleep", "sampling.router_replay"), "needs a GPU"),
    **dict.fromkeys(("roles.*.strategy", "roles.*.colocate_with"), "where workers are placed"),
    "deterministic": "changes nothing on the CPU",
    "roles.*.enforce_eager": "compilation takes minutes on the CPU",
    "roles.critic.lora.rslora": "as the policy's",
    "*.lora.targets": "other layers of the same kind",
    **dict.fromkeys(("*.allow_special", "*.trust_remote_code"), "how a file is read"),
    **dict.fromkeys(
        ("*.kind", "*.dedupe", "*.loss_on", "*.one_in_a_row", "data.held_out", "*.on_bad_row"),
        "what is read before a run",
    ),
    **dict.fromkeys(("*.preferred", "*.preferred.*"), "what is read before a run"),
    "roles.teacher.average": "the algorithm `average` sets it, under the name of a teacher",
    "roles.*.model*": "another model of a kind that is tried",
    **dict.fromkeys(
        ("roles.judge.enable_prefix_caching", "roles.reference_engine.enable_prefix_caching"), "as in a rollout engine"
    ),
    "roles.teacher.enable_prefix_caching": "log-probs of whole sequences are computed without the cache",
    "roles.critic.schedule": "as the policy's",
    **dict.fromkeys(("output.sinks", "output.prometheus", "output.profile"), "another place for what is written"),
    **dict.fromkeys(
        (
            *("algorithm.aggregation", "algorithm.by_source", "*algorithm.kl*", "algorithm.normalize_by_std"),
            *("algorithm.distill*", "algorithm.compares"),
            *("algorithm.reward_scale", "algorithm.trust_region", "algorithm.whiten", "algorithm.natural_gradient"),
        ),
        "a formula of one step",
    ),
    **dict.fromkeys(
        ("*.batched", "data.*.process", "data.*.normalize", "data.*.mask_truncated"), "as for the whole run"
    ),
    **dict.fromkeys(("data.eval.sampling", "data.eval.rewards"), "as for all sets"),
    **dict.fromkeys(("evaluation.at_end", "*.best.mode"), "another time or side of the same"),
}
"""Switches of a spec that no value of the matrices sets, as patterns of their paths, with the reason."""
ROLLOUTS = Matrix(
    name="rollouts",
    base={
        "name": "pairs",
        "seed": 7,
        "model": _TINY,
        "roles.rollout": _ENGINE,
        "roles.policy": _UNRATED,
        "roles.reward": {"cpus": 0.1, "functions": [_VOWELS]},
        "algorithm": {"name": "grpo", "group_size": 4},
        "schedule": {"steps": 2, "prompts_per_step": 4},
        "sampling": {"max_tokens": 6},
        "data": {"train": _SUMS},
        "checkpoint.every_steps": 0,
    },
    factors={
        "algorithm": {
            "grpo": _RATED,
            "ppo": _RATED | {"algorithm.name": "ppo", "algorithm.kl.coef": 0, "roles.critic": _TRAINER},
            "trpo": {"algorithm.name": "trpo", "algorithm.kl.coef": 0, "roles.critic": _TRAINER},
            "gspo": _RATED | {"algorithm.name": "gspo"},
            "raft": _RATED | {"algorithm.name": "raft"},
            "score_centering": _RATED | {"algorithm.name": "score_centering"},
            "xpo": _RATED
            | {
                "algorithm.name": "xpo",
                "roles.reference": {"colocate_with": "policy"},
                "roles.reference_engine": _ENGINE,
            },
            "distill": _RATED | {"algorithm.name": "distill", "roles.teacher": {"other": _TEACHER}},
            "distill from an engine": _RATED
            | {"algorithm.name": "distill", "roles.teacher": {"other": _TEACHER_ENGINE}},
            "average": _RATED
            | {
                "algorithm.name": "gkd",
                "roles.teacher": {"own": {"colocate_with": "policy", "average": True, "prompt": "{prompt}!"}},
                "roles.policy.ema_decay": 0.5,
                "output.teacher_tokens": True,
            },
        },
        "weights": {
            "all": {},
            "adapters": {"roles.policy.lora": _LORA | {"rslora": True}, "roles.critic.lora?": _LORA},
            "given adapters": {"roles.policy.lora": _LORA, "model.adapter": ADAPTER},
        },
        "sampling": {
            "full": {},
            "top_p": {"sampling.top_p": 0.7},
            "top_k and min_p": {"sampling.top_k": 50, "sampling.min_p": 0.01},
            "form": {"sampling.structured": {"regex": "[a-z ]{8,40}"}},
        },
        "trainers": _TRAINERS,
        "zero": _ZERO,
        "rows": {
            "packed": {},
            "own prompts": {"roles.policy.share_prompts": False},
            "padded": {"roles.policy.packing": False, "roles.critic.packing?": False},
        },
        "staleness": {"synchronous": {}, "asynchronous": {"schedule.max_staleness": 1}},
        "prompts": {
            "one source": {},
            "mixture": {
                "data.train": [
                    _SUMS | {"name": "sums", "weight": 2, "solved_at": 0.3},
                    _SUMS
                    | {"name": "others", "seed": 2, "solved_at": 0.3, "group_size": 2, "max_tokens": 4}
                    | {"algorithm": {"aggregation": "constant"}},
                ]
            },
        },
        "curriculum": {
            "none": {},
            "prompts": {"data.curriculum": {"solved_at": 0.3}},
        },
        "rewards": {
            "function": {},
            "judge": {"roles.reward.functions+": _JUDGED, "roles.judge": _JUDGE},
            "reward models": {
                "roles.reward.models": {
                    "a": {"path": REWARD_MODEL, "dtype": "float32"},
                    "b": {"path": REWARD_MODEL, "offset": 1.0},
                },
                "roles.reward.functions": [
                    *(_VOWELS, *({"name": "reward_model", "args": {"model": name}, "weight": 0} for name in "ab")),
                    {"name": "mean_minus_std", "args": {"of": ["a", "b"]}, "normalize": True},
                ],
            },
            "steps": {
                "roles.reward.functions": [
                    _VOWELS | {"process": True, "args": {"letters": "aeiou", "every": 4}},
                ]
            },
            "overlong": {"roles.reward.functions+": {"name": "overlong", "args": {"limit": 5, "buffer": 3}}},
        },
        "environment": {
            "none": _MEASURED,
            "one": {
                "roles.environment": _GUESS,
                "roles.reward.functions+": {"name": "environment"},
                "algorithm.observation_coef": 0.1,
            },
            "game": {
                "roles.environment": _GAME,
                "roles.reward.functions+": {"name": "environment"},
                "data.train.1.group_size?": 4,
            },
            "named": _MEASURED
            | {
                "roles.environment": {"game": _GUESS},
                "data.train.1.environment?": "game",
                "data.train.1.rewards?": [{"name": "environment"}, _VOWELS],
            },
        },
        "engines": {
            "one": {},
            "two": {
                "roles.rollout": {"workers": 2, "max_workers": 3},
            },
            "tensor parallel": {"roles.rollout": {"tensor_parallel_size": 2, "cpus": 2.0}},
        },
        "prefixes": {"cached": {}, "not cached": {"roles.rollout.enable_prefix_caching": False}},
        "transfer": {
            "shm": {},
            "gloo": {"weight_sync.backend": "gloo"},
            "store": {"weight_sync": {"backend": "store", "url": f"file://{STORE}"}},
        },
        "host": {"same": {}, FAR: {"weight_sync.delta": "auto"}, f"{FAR} without deltas": {"weight_sync.delta": "off"}},
        "evaluation": {
            "none": {},
            "between": _EVERY_STEP,
            "beside": _EVERY_STEP | {"evaluation.beside": True, "evaluation.at_start": False},
        },
        "reference": {
            "none": {},
            "workers": {"roles.reference": _OTHER_REFERENCE, "algorithm.kl.coef": 0.01},
            "sharded": {"roles.reference": {"cpus": 2.0, "threads": 1, "shards": 2}, "algorithm.kl.coef": 0.01},
            "with policy": {"roles.reference": {"colocate_with": "policy"}, "algorithm.kl.coef": 0.01},
        },
        "types": _TYPES,
        "activations": _COMPUTE,
        "updates": {"one": {}, "four": {"schedule.minibatches": 2, "schedule.epochs": 2}},
        "rate": _RATE,
        "average": _AVERAGE,
        "importance": {
            "truncated": {},
            "none": {"algorithm.importance": {"mode": "none"}},
            "masked samples": {
                "algorithm.importance": {"mode": "mask", "level": "sequence", "cap": 10.0, "max_divergence": 10.0}
            },
        },
        "groups": {"all": {}, "dynamic": {"algorithm.dynamic_sampling": 1}},
        "truncated": {
            "trained": {},
            "masked": {"algorithm.mask_truncated": True, "sampling.stop": list("aeiou")},
        },
        "texts": {"none": {}, "ptx": {"algorithm.ptx_coef": 0.1, "data.ptx": _TEXTS}},
        "template": {"chat": {}, "none": {"model.chat_template": "none"}},
        "end": _END,
        "saves": _SAVES | {"beside": {"checkpoint.async_save": True, "checkpoint.samples_mib": 0}},
        "audit": {"none": {}, "at start": {"audit.at_start": True}},
        "records": {
            "all": {},
            "few": {"output": {"trajectories": False, "replay_steps": 0}},
        },
    },
    needs={
        ("environment", "named"): ("prompts", "mixture"),
        ("curriculum", "sources"): ("prompts", "mixture"),
        ("evaluation", "beside"): ("engines", "two"),
    },
)
"""Runs that sample their own responses."""


def _examples(kind: str, **columns: Any) -> Fields:
    files = {split: {"kind": "jsonl", "path": f"deploy/specs/data/{kind}-{split}.jsonl"} | columns for split in _SPLITS}
    return {f"data.{split}": source for split, source in files.items()}


_SPLITS = ("train", "eval")
_PAIRS = _examples("pairs")
_REFERENCE: Fields = {"roles.reference": {}}
OFFLINE = Matrix(
    name="offline",
    base={
        "name": "pairs",
        "seed": 7,
        "model": _TINY,
        "roles.policy": _TRAINER,
        "algorithm.name": "sft",
        "schedule": {"steps": 2, "examples_per_step": 8},
        **_examples("demonstrations"),
        "data.max_length": 96,
        "checkpoint.every_steps": 0,
    },
    factors={
        "algorithm": {
            "sft": {},
            "kd": {
                "algorithm.name": "kd",
                "algorithm.distill.support": "teacher_top_k",
                **_examples("samples"),
                **_REFERENCE,
            },
            "reward_model": {"algorithm.name": "reward_model", "algorithm.level": "token", **_PAIRS},
            "process_reward_model": {"algorithm.name": "process_reward_model", **_examples("steps")},
            "dpo": {"algorithm.name": "dpo", **_PAIRS, **_REFERENCE},
            "ranked dpo": {
                "algorithm": {"name": "dpo", "preference": "fidelity"},
                **_examples("ranked", answers="answers", scores="scores"),
                **_REFERENCE,
            },
            "ipo": {"algorithm.name": "ipo", "algorithm.from_divergence": True, **_PAIRS, **_REFERENCE},
            "orpo": {"algorithm.name": "orpo", **_PAIRS},
            "kto": {"algorithm.name": "kto", **_examples("labelled"), **_REFERENCE},
            "rrhf": {"algorithm.name": "rrhf", **_examples("ranked", answers="answers", scores="scores")},
        },
        "weights": {
            "all": {},
            "adapters": {"roles.policy.lora": _LORA | {"rslora": True}},
            "given adapters": {"roles.policy.lora": _LORA, "model.adapter": ADAPTER},
        },
        "trainers": _TRAINERS,
        "zero": _ZERO,
        "rows": {"packed": {}, "padded": {"roles.policy.packing": False}},
        "reference": {
            "workers": {
                "roles.reference.cpus?": 0.2,
                "roles.reference.threads?": 1,
                "roles.reference.model?": _TINY | {"dtype": "bfloat16"},
            },
            "sharded": {"roles.reference.cpus?": 2.0, "roles.reference.shards?": 2},
            "with policy": {"roles.reference.colocate_with?": "policy"},
        },
        "types": _TYPES,
        "activations": _COMPUTE,
        "updates": {"one": {}, "four": {"schedule.minibatches": 2, "schedule.epochs": 2}},
        "rate": _RATE,
        "average": _AVERAGE,
        "evaluation": {
            "none": {},
            "between": {
                "evaluation": {"every_steps": 1, "examples": 4, "at_start": False},
                "checkpoint.best": {"metric": "eval/loss", "mode": "min"},
            },
        },
        "end": _END,
        "saves": _SAVES,
    },
)
"""Offline training."""
MATRICES = (ROLLOUTS, OFFLINE)
