"""The ledger: exactly one end for every sample."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.ledger import Ledger, LedgerError


def test_a_sample_ends_once() -> None:
    """Training a sample twice, or after it was dropped, is refused; so is a second visit of the same prompt."""
    ledger = Ledger()
    ledger.dispatch("e0-r1", 1, 2)
    ledger.trained("e0-r1", 0)
    with pytest.raises(LedgerError, match="sample 0 of e0-r1 has reached its end"):
        ledger.trained("e0-r1", 0)
    ledger.dropped("e0-r1", 1, "reward: timeout")
    with pytest.raises(LedgerError, match="closed already"):
        ledger.trained("e0-r1", 1)
    with pytest.raises(LedgerError, match="dispatched before"):
        ledger.dispatch("e0-r1", 1, 2)
    with pytest.raises(LedgerError, match="never dispatched"):
        ledger.trained("e0-r9", 0)
    assert ledger.counts() == {"dispatched": 2, "trained": 1, "dropped": 1, "in_flight": 0, "retries": 0}


def test_late_results_of_abandoned_attempts_are_fenced() -> None:
    """After a retry only the new attempt counts; after the end none does."""
    ledger = Ledger()
    assert ledger.dispatch("e0-r1", 1, 1) == 0
    assert ledger.retry("e0-r1") == 1
    assert not ledger.is_current("e0-r1", 0)
    assert ledger.is_current("e0-r1", 1)
    ledger.trained("e0-r1", 0)
    assert not ledger.is_current("e0-r1", 1)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.sampled_from(["train", "drop", "retry"]))))
def test_books_balance_after_any_history_and_survive_a_restart(history: list[tuple[int, int, str]]) -> None:
    """dispatched = trained + dropped + in flight, before and after a round trip through JSON."""
    ledger = Ledger()
    for row in range(6):
        ledger.dispatch(f"e0-r{row}", row, 3)
    ended: dict[tuple[int, int], str] = {}
    for row, sample, action in history:
        uid = f"e0-r{row}"
        open_now = {g.prompt_uid for g in ledger.open_groups()}
        if action == "retry":
            if uid in open_now:
                ledger.retry(uid)  # what was dropped of the attempt is open again; what was trained is not
                ended = {key: how for key, how in ended.items() if key[0] != row or how == "train"}
        elif (row, sample) in ended:
            with pytest.raises(LedgerError):
                ledger.trained(uid, sample)
        else:
            ended[row, sample] = action
            if action == "train":
                ledger.trained(uid, sample)
            else:
                ledger.dropped(uid, sample, "why")
        ledger.check()
    again = Ledger.restore(json.loads(json.dumps(ledger.state())))
    assert again.counts() == ledger.counts()
    assert again.open_groups() == ledger.open_groups()
    assert again.drop_reasons() == ledger.drop_reasons()
    assert ledger.counts()["in_flight"] == 18 - len(ended)
    assert ledger.counts()["dropped"] == sum(how == "drop" for how in ended.values())


def test_samples_of_a_group_are_entered_together_or_not_at_all() -> None:
    """One that has ended before, or stands twice, keeps the others open."""
    ledger = Ledger()
    ledger.dispatch("e0-r1", 1, 4)
    ledger.dropped("e0-r1", 2, "reward: timeout")
    for samples, wrong in (((0, 1, 2), 2), ((0, 1, 1), 1), ((3, 9), 9)):
        with pytest.raises(LedgerError, match=f"sample {wrong} of e0-r1 has reached its end"):
            ledger.trained("e0-r1", *samples)
        assert ledger.counts()["in_flight"] == 3 and ledger.counts()["trained"] == 0
    ledger.trained("e0-r1", 0, 1, 3)
    assert ledger.counts() == {"dispatched": 4, "trained": 3, "dropped": 1, "in_flight": 0, "retries": 0}
    ledger.check()
