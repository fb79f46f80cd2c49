"""The ledger: every sample is trained once or dropped once."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.orchestrator.training.ledger import MOST_KINDS, OTHER, Ledger, LedgerError, kind_of


def drawn(row: int, draw: int = 1) -> tuple[str, int, int]:
    """The prompt of a row, as it is dispatched."""
    return f"e0-r{row}", row, draw


def test_a_sample_is_trained_or_dropped_once() -> None:
    """Training a sample twice or after it was dropped raises an error, as does dispatching a prompt twice."""
    ledger = Ledger()
    ledger.dispatch(*drawn(1), 2)
    ledger.mark_trained("e0-r1", 0)
    with pytest.raises(LedgerError, match="sample 0 of e0-r1 has ended already"):
        ledger.mark_trained("e0-r1", 0)
    ledger.mark_dropped("e0-r1", 1, "reward: timeout")
    with pytest.raises(LedgerError, match="e0-r1 is closed already or was never dispatched"):
        ledger.mark_trained("e0-r1", 1)
    with pytest.raises(LedgerError, match="dispatched before"):
        ledger.dispatch(*drawn(1), 2)
    with pytest.raises(LedgerError, match="never dispatched"):
        ledger.mark_trained("e0-r9", 0)
    assert ledger.counts() == {"dispatched": 2, "trained": 1, "dropped": 1, "in_flight": 0, "retries": 0}


def test_late_results_of_abandoned_attempts_are_not_current() -> None:
    """After a retry only the new attempt is current; after training no attempt is."""
    ledger = Ledger()
    assert ledger.dispatch(*drawn(1), 1) == 0
    assert ledger.retry("e0-r1") == 1
    assert not ledger.is_current("e0-r1", 0)
    assert ledger.is_current("e0-r1", 1)
    ledger.mark_trained("e0-r1", 0)
    assert not ledger.is_current("e0-r1", 1)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.sampled_from(["train", "drop", "retry"]))))
def test_the_ledger_balances_after_any_history_and_a_restart(history: list[tuple[int, int, str]]) -> None:
    """dispatched = trained + dropped + in flight, before and after a round trip through JSON."""
    ledger = Ledger()
    for row in range(6):
        ledger.dispatch(*drawn(row, row + 1), 3)
    ended: dict[tuple[int, int], str] = {}
    for row, sample, action in history:
        uid = f"e0-r{row}"
        open_now = {g.prompt_uid for g in ledger.open_groups()}
        if action == "retry":
            if uid in open_now:
                ledger.retry(uid)  # dropped samples of the attempt are open again, trained ones are not
                ended = {key: how for key, how in ended.items() if key[0] != row or how == "train"}
        elif (row, sample) in ended:
            with pytest.raises(LedgerError):
                ledger.mark_trained(uid, sample)
        else:
            ended[row, sample] = action
            if action == "train":
                ledger.mark_trained(uid, sample)
            else:
                ledger.mark_dropped(uid, sample, "why")
        ledger.check()
    restored = Ledger.restore(json.loads(json.dumps(ledger.state())))
    assert restored.counts() == ledger.counts()
    assert restored.open_groups() == ledger.open_groups()
    assert restored.drop_reasons() == ledger.drop_reasons()
    assert ledger.counts()["in_flight"] == 18 - len(ended)
    assert ledger.counts()["dropped"] == sum(how == "drop" for how in ended.values())


@pytest.mark.parametrize("wrong", [{"dispatched": 3}, {"trained": 1}, {"dropped": {"refused": 1}}])
def test_a_sample_that_is_nowhere_or_twice_is_found(wrong: dict[str, object]) -> None:
    ledger = Ledger()
    ledger.dispatch(*drawn(1), 2)
    Ledger.restore(ledger.state()).check()
    with pytest.raises(LedgerError, match="does not balance"):
        Ledger.restore(ledger.state() | wrong).check()


def test_a_wrong_count_of_samples_in_flight_is_found() -> None:
    ledger = Ledger()
    ledger.dispatch(*drawn(1), 2)
    ledger._in_flight -= 1
    with pytest.raises(LedgerError, match=r"does not balance: .*'in_flight': 1.*, 2 open samples"):
        ledger.check()


def test_samples_of_a_group_are_marked_together_or_not_at_all() -> None:
    """If one sample is already closed, repeated or unknown, none of the samples is marked."""
    ledger = Ledger()
    ledger.dispatch(*drawn(1), 4)
    ledger.mark_dropped("e0-r1", 2, "reward: timeout")
    for samples, wrong in (((0, 1, 2), 2), ((0, 1, 1), 1), ((3, 9), 9)):
        with pytest.raises(LedgerError, match=f"sample {wrong} of e0-r1 has ended already"):
            ledger.mark_trained("e0-r1", *samples)
        assert ledger.counts()["in_flight"] == 3 and ledger.counts()["trained"] == 0
    ledger.mark_trained("e0-r1", 0, 1, 3)
    assert ledger.counts() == {"dispatched": 4, "trained": 3, "dropped": 1, "in_flight": 0, "retries": 0}
    ledger.check()


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("reward: timeout after 5 s", "reward: timeout after 5 s"),
        ("reward: error: ValueError: sample 17 is bad (mine.py:3)", "reward: error: ValueError (mine.py:3)"),
        ("reward: error: ValueError: (odd) text: yes", "reward: error: ValueError"),
        ("turn 2: step: error: KeyError: 'x'; last message 'y'", "turn 2: step: error: KeyError"),
        ("reward: not a number: 'seven' (str)", "reward: not a number: ... (str)"),
        ("x" * 1000, "x" * 120),
    ],
)
def test_reasons_are_counted_by_kind(reason: str, kind: str) -> None:
    assert kind_of(reason) == kind


def test_the_number_of_kinds_is_bounded() -> None:
    ledger = Ledger()
    ledger.dispatch(*drawn(0), 1000)
    for sample in range(1000):
        ledger.mark_dropped("e0-r0", sample, f"reason {sample}")
    reasons = ledger.drop_reasons()
    assert len(reasons) == MOST_KINDS + 1 and reasons[OTHER] == 1000 - MOST_KINDS
    assert ledger.counts()["dropped"] == 1000
    ledger.check()


def test_every_kind_is_described_with_its_first_reason() -> None:
    ledger = Ledger()
    ledger.dispatch(*drawn(0), 3)
    for sample, word in enumerate(("one", "two")):
        ledger.mark_dropped("e0-r0", sample, f"reward: error: ValueError: {word} (mine.py:3)")
    ledger.mark_dropped("e0-r0", 2, "no signal")
    assert ledger.describe_drops() == "2 x reward: error: ValueError: one (mine.py:3); 1 x no signal"


def test_a_closed_prompt_is_refused_by_the_number_of_its_draw_after_a_restart_too() -> None:
    """The state does not grow with closed groups."""
    ledger, sizes = Ledger(), []
    for row in range(1000):
        ledger.dispatch(*drawn(row, row + 1), 1)
        ledger.mark_trained(f"e0-r{row}", 0)
        sizes.append(len(json.dumps(ledger.state())))
    assert max(sizes) - min(sizes) < 12
    for one in (ledger, Ledger.restore(json.loads(json.dumps(ledger.state())))):
        for row in (0, 500, 999):
            with pytest.raises(LedgerError, match=f"e0-r{row} was dispatched before"):
                one.dispatch(*drawn(row, row + 1), 1)
        one.dispatch(*drawn(1000, 1001), 1)


def test_a_state_that_names_the_closed_groups_refuses_as_many_draws() -> None:
    ledger = Ledger()
    ledger.dispatch(*drawn(1, 3), 2)
    state = ledger.state() | {"closed": ["e0-r7", "e0-r9"]}
    del state["drawn"]
    with pytest.raises(LedgerError, match="e0-r4 was dispatched before"):
        Ledger.restore(state).dispatch(*drawn(4, 3), 2)
    Ledger.restore(state).dispatch(*drawn(4, 4), 2)
