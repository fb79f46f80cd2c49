"""Training-step baseline: TRL's GRPOTrainer with its own generation, in one process.

vLLM inside TRL needs a GPU; on the CPU, Hugging Face `generate` samples. The settings are those of an experienced user:
no gradient checkpointing, the largest micro-batches within the product's token budget, no reference model, the
product's mean over all tokens and its optimizer.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from benchmarks.support.bare_loop import BareStep
from benchmarks.support.harness import NotCorrect
from benchmarks.support.timing import Parts
from benchmarks.support.workload import GPU_SHARE, TASKS, Group, Settings, TaskName, check_lengths
from troupe.workers.contract.config import PolicyConfig

if TYPE_CHECKING:
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportPrivateImportUsage]

_PERMISSION_S = 3600.0


class TrlLoop:
    """A GRPOTrainer that runs one step per call; the trainer's own loop runs on a thread and waits between steps."""

    def __init__(
        self,
        policy: PolicyConfig,
        messages: Sequence[str],
        work: Sequence[Sequence[Group]],
        max_tokens: int,
        task: TaskName,
    ) -> None:
        """Build the trainer, which loads the model.

        Args:
            policy: Model and hyperparameters.
            messages: Chats of all groups of all steps, in order, as JSON.
            work: The groups of each step.
            max_tokens: Maximum number of tokens per response.
            task: The task, which defines the reward.
        """
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        import torch

        torch.set_num_threads(policy.trainer.threads)
        self._work = work
        self._task = TASKS[task]
        self._parts = Parts()
        self._sampled: list[list[int]] = []
        self._rewards: list[float] = []
        self._may_step: SimpleQueue[bool] = SimpleQueue()
        self._stepped: SimpleQueue[BareStep | BaseException] = SimpleQueue()
        self._steps = 0
        self._began = self._wall_s = 0.0
        self._trainer = self._build(policy, [json.loads(chat) for chat in messages], max_tokens)

    def ready(self) -> None:
        """Answers when the model is loaded."""

    def step(self, groups: Sequence[Group]) -> BareStep:
        """Run the next step.

        Raises:
            ValueError: `groups` are not those of the step.
            BaseException: Whatever TRL raises.
        """
        if list(groups) != list(self._work[self._steps]):
            raise ValueError(f"step {self._steps + 1} was built for other prompts")
        if not self._steps:
            threading.Thread(target=self._train, daemon=True).start()
        self._steps += 1
        self._may_step.put(True)
        outcome = self._stepped.get()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def _train(self) -> None:
        """Run TRL's loop to its end; before each step it waits for `step` to be called (see `_callback`)."""
        try:
            self._trainer.train()
        except BaseException as error:
            self._stepped.put(error)

    def _reward(self, completion_ids: Any, completions: Any, answer: Any, **_: Any) -> list[float | None]:
        self._sampled = [list(ids) for ids in completion_ids]
        texts = [completion[0]["content"] for completion in completions]
        self._rewards = [self._task.reward(text, right) for text, right in zip(texts, answer, strict=True)]
        return list(self._rewards)

    def _build(self, policy: PolicyConfig, chats: Sequence[Any], max_tokens: int) -> GRPOTrainer:
        from datasets import Dataset
        from transformers import AutoTokenizer
        from trl import GRPOTrainer  # pyright: ignore[reportPrivateImportUsage]

        groups = [group for step in self._work for group in step]
        tokenizer = AutoTokenizer.from_pretrained(policy.model.path, padding_side="left")
        _check_prompts(tokenizer, chats, groups)
        rows = [{"prompt": chat, "answer": group.answer} for chat, group in zip(chats, groups, strict=True)]
        built = GRPOTrainer(
            model=policy.model.path,
            reward_funcs=self._reward,
            args=_trainer_arguments(policy, self._work, max_tokens),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[self._callback()],
        )
        self._parts.watch(built, "_generate_single_turn", "generate")
        self._parts.watch(built, "_generate_and_score_completions", "sample and score")
        return built

    def _callback(self) -> TrainerCallback:
        from transformers import TrainerCallback

        loop = self

        class OneStepAtATime(TrainerCallback):
            """Makes the trainer wait for permission before each step, and reports the step afterwards."""

            def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                loop._may_step.get(timeout=_PERMISSION_S)
                loop._parts.read()
                loop._began = time.monotonic()

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                loop._wall_s = time.monotonic() - loop._began

            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
                if "grad_norm" in logs:
                    loop._stepped.put(loop._summary(logs))

        return OneStepAtATime()

    def _summary(self, logs: dict[str, float]) -> BareStep:
        seconds = self._parts.read()
        wall_s, generate_s = self._wall_s, seconds["generate"]
        prepare_s = seconds["sample and score"] - generate_s
        phases = {"generate": generate_s, "prepare": prepare_s, "update": wall_s - generate_s - prepare_s}
        metrics = {
            "grad_norm": float(logs["grad_norm"]),
            "reward": sum(self._rewards) / len(self._rewards),
            "groups without signal": float(logs["frac_reward_zero_std"]),
        }
        return BareStep(wall_s, phases, sum(map(len, self._sampled)), metrics, self._sampled)


def _trainer_arguments(policy: PolicyConfig, work: Sequence[Sequence[Group]], max_tokens: int) -> GRPOConfig:
    """TRL's settings for the hyperparameters of `policy`."""
    from trl import GRPOConfig  # pyright: ignore[reportPrivateImportUsage]

    trainer = policy.trainer
    sequences = sum(group.samples for group in work[0])
    longest = max(len(group.prompt_ids) for step in work for group in step) + max_tokens
    rows = micro_batch_rows(sequences, longest, trainer.micro_batch_tokens)
    return GRPOConfig(
        output_dir=str(Path(policy.model.path)),  # nothing is saved
        use_cpu=policy.device == "cpu",
        use_vllm=policy.device == "cuda",  # TRL does not support vLLM on the CPU
        vllm_gpu_memory_utilization=GPU_SHARE,
        bf16=policy.model.dtype == "bfloat16",
        model_init_kwargs={"dtype": "float32"},  # master weights: TRL's own default
        gradient_checkpointing=False,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=sequences // rows,
        num_generations=work[0][0].samples,
        max_completion_length=max_tokens,
        max_steps=len(work),
        learning_rate=trainer.learning_rate,
        lr_scheduler_type="constant",
        adam_beta1=trainer.adam_betas[0],
        adam_beta2=trainer.adam_betas[1],
        adam_epsilon=trainer.adam_eps,
        weight_decay=trainer.weight_decay,
        max_grad_norm=trainer.max_grad_norm,
        optim="adamw_torch_fused",
        temperature=policy.sampling.temperature,
        beta=0.0,
        loss_type="dapo",  # mean over the tokens of the whole batch
        shuffle_dataset=False,
        seed=policy.seed & 0xFFFFFFFF,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def micro_batch_rows(sequences: int, longest: int, budget: int) -> int:
    """Rows per micro-batch: the most rows of `longest` tokens that fit `budget` and divide `sequences`, at least 1."""
    fitting = [rows for rows in range(1, sequences + 1) if sequences % rows == 0 and rows * longest <= budget]
    return max(fitting, default=1)


def check_steps(steps: Sequence[BareStep], settings: Settings) -> str:
    """Check TRL's steps.

    Returns:
        The outcome as text.

    Raises:
        NotCorrect: A step sampled another amount, or its gradient is zero although rewards differ within a group.
    """
    check_lengths("TRL", [step.response_ids for step in steps], settings)
    zero = 0
    for number, step in enumerate(steps, 1):
        norm, no_signal = step.figures["grad_norm"], step.figures["groups without signal"] == 1.0
        zero += norm == 0.0
        if not math.isfinite(norm) or (norm == 0.0 and not no_signal):
            raise NotCorrect(f"TRL, step {number}: the gradient norm is {norm}")
    wanted = f"{'' if settings.endless else 'at most '}{settings.max_tokens}"
    gradients = f"gradients are zero in {zero}, which had no signal" if zero else "gradients are not zero"
    return f"{settings.sequences} responses of {wanted} tokens in all {len(steps)} steps; {gradients}"


def _check_prompts(tokenizer: Any, chats: Sequence[Any], groups: Sequence[Group]) -> None:
    """Raises ValueError where TRL tokenizes a chat differently from the product."""
    ids = tokenizer.apply_chat_template(list(chats), add_generation_prompt=True, tokenize=True, return_dict=True)
    wrong = [group.uid for group, own in zip(groups, ids["input_ids"], strict=True) if list(own) != [*group.prompt_ids]]
    if wrong:
        raise ValueError(f"TRL would train on other prompt tokens for {', '.join(wrong)}")
