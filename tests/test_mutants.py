"""The planted faults stay plantable, and some of them are planted."""

from pathlib import Path

import pytest

from tests import mutants


@pytest.mark.parametrize("mutant", mutants.mutants(), ids=lambda mutant: mutant.fault)
def test_a_fault_has_its_place_and_its_tests(mutant: mutants.Mutant) -> None:
    mutant.file()
    assert mutant.old != mutant.new
    assert all((mutants.ROOT / name).exists() for name in mutant.tests)


def test_a_fault_without_a_test_survives(tmp_path: Path) -> None:
    (tmp_path / "orchestrator").mkdir()
    (tmp_path / "orchestrator" / "maths.py").write_text("ONE = 1\n")
    (tmp_path / "test_maths.py").write_text("from orchestrator.maths import ONE\n\ndef test_one():\n    assert ONE\n")
    survivor = mutants.Mutant("one is two", "ONE = 1", "ONE = 2", ("test_maths.py",))
    assert mutants.survives(survivor, tmp_path) == "its tests pass"
    assert mutants.survives(mutants.Mutant("one is none", "ONE = 1", "ONE = 0", ("test_maths.py",)), tmp_path) == ""
    assert (tmp_path / "orchestrator" / "maths.py").read_text() == "ONE = 1\n"


@pytest.mark.long
def test_a_sample_of_the_faults_is_found() -> None:
    with mutants.copied() as root:
        assert {m.fault: why for m in mutants.sample(mutants.mutants(), 4) if (why := mutants.survives(m, root))} == {}
