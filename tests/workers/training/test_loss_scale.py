"""The loss scale of float16, without DeepSpeed."""

from __future__ import annotations

from troupe.workers.training.optimizer import LossScale


def after(*updates: tuple[bool, int]) -> LossScale:
    """The scale after so many updates of each kind: skipped or not."""
    scale = LossScale()
    for skipped, count in updates:
        for _ in range(count):
            scale.overflows(skipped)
    return scale


def test_it_halves_at_once_and_doubles_after_a_thousand_updates_without_an_overflow() -> None:
    assert after((True, 3)).value == 2.0**13
    assert after((True, 3), (False, 999)).value == 2.0**13
    assert after((True, 3), (False, 1000)).value == 2.0**14
    assert after((True, 3), (False, 999), (True, 1), (False, 999)).value == 2.0**12  # the count starts again
    assert after((False, 20_000)).value == 2.0**24


def test_the_gradient_of_many_ranks_is_scaled_as_that_of_one() -> None:
    scaled = [ranks * LossScale(1024.0).for_ranks(ranks) for ranks in (1, 2, 3, 8, 256)]
    assert scaled == [1024.0, 1024.0, 768.0, 1024.0, 1024.0]


def test_a_gradient_that_is_not_finite_at_a_scale_of_1_is_no_overflow() -> None:
    scale = LossScale()
    assert [scale.overflows(True) for _ in range(18)] == [True] * 16 + [False] * 2
    assert scale.value == 1.0 and not scale.overflows(False)


def test_a_checkpoint_has_the_scale_and_the_count() -> None:
    scale, restored = after((True, 2), (False, 400)), LossScale()
    restored.restore(scale.state())
    assert restored == scale == LossScale(2.0**14, 400)
