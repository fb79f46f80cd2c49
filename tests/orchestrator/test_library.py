"""`import troupe`: public names, specs from code, the run of a folder. Training: `tests/real/test_wheel.py`."""

from __future__ import annotations

import ast
import asyncio
import importlib.metadata
import inspect
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from typer.testing import CliRunner

import troupe
from tests.conftest import ROOT
from troupe.orchestrator import library
from troupe.orchestrator.cli import app
from troupe.orchestrator.cluster.ray_cluster import Cluster
from troupe.orchestrator.runs import session as run_module
from troupe.orchestrator.runs.session import RunRequest
from troupe.orchestrator.spec.load import load_rollout_spec
from troupe.orchestrator.training import checkpoint
from troupe.orchestrator.training.checkpoint import CheckpointStore
from troupe.orchestrator.training.parts import FORMAT

GRPO = ROOT / "deploy" / "specs" / "tiny-grpo.yaml"
RECORDED = ROOT / "tests" / "orchestrator" / "insight" / "verdicts" / "recorded"


def test_every_public_name_exists_and_is_listed() -> None:
    for name in troupe.__all__:
        assert getattr(troupe, name) is not None
    assert {*troupe.__all__, "__version__"} == {*dir(troupe)}, "and nothing else"
    assert troupe.__version__ == importlib.metadata.version("troupe-rl")
    assert Path(troupe.__file__).with_name("py.typed").is_file()
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        getattr(troupe, "trian")  # noqa: B009  (a checker refuses it)


def test_a_type_checker_knows_the_public_names_and_no_others() -> None:
    """A `__getattr__` that it sees would accept every name."""
    (for_checkers, at_run_time) = (
        [
            one
            for node in ast.parse(Path(troupe.__file__).read_text()).body
            if isinstance(node, ast.If) and ast.unparse(node.test) == test
            for one in node.body
        ]
        for test in ("TYPE_CHECKING", "not TYPE_CHECKING")
    )
    names = [one.asname for node in for_checkers if isinstance(node, ast.ImportFrom) for one in node.names]
    declared = [ast.unparse(node) for node in for_checkers if isinstance(node, ast.AnnAssign)]
    assert sorted(map(str, names)) == troupe.__all__ and declared == ["__version__: str"]
    assert [node.name for node in at_run_time if isinstance(node, ast.FunctionDef)] == ["__getattr__"]


def test_a_path_may_begin_with_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    model = saved_model(home / "run", 2)
    shutil.copy(RECORDED / "sick-never-solved.jsonl", home / "run" / "metrics.jsonl")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    assert troupe.export("~/run", "~/out") == home / "out"
    assert library.evaluated_model("~/run") == model
    outcome = troupe.Outcome("~/run")
    assert outcome.steps and outcome.report("~/page.html") == home / "page.html"
    assert not (tmp_path / "~").exists()


class Place:
    """A path that is no text and none of pathlib's, as of the `datasets` or `py.path` libraries."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __fspath__(self) -> str:
        return str(self._path)


def test_any_object_with_a_path_is_one(tmp_path: Path) -> None:
    model = saved_model(tmp_path / "run", 2)
    run = Place(tmp_path / "run")
    assert troupe.Outcome(run).folder == tmp_path / "run" and library.evaluated_model(run) == model
    assert troupe.export(run, Place(tmp_path / "out")) == tmp_path / "out"
    assert troupe.load_spec(Place(GRPO)) == troupe.load_spec(str(GRPO))
    with pytest.raises(troupe.SpecError, match=rf"^{tmp_path}/none\.yaml: no such file"):
        troupe.load_spec(Place(tmp_path / "none.yaml"))
    for path in (name for name, hint in PATHS if "Path" in hint and "PathLike" not in hint):
        pytest.fail(f"{path} takes a Path only")


PATHS = [
    (f"{name}({parameter.name})", str(parameter.annotation))
    for name in ("Outcome", "evaluate", "export", "load_spec", "plan", "run", "samples")
    for parameter in inspect.signature(vars(library)[name]).parameters.values()
]
"""Parameters of the public functions, with their types."""


def test_every_path_of_a_user_goes_through_one_function() -> None:
    functions = [
        node for node in ast.walk(ast.parse(Path(library.__file__).read_text())) if isinstance(node, ast.FunctionDef)
    ]
    makers = {
        f.name
        for f in functions
        for node in ast.walk(f)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Path"
    }
    assert makers == {"local_path"}


def test_an_export_verifies_its_checkpoint_once_and_not_before_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_model(tmp_path / "run", 2)
    verified: list[Path] = []
    verify = checkpoint.verify
    monkeypatch.setattr(checkpoint, "verify", lambda path: verified.append(path) or verify(path))
    monkeypatch.chdir(tmp_path)
    taken = CliRunner().invoke(app, ["export", "run", "run"])
    assert isinstance(taken.exception, OSError) and taken.exception.filename == "run" and not verified
    said = CliRunner().invoke(app, ["export", "run", "out", "--json"])
    assert json.loads(said.stdout) == {"checkpoint": "step-000002", "folder": "out"}
    assert len(verified) == 1


def test_importing_troupe_and_loading_a_spec_import_no_heavy_library(tmp_path: Path) -> None:
    code = (
        "import sys, troupe\n"
        f"spec = troupe.load_spec({str(GRPO)!r}, set=['schedule.steps=3'])\n"
        "print(spec.schedule.steps, *sorted({'ray', 'torch', 'vllm', 'transformers', 'typer'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["3"], done.stderr


def test_a_spec_comes_from_a_file_an_example_or_a_dict() -> None:
    spec = troupe.load_spec(GRPO)
    assert spec == load_rollout_spec(GRPO)
    assert troupe.load_spec(spec.model_dump(mode="json", exclude_defaults=True)) == spec
    assert troupe.load_spec("examples:laptop-grpo").name == "laptop-grpo"
    functions = [{"name": "letter_share", "args": {"letters": "e"}}]
    changed = troupe.load_spec(GRPO, set={"schedule.steps": 2, "roles.reward.functions": functions, "evaluation": None})
    assert changed == load_rollout_spec(
        GRPO, ["schedule.steps=2", "roles.reward.functions=[{name: letter_share, args: {letters: e}}]"]
    )


def test_mistakes_are_one_line_each() -> None:
    with pytest.raises(troupe.SpecError, match=r"--set: schedule.stepz: unknown field \(did you mean 'steps'\?\)"):
        troupe.load_spec(GRPO, set={"schedule.stepz": 1})
    with pytest.raises(troupe.SpecError) as caught:
        troupe.load_spec({"name": "x", "seed": "y"})
    assert "seed: expected a whole number" in str(caught.value) and "model: is required" in str(caught.value)
    with pytest.raises(troupe.TroupeError, match="a file with stages is several runs"):
        troupe.load_spec(ROOT / "deploy" / "specs" / "tiny-three-stage.yaml")
    with pytest.raises(troupe.TroupeError, match="expected a list of FIELD=VALUE or a dict"):
        troupe.load_spec(GRPO, set="schedule.steps=1")
    with pytest.raises(troupe.TroupeError, match="is not the folder of a run"):
        _ = troupe.Outcome(ROOT / "nowhere").metrics


def test_values_of_numpy_and_paths_set_fields_and_other_objects_are_refused_by_name() -> None:
    spec = troupe.load_spec(GRPO, set={"schedule.steps": np.int64(3), "output.folder": Path("a/b"), "seed": 2})
    assert (spec.schedule.steps, spec.output.folder, spec.seed) == (3, "a/b", 2)
    rate = {"roles.policy.learning_rate": np.float32(0.5)}
    assert troupe.load_spec(GRPO, set=rate).roles.policy.learning_rate == 0.5
    for value in (float("inf"), float("nan")):
        with pytest.raises(troupe.SpecError, match=r"--set: roles\.policy\.learning_rate: (?!expected a number)"):
            troupe.load_spec(GRPO, set={"roles.policy.learning_rate": value})
    with pytest.raises(troupe.TroupeError, match=r"set: schedule\.steps: expected numbers, .*, got object"):
        troupe.load_spec(GRPO, set={"schedule.steps": object()})


def test_what_is_written_is_on_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in ("s3://bucket/run", Path("gs://bucket/run")):
        with pytest.raises(troupe.TroupeError, match="bucket/run is not a folder: a run writes to a disk"):
            troupe.run(GRPO, out=url)
        with pytest.raises(troupe.TroupeError, match="is a URL; write the model to a disk"):
            troupe.export("run", url)
        with pytest.raises(troupe.TroupeError, match="is a URL; write the report to a disk"):
            troupe.Outcome(tmp_path).report(url)
    assert not list(tmp_path.iterdir())


def test_the_guide_has_every_function_with_all_of_its_parameters() -> None:
    table = re.findall(r"^\| `(\w+)\((.*?)\)` \|", (ROOT / "docs" / "guides" / "library.md").read_text(), re.MULTILINE)
    documented = {name: re.findall(r"\w+(?==|,|$)|\*", re.sub(r"=[^,]+", "", text)) for name, text in table}
    functions = {name: getattr(troupe, name) for name in troupe.__all__}
    functions = {name: value for name, value in functions.items() if inspect.isfunction(value)}
    assert documented.pop("Outcome") == ["folder"]
    assert documented.keys() == functions.keys()
    for name, function in functions.items():
        kinds = inspect.signature(function).parameters.values()
        keywords = [kind.name for kind in kinds if kind.kind is kind.KEYWORD_ONLY]
        others = [kind.name for kind in kinds if kind.kind is not kind.KEYWORD_ONLY]
        assert documented[name] == [*others, *(["*"] if keywords else []), *keywords], name


def saved_model(run: Path, step: int) -> Path:
    """The model of a new checkpoint of a run whose best one is that of step 2."""
    store = CheckpointStore(run / "checkpoints", keep=9)
    saving = store.begin(step)
    (saving / "model").mkdir()
    (saving / "model" / "config.json").write_text("{}")
    best = {"best": {"metric": "eval/reward", "steps": [{"step": 2, "value": 0.5}]}}
    store.commit(saving, {"format": FORMAT, "parts": best})
    return run / "checkpoints" / f"step-00000{step}" / "model"


def test_a_model_to_evaluate_is_named_directly_by_a_checkpoint_a_run_or_the_hub(tmp_path: Path) -> None:
    first, newest = (saved_model(tmp_path / "run", step) for step in (2, 4))
    assert library.evaluated_model(newest) == library.evaluated_model(newest.parent) == newest
    assert library.evaluated_model(tmp_path / "run") == newest
    assert library.evaluated_model(str(tmp_path / "run"), best=True) == first
    assert library.evaluated_model("Qwen/Qwen2.5-0.5B") == Path("Qwen/Qwen2.5-0.5B")
    with pytest.raises(troupe.TroupeError, match="--best needs the folder of a run"):
        library.evaluated_model(newest, best=True)


def test_no_model_behind_a_url_is_evaluated() -> None:
    with pytest.raises(troupe.TroupeError, match="no model behind a URL") as raised:
        troupe.evaluate(GRPO, "http://me:secret@host/v1")
    assert "secret" not in str(raised.value)


def test_the_run_of_a_folder_has_its_records(tmp_path: Path) -> None:
    shutil.copy(RECORDED / "sick-never-solved.jsonl", tmp_path / "metrics.jsonl")
    outcome = troupe.Outcome(tmp_path)
    metrics = outcome.metrics
    assert outcome.steps == metrics["step"].to_pylist()[-1] == metrics.num_rows
    assert set(metrics["reward/mean"].to_pylist()) == {0.0}
    assert any(verdict.is_alarm for verdict in outcome.verdicts)
    assert outcome.checkpoint is None and outcome.state.name == "unknown"
    assert outcome.report() == tmp_path / "report.html" and outcome.report().stat().st_size > 10_000
    with pytest.raises(troupe.TroupeError, match="samples"):
        troupe.samples(outcome)


def test_a_plan_says_what_does_not_fit() -> None:
    large = troupe.plan(GRPO, set={"roles.rollout.workers": 400}, cluster="1x0")
    assert "roles" in large.misfit or "CPU" in large.misfit


def request(tmp_path: Path) -> RunRequest:
    return RunRequest(load_rollout_spec(GRPO), tmp_path, False, None)


def test_within_a_running_loop_a_run_has_a_thread_and_its_errors_arrive(tmp_path: Path) -> None:
    """As in a notebook, whose cells run inside an event loop."""

    def start() -> str:
        return asyncio.run(asyncio.sleep(0, threading.current_thread().name))

    def fail() -> Any:
        raise troupe.TroupeError("the cluster is full")

    async def cell() -> str:
        with pytest.raises(troupe.TroupeError, match="the cluster is full"):
            library._outside_of_loops(fail, request(tmp_path))
        return library._outside_of_loops(start, request(tmp_path))

    assert asyncio.run(cell()).startswith("troupe-run")
    assert library._outside_of_loops(start, request(tmp_path)) == "MainThread"


def test_runs_of_a_notebook_share_a_thread_unless_one_begins_within_another(tmp_path: Path) -> None:
    """In a new thread Ray would give objects the numbers of an earlier run's."""

    def idle() -> None:
        semaphore = library._THREADS._idle_semaphore
        assert semaphore.acquire(timeout=30)
        semaphore.release()

    async def nested() -> int:
        return library._outside_of_loops(threading.get_ident, request(tmp_path))

    async def cell() -> None:
        first = library._outside_of_loops(threading.get_ident, request(tmp_path))
        idle()
        assert library._outside_of_loops(threading.get_ident, request(tmp_path)) == first
        idle()
        assert library._outside_of_loops(lambda: asyncio.run(nested()), request(tmp_path)) != first

    asyncio.run(cell())


@pytest.mark.parametrize("receiver", ["main", "other"])
def test_interrupting_a_cell_stops_the_run_in_order(receiver: str, tmp_path: Path) -> None:
    """Whichever thread of the process receives the signal."""
    asked = request(tmp_path)
    stopped: list[bool] = []

    async def training() -> None:
        stop = asyncio.Event()
        asked.switch.connect(asyncio.get_running_loop(), stop)
        thread = threading.main_thread().ident or 0 if receiver == "main" else threading.get_ident()
        signal.pthread_kill(thread, signal.SIGINT)
        stopped.append(await asyncio.wait_for(stop.wait(), 30))

    async def cell() -> None:
        library._outside_of_loops(lambda: asyncio.run(training()), asked)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        loop = asyncio.new_event_loop()  # `asyncio.run` would take the signal for itself; a notebook's loop does not
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(cell())
        loop.close()
    finally:
        signal.signal(signal.SIGINT, before)
    assert stopped == [True], "the run has ended before the interrupt is raised"


def test_an_interrupt_after_the_last_step_waits_for_the_end(tmp_path: Path) -> None:
    """The event loop that would be asked to stop is closed by then; the verdicts on the run are still being written."""
    asked, ended = request(tmp_path), list[bool]()

    async def training() -> None:
        asked.switch.connect(asyncio.get_running_loop(), asyncio.Event())

    def run() -> None:
        asyncio.run(training())
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        deadline = time.monotonic() + 60
        while not asked.switch._asked and time.monotonic() < deadline:
            time.sleep(0.01)
        ended.append(asked.switch._asked)

    async def cell() -> None:
        library._outside_of_loops(run, asked)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        loop = asyncio.new_event_loop()
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(cell())
        loop.close()
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == [True]


def test_the_signal_handlers_of_a_program_are_back_after_a_run() -> None:
    def own(number: int, frame: object) -> None:
        """A handler of the program."""

    async def training() -> None:
        with run_module._interrupts(cast("Cluster", None), asyncio.Event(), run_module.StopSwitch()):
            assert signal.getsignal(signal.SIGTERM) is not own

    before = signal.signal(signal.SIGTERM, own)
    try:
        asyncio.run(training())
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)
