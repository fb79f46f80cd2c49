"""A checkpoint with code in any of its files runs none of it: whoever changes a file can change the manifest, too.

That a trainer refuses each such file, under every ZeRO stage, is in test_trainer.py, and that a run resumed from one is
refused in test_grpo_run.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.real.poison import Canary
from troupe.workers.training.checkpoint_files import read_shard


def test_the_canary_would_be_made_by_an_ordinary_load(tmp_path: Path) -> None:
    """The other tests can fail."""
    canary, file = tmp_path / "canary", tmp_path / "state.pt"
    torch.save({"a": Canary(canary)}, file)
    with pytest.raises(ValueError, match=r"state\.pt cannot be read: .*posix\.system"):
        read_shard(file)
    assert not canary.exists()
    torch.load(file, weights_only=False)
    assert canary.exists()
