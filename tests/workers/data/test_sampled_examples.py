"""Samples of a run as examples: what is read as it is, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.tokenizers import new_tokenizer
from troupe.orchestrator.data.examples import load_pool
from troupe.orchestrator.errors import DataError
from troupe.orchestrator.spec.offline import OfflineSpec
from troupe.workers.contract.offline_config import ExampleConfig
from troupe.workers.data.sampled_examples import sampled_examples

CONFIG = ExampleConfig(max_length=16, micro_batch_tokens=64, sampled=True)
K = 2


def sample(model: Path, text: str = "it is 12", **changes: Any) -> dict[str, Any]:
    """A row of a run's samples, with the scores of two teachers."""
    ids = new_tokenizer(model)(text, add_special_tokens=False)["input_ids"]
    scores = {"teacher_ids": [5, 6] * 2 * len(ids), "teacher_logprobs": [-1.0, -2.0, -0.7] * 2 * len(ids)}
    row = {"trained": True, "messages": json.dumps([{"role": "user", "content": "7+5?"}]), "response": text}
    tokens = {"prompt_ids": [1, 4, 9], "response_ids": ids, "loss_mask": [True] * len(ids)}
    return row | tokens | scores | {"teacher_weights": [0.5, 1.0], "ref_logprobs": [-0.5] * len(ids)} | changes


def written(folder: Path, rows: list[dict[str, Any]], **sampling: Any) -> Path:
    """The samples in the folder of a run that sampled so."""
    (folder / "trajectories").mkdir()
    (folder / "spec.yaml").write_text(yaml.safe_dump({"sampling": sampling}))
    pq.write_table(pa.Table.from_pylist(rows), folder / "trajectories" / "step-000001.parquet")
    return folder / "trajectories" / "*.parquet"


def spec(path: Path, *, reference: bool = False, **algorithm: Any) -> OfflineSpec:
    return OfflineSpec.model_validate(
        {
            "name": "x",
            "model": {"path": "m"},
            "roles": {"policy": {}} | ({"reference": {}} if reference else {}),
            "algorithm": {"name": "kd", "distill": {"k": K}} | algorithm,
            "schedule": {"steps": 1, "examples_per_step": 2},
            "data": {"train": {"kind": path.suffix[1:], "path": str(path)}},
        }
    )


def pool(loaded: OfflineSpec) -> Any:
    source: Any = loaded.data.train
    return load_pool(loaded, source, "data.train")


SAMPLED_ONLY = {"compares": "sampled", "distill": None}


def test_tokens_masks_and_scores_are_those_of_the_run(tmp_path: Path, tiny_model: Path) -> None:
    first, second = sample(tiny_model), sample(tiny_model, "no", prompt_ids=[1] * 16)
    first["loss_mask"][0] = False
    untrained = sample(tiny_model, trained=False)
    found = pool(spec(written(tmp_path, [first, untrained, second])))
    assert (found.rows, found.bad_rows, found.skipped) == (2, 0, {"rows that the run did not train on": 1})
    summary, examples = sampled_examples(new_tokenizer(tiny_model), found.table, CONFIG)
    assert (summary.usable, summary.refused) == (1, 1)
    assert summary.problems == ("step-000001.parquet:3: prompt and response have 18 tokens, more than 16",)
    (row,) = examples.to_pylist()
    names = ("prompt_ids", "response_ids", "loss_mask", "teacher_ids", "teacher_weights")
    assert {name: row[name] for name in names} == {name: first[name] for name in names}
    assert row["teacher_logprobs"] == pytest.approx(first["teacher_logprobs"])
    assert row["ref_logprobs"] is None and summary.tokens == 3 + len(first["response_ids"])
    only = pool(spec(tmp_path / "trajectories" / "*.parquet", **SAMPLED_ONLY)).table.to_pylist()[0]
    assert only["ref_logprobs"] == first["ref_logprobs"] and only["teacher_ids"] is None


def test_samples_that_no_teacher_has_scored_are_left_out(tmp_path: Path, tiny_model: Path) -> None:
    """Of a source without a teacher, beside others or in a step without any; a recorded reference has scored them."""
    taught = sample(tiny_model)
    untaught = [sample(tiny_model, "no", teacher_weights=[0.0, 0.0]), sample(tiny_model, "none", teacher_weights=[0.0])]
    path = written(tmp_path, [taught, *untaught])
    found = pool(spec(path))
    assert (found.rows, found.bad_rows, found.skipped) == (1, 0, {"rows that no teacher has scored": 2})
    assert pool(spec(path, **SAMPLED_ONLY)).rows == 3


def test_samples_are_the_same_from_parquet_as_from_json_lines(tmp_path: Path, tiny_model: Path) -> None:
    """Parquet is read without a Python object for each token, also beside a row without scores."""
    rows = [sample(tiny_model), sample(tiny_model, "no"), sample(tiny_model, "none", trained=False, teacher_ids=None)]
    parquet = pool(spec(written(tmp_path, rows)))
    (copy := tmp_path / "trajectories" / "copy.jsonl").write_text("\n".join(map(json.dumps, rows)))
    lines = pool(spec(copy))
    assert (parquet.rows, parquet.digest) == (2, lines.digest)
    origins = parquet.table.schema.get_field_index("origin")
    assert parquet.table.remove_column(origins).equals(lines.table.remove_column(origins))


@pytest.mark.parametrize(
    ("changes", "sampling", "algorithm", "why"),
    [
        ({"teacher_ids": None}, {}, {}, "the samples have no teacher_ids: output.teacher_tokens keeps them, and roles"),
        ({"ref_logprobs": None}, {}, SAMPLED_ONLY, "the samples have no ref_logprobs: a run with a reference has them"),
        ({}, {"temperature": 0.7}, {}, "the teacher's log-probs are at temperature 0.7, and kd compares"),
        ({}, {"top_p": 0.9}, SAMPLED_ONLY, "log-probs are at temperature 1, among the sampler's tokens, and kd"),
        ({}, {}, {"distill": {"k": 3}}, "have the teacher's 2 likeliest tokens, and algorithm.distill.k is 3"),
        ({"response_ids": None}, {}, {}, "no row of a run's samples: it has no response_ids"),
    ],
)
def test_samples_that_lack_what_the_loss_needs_are_refused(
    changes: Any, sampling: Any, algorithm: Any, why: str, tmp_path: Path, tiny_model: Path
) -> None:
    path = written(tmp_path, [sample(tiny_model, **changes)], **sampling)
    with pytest.raises(DataError, match=rf"data\.train\.path: does not fit 1 rows; .*{why}"):
        pool(spec(path, **algorithm))


def test_a_reference_scores_samples_of_any_temperature_and_file(tmp_path: Path, tiny_model: Path) -> None:
    row = sample(tiny_model, teacher_ids=None)
    assert pool(spec(written(tmp_path, [row], temperature=0.7), reference=True)).rows == 1
    (copy := tmp_path / "copy.jsonl").write_text(json.dumps(row))
    assert pool(spec(copy, reference=True)).rows == 1
    with pytest.raises(DataError, match=r"the path is none of RUN/trajectories/\*\.parquet with a spec\.yaml in RUN"):
        pool(spec(copy, **SAMPLED_ONLY))


def test_tokens_of_another_tokenizer_or_vocabulary_are_refused_with_the_first_text(
    tmp_path: Path, tiny_model: Path
) -> None:
    """None is used, also of those whose text is the same."""
    good, other = sample(tiny_model, "no"), sample(tiny_model, "it is 12")
    other["response_ids"] = [token + 1 for token in other["response_ids"]]
    tokenizer = new_tokenizer(tiny_model)
    table = pool(spec(written(tmp_path, [good, other, other]), reference=True)).table
    summary, _ = sampled_examples(tokenizer, table, CONFIG)
    assert (summary.usable, summary.refused) == (0, 3)
    assert summary.problems[0].startswith(
        "step-000001.parquet:2: sampled with another tokenizer: the tokens of 'it is 12' are "
    )
    outside = pa.Table.from_pylist([table.to_pylist()[0] | {"prompt_ids": [9999]}], schema=table.schema)
    (problem,) = sampled_examples(tokenizer, outside, CONFIG)[0].problems
    assert "sampled with another vocabulary: the token 9999" in problem


def test_samples_with_different_numbers_of_teachers_are_not_mixed(tmp_path: Path, tiny_model: Path) -> None:
    one = sample(tiny_model, "no", teacher_weights=[1.0])
    one |= {"teacher_ids": one["teacher_ids"][: len(one["teacher_ids"]) // 2]}
    table = pool(spec(written(tmp_path, [sample(tiny_model), one]))).table
    summary, _ = sampled_examples(new_tokenizer(tiny_model), table, CONFIG)
    assert (summary.usable, summary.problems) == (0, ("samples with 1 and with 2 teachers cannot be mixed",))
