"""New weights on their way to another node: what changed since the version before, against all of them.

    python -m benchmarks.weight_sync_delta --learning-rate 1e-6
    python -m benchmarks.weight_sync_delta --learning-rate 1e-4 --gbit 10

One `PolicyWorker` in this process, without Ray, trains the model of `deploy/specs/laptop-grpo.yaml` on right and
wrong answers to the spec's task, with the spec's optimizer and the given learning rate. After each update the weights
are published and sent through a socket of limited speed to a file that stands for another node's, which is verified
whole: a turn ends when an engine could load it.
"""

from __future__ import annotations

import argparse
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from benchmarks.support.harness import (
    GIGABYTES,
    NotCorrect,
    Report,
    Turn,
    command_parser,
    progress,
    run_benchmark,
    take_turns,
)
from benchmarks.support.processes import Meter
from benchmarks.support.train_rows import train_row
from benchmarks.support.workload import encode_prompts
from troupe.orchestrator.data.prompts import load_pools
from troupe.orchestrator.roles.settings import policy_config
from troupe.orchestrator.spec.load import load_rollout_spec
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.training.micro_batches import plan_update
from troupe.workers.contract.messages import TRAIN, TrainRow, WeightUpdate
from troupe.workers.weights.shared_memory import NOTHING, Bytes

if TYPE_CHECKING:
    from troupe.workers.policy import PolicyWorker

ALL, CHANGED = "all weights", "what changed"
SPEC = Path(__file__).parents[1] / "deploy" / "specs" / "laptop-grpo.yaml"
LONGEST_PROMPT = 128
_CHUNK = 1 << 18
"""Bytes that the link sends at once."""


class Link:
    """A socket pair of limited speed."""

    def __init__(self, gbit: float) -> None:
        """`gbit`: Gbit/s."""
        self._bytes_per_s = gbit * 1e9 / 8
        self._near, self._far = socket.socketpair()

    def send(self, payload: Bytes) -> Bytes:
        """The payload as it arrives at the other end, no sooner than the link allows."""
        arrived = np.empty_like(payload)
        sender = threading.Thread(target=self._write, args=(payload,))
        sender.start()
        view = arrived.data
        while view:
            view = view[self._far.recv_into(view) :]
        sender.join()
        return arrived

    def close(self) -> None:
        """Close both ends."""
        self._near.close()
        self._far.close()

    def _write(self, payload: Bytes) -> None:
        began = time.monotonic()
        for start in range(0, payload.nbytes, _CHUNK):
            self._near.sendall(payload[start : start + _CHUNK].data)
            due = began + min(start + _CHUNK, payload.nbytes) / self._bytes_per_s
            time.sleep(max(0.0, due - time.monotonic()))


class DeltaContenders:
    """The two ways to bring a version to the other node."""

    def __init__(self, worker: PolicyWorker, batch: Sequence[pa.Table], link: Link, far: Path) -> None:
        """Bring the first version there.

        Args:
            worker: The trainer.
            batch: TRAIN tables, one for each update in turn.
            link: To the other node.
            far: The other node's folder.
        """
        self._worker = worker
        self._batches = batch
        self._link = link
        self._far = far
        self._version = 0
        self._shares: list[float] = []
        self._verified = 0
        self._current = self._published(base="")
        self._arrive(self._current, NOTHING)

    async def turn(self, name: str) -> Turn:
        """One update, and its way to the other node. Raises NotCorrect if other weights arrive."""
        self.train()
        before = np.fromfile(self._there(self._current).path, np.uint16)
        meter, began = Meter(), time.monotonic()
        update = self._published(base=self._current.digest if name == CHANGED else "")
        published_s = time.monotonic() - began
        delta: Any = self._worker.read_delta(update)[1]  # no store is configured: the bytes
        encoded_s = time.monotonic() - began - published_s
        sent, sent_s = self._arrive(update, delta)
        turn = meter.turn(update.nbytes / 1e9)
        self._current = update
        share = float(np.mean(np.fromfile(self._there(update).path, np.uint16) != before))
        self._shares.append(share)
        phases = {"publish": published_s, "encode": encoded_s, "link": sent_s}
        phases["write and verify"] = turn.wall_s - sum(phases.values())
        figures = {"MB": sent / 1e6, "times fewer bytes": update.nbytes / sent, "words changed, %": 100 * share}
        return replace(turn, phases=phases, figures=figures)

    def train(self) -> None:
        """One update of the policy."""
        table = self._batches[self._version % len(self._batches)]
        rows = tuple(
            TrainRow(len(row["prompt_ids"]) + len(row["response_ids"]), len(row["response_ids"]), True, 0)
            for row in table.select(["prompt_ids", "response_ids"]).to_pylist()
        )
        self._worker.update(plan_update(rows, range(len(rows)), 1, 4096, skip_zero_advantage=False)[0], table)

    def checks(self) -> dict[str, str]:
        """The checks and their outcomes."""
        return {
            "weights": f"{self._verified} versions verified whole by their digest on the other node",
            "changes": f"{100 * min(self._shares):.2f} to {100 * max(self._shares):.2f} % of 16-bit words in an update",
        }

    def _published(self, base: str) -> WeightUpdate:
        self._version += 1
        update = self._worker.publish_weights(self._version, base)
        if update is None:
            raise NotCorrect("the only rank published nothing")
        return update

    def _arrive(self, update: WeightUpdate, delta: Bytes) -> tuple[int, float]:
        """Bring a version to the other node, and verify it. Returns the bytes on the link and their seconds."""
        from troupe.workers.weights.file import WeightDigestMismatch, change_payload, read_payload, write_payload

        payload: Any = delta if delta.nbytes else self._worker.read_weights(update)[1]
        began = time.monotonic()
        arrived = self._link.send(payload)
        seconds = time.monotonic() - began
        if delta.nbytes:
            change_payload(self._there(update), arrived)
        else:
            write_payload(self._there(update), arrived)
        try:
            read_payload(self._there(update))
        except WeightDigestMismatch as error:
            raise NotCorrect(str(error)) from error
        self._verified += 1
        return payload.nbytes, seconds

    def _there(self, update: WeightUpdate) -> WeightUpdate:
        return replace(update, path=str(self._far / Path(update.path).name))


def batches(spec: RolloutSpec, groups: int, samples: int) -> list[pa.Table]:
    """A TRAIN table for each prompt: right answers with a positive advantage, and wrong ones with a negative."""
    from transformers import AutoTokenizer

    model, prompts = Path(spec.model.path), load_pools(spec.data)[0].table
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    tables: list[pa.Table] = []
    for group, ids in enumerate(encode_prompts(model, prompts, range(groups), LONGEST_PROMPT)):
        answer = int(prompts["answer"][group].as_py())
        texts = [f"The answer is {answer if index % 2 else answer + 1 + index}." for index in range(samples)]
        rows = [train_row(group, index, ids, tokenizer.encode(text)) for index, text in enumerate(texts)]
        tables.append(pa.Table.from_pylist(rows, schema=TRAIN))
    return tables


async def measure(given: argparse.Namespace) -> Report:
    """Build the worker, train, alternate the turns. Raises NotCorrect."""
    from troupe.workers.contract.config import Rendezvous
    from troupe.workers.policy import PolicyWorker

    changes = {
        "model.path": given.model,
        "model.dtype": "bfloat16",
        "roles.policy.learning_rate": given.learning_rate,
        "roles.policy.schedule": "constant",
        "roles.policy.threads": given.threads,
        "seed": given.seed,
    }
    spec = load_rollout_spec(SPEC, [f"{name}={value}" for name, value in changes.items()])
    worker = PolicyWorker(policy_config(spec), "policy-0")
    address, port = worker.rendezvous(one_host=True)
    worker.start(Rendezvous(address=address, port=port, rank=0, world_size=1))
    link = Link(given.gbit)
    try:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as far:
            contenders = DeltaContenders(worker, batches(spec, given.groups, given.samples), link, Path(far))
            for number in range(given.warm_up):
                contenders.train()
                progress(f"update {number + 1} of {given.warm_up} before the first turn")
            turns = {name: lambda _, name=name: contenders.turn(name) for name in (ALL, CHANGED)}
            taken = await take_turns(turns, given.turns)
    finally:
        link.close()
        worker.close()
    return Report("weight_sync_delta", taken, ALL, contenders.checks(), GIGABYTES)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser("weight_sync_delta", __doc__, 5)
    add = parser.add_argument
    add("--model", type=Path, default=Path(".cache/models/smollm2-135m-instruct"))
    add("--learning-rate", type=float, default=1e-6, help="(default: 1e-6)")
    add("--gbit", type=float, default=1.0, help="speed of the link in Gbit/s (default: 1)")
    add("--groups", type=int, default=4, help="prompts, one for each update in turn (default: 4)")
    add("--samples", type=int, default=4, help="responses to each prompt (default: 4)")
    add("--warm-up", type=int, default=3, help="updates before the first turn (default: 3)")
    add("--threads", type=int, default=2)
    add("--seed", type=int, default=17)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_benchmark(parse, measure)
