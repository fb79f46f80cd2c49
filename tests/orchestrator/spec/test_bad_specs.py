"""Bad specs: each is refused with one line that names the file, the line, the field and what is wrong."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest
import yaml

from troupe.orchestrator.algorithms.table import ALGORITHMS
from troupe.orchestrator.spec.errors import SpecError
from troupe.orchestrator.spec.load import load_rollout_spec
from troupe.orchestrator.spec.roles import RoleName
from troupe.workers.contract.algorithm_config import STEP_ESTIMATORS
from troupe.workers.contract.rewards import REWARD_FUNCTIONS
from troupe.workers.contract.weight_backends import TransferBackend

ROOT = Path(__file__).resolve().parents[3]

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
BASES = {"cpu": CPU, "mixed": CPU.replace(ONE, TWO), "gpu": GPU}


@dataclass(frozen=True)
class Case:
    """A good spec with pieces of text replaced, and the one line that must come back (without the file's name)."""

    name: str
    line: str
    edits: Mapping[str, str]
    base: str = "cpu"

    @property
    def text(self) -> str:
        """The good spec with this case's edits."""
        text = BASES[self.base]
        for old, new in self.edits.items():
            assert old in text
            text = text.replace(old, new, 1)
        return text


def _choices(*names: str) -> str:
    return " or ".join(", ".join(map(repr, names)).rsplit(", ", 1))


_BY_STEP = ", ".join(name for name, row in ALGORITHMS.items() if row.advantage.estimator in STEP_ESTIMATORS)
_TABLE = yaml.safe_load(Path(__file__).with_name("bad_specs.yaml").read_text())
CASES = [Case(name, line, edits, base) for base, rows in _TABLE.items() for name, line, edits in rows] + [
    Case(
        "backend",
        f"3: weight_sync.backend: expected {_choices('auto', *get_args(TransferBackend))}, got 'ncl' "
        "(did you mean 'nccl'?)",
        {"seed: 3": "seed: 3\nweight_sync: {backend: ncl}"},
    ),
    Case(
        "unknown_role",
        f"12: roles.policy.colocate_with: expected {_choices(*get_args(RoleName))}, got 'referee' "
        "(did you mean 'reference'?)",
        {"    learning_rate: 1e-5": "    colocate_with: referee"},
    ),
    Case(
        "reward_unknown",
        f"16: roles.reward.functions.0.name: no reward function 'zzz' (shipped: {', '.join(REWARD_FUNCTIONS)}; "
        "your own: package.module:function)",
        {"      - name: exact_match": "      - name: zzz"},
    ),
    Case(
        "process_of_one_reward",
        "17: roles.reward.functions.0.process: dcpo takes one reward for a response; remove it or use one of "
        + _BY_STEP,
        {
            "      - name: exact_match\n        weight: 1.0": "      - name: mine.rewards:judge\n        process: true",
            "  name: grpo": "  name: dcpo",
        },
    ),
    Case(
        "reward_of_steps_for_responses",
        f"15: roles.reward.model.level: dcpo takes one reward for a response; remove it or use one of {_BY_STEP}",
        {
            "    functions:": "    model: {path: m, level: step}\n    functions:",
            "  name: grpo": "  name: dcpo",
        },
    ),
    Case("big_int", "2: seed: the number has more than 18 digits", {"seed: 3": "seed: " + "9" * 5000}),
]


def _refusal(folder: Path, text: str | bytes, *overrides: str) -> str:
    path = folder / "spec.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(SpecError) as caught:
        load_rollout_spec(path, overrides)
    return str(caught.value).replace(str(path), "FILE")


@pytest.mark.parametrize("base", BASES)
def test_the_specs_that_the_cases_edit_are_valid(tmp_path: Path, base: str) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(BASES[base])
    load_rollout_spec(path)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.base}-{case.name}")
def test_a_bad_spec_is_refused(tmp_path: Path, case: Case) -> None:
    assert _refusal(tmp_path, case.text) == f"FILE:{case.line}"


@pytest.mark.parametrize(
    ("field", "zero"),
    [
        ("sampling.min_p", "0 turns it off"),
        ("algorithm.kl_stop", "0 turns it off"),
        ("schedule.max_staleness", "0 is synchronous training"),
        ("data.train.limit", "0: all"),
    ],
)
def test_a_value_of_minus_one_is_answered_with_what_zero_means(tmp_path: Path, field: str, zero: str) -> None:
    """Other tools write -1 for it."""
    assert _refusal(tmp_path, CPU, f"{field}=-1") == f"--set: {field}: must be at least 0 ({zero}), got -1"


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
