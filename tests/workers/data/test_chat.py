"""Seeds of samples and turns."""

from troupe.workers.data.chat import sample_seed, turn_seed


def test_every_sample_of_every_group_has_its_own_seed() -> None:
    """vLLM's seed + index would overlap between groups."""
    seeds = {sample_seed(seed, index) for seed in range(200) for index in range(16)}
    assert len(seeds) == 200 * 16 and all(0 <= seed < 2**63 for seed in seeds)


def test_every_turn_has_its_own_seed_and_the_first_the_sample_s() -> None:
    assert turn_seed(7, 2, 0) == sample_seed(7, 2)
    assert len({turn_seed(7, index, turn) for index in range(16) for turn in range(16)}) == 16 * 16
