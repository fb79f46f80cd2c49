"""`troupe env check` in a separate process: the tokenizer and vLLM's parser, and the episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from troupe.workers.agents.interface import Rehearsal, TurnReader, describe, read_row, rehearse, stretches
from troupe.workers.contract.config import EnvironmentConfig
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.environments import dropped_note
from troupe.workers.data.chat import sample_seed
from troupe.workers.data.tokenizer import load_chat_tokenizer
from troupe.workers.data.tokenizer_probe import model_without_torch
from troupe.workers.engine.tool_calls import tool_parser
from troupe.workers.environment import EnvironmentWorker


def report(request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield episodes as data and `lines`: with the turns `said`, if any, and with random tokens. The request has the
    fields of an EnvironmentConfig (`config`) and a ModelConfig (`model`). Raises ValueError."""
    config = EnvironmentConfig(**request["config"])
    model = ModelConfig(**request["model"]) if config.tool_parser else model_without_torch(request)
    tokenizer = load_chat_tokenizer(model)
    reader = TurnReader(tokenizer, tool_parser(config.tool_parser, tokenizer))
    rehearsal = Rehearsal(config, reader, request["max_tokens"], request["max_model_len"])
    seed, said = request["seed"], request["said"]
    rows = [read_row(row, sample_seed(seed, number)) for number, row in enumerate(request["rows"])]
    for name, texts in [*([("turns as given", said)] if said else []), ("turns of random tokens", [])]:
        worker = EnvironmentWorker(config, "check", model)
        for played in asyncio.run(rehearse(rehearsal, worker, rows, texts, seed)):
            parts = stretches(played, tokenizer)
            warnings = [note for note in (dropped_note(list(reader.dropped)), *played.notes.values()) if note]
            yield {
                "environment": config.name,
                "turns": name,
                "status": played.status,
                "finish_reason": played.finish_reason,
                "info": played.info,
                "stretches": [asdict(part) for part in parts],
                "warnings": warnings,
                "lines": [
                    f"{config.name}, {name}",
                    *describe(played, parts),
                    *(f"warning: {warning}" for warning in warnings),
                ],
            }
