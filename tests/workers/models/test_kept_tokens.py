"""The tokens that a sampler left: how they are written, and log-probs among them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.kept_tokens import packed, words_of
from troupe.workers.contract.kept_tokens import bitmap_words, keeps, kept_of, write_kept
from troupe.workers.contract.messages import ROLLOUTS
from troupe.workers.models.modeling import CausalLogprobs, left_out
from troupe.workers.models.ragged import Ragged
from troupe.workers.models.token_batch import TokenTable, read_kept

SETS = st.integers(1, 300).flatmap(
    lambda vocabulary: arrays.arrays(np.bool_, st.tuples(st.integers(1, 4), st.just(vocabulary)))
)


def column(*rows: list[bytes] | None) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array(rows, ROLLOUTS.field("kept_tokens").type)])


@given(SETS)
def test_what_is_written_is_read(kept: np.ndarray) -> None:
    """By the trainer and by the audit's scorer; within the bound, and empty where everything was left."""
    kept[:, 0] = True  # a sampler leaves at least one token
    rows, vocabulary = kept.shape
    words = words_of(kept)
    read = read_kept(column([row.tobytes() for row in words]), torch.tensor([rows]))
    assert read is not None
    assert torch.equal(left_out(read, vocabulary, torch.device("cpu")), ~torch.from_numpy(kept))
    for own, expected in zip(words, kept, strict=True):
        assert np.array_equal(kept_of(own, vocabulary), expected)
        assert own.nbytes <= min(4 * bitmap_words(vocabulary), 4 * int(expected.sum()))
        assert (len(own) == 0) == bool(expected.all())
        assert [keeps(own.tolist(), token) for token in range(vocabulary)] == expected.tolist()


@given(SETS, st.lists(st.sampled_from(["as drawn", "few", "all"]), min_size=4, max_size=4))
def test_rows_that_are_written_at_once_are_those_written_one_by_one(kept: np.ndarray, forms: list[str]) -> None:
    for row, form in zip(kept, forms, strict=False):
        row[:] = {"as drawn": row, "few": np.arange(len(row)) % 40 == 3, "all": True}[form]
    words, ends = write_kept(packed(kept), kept.shape[1])
    expected = words_of(kept)
    assert words.dtype == np.int32 and np.array_equal(words, np.concatenate(expected))
    assert ends.tolist() == [0, *np.cumsum([len(row) for row in expected])]


def test_few_tokens_are_ids_and_many_are_bits() -> None:
    kept = np.zeros((3, 96), np.bool_)
    kept[0, [3, 40, 95]] = True
    kept[1, :40] = True
    kept[2] = True
    ids, bits, everything = words_of(kept)
    assert ids.tolist() == [3, 40, 95]
    assert bits.tolist() == [-1, -1, 0b11111111, 0]  # the marker, 32 tokens, 8 tokens, none
    assert everything.tolist() == []
    assert (bitmap_words(96), 4 * bitmap_words(151_936)) == (4, 18_996)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (np.array([96], np.int32), "kept token 96 of a vocabulary of 96"),
        (np.array([-1, 5, 5, 5, 5], np.int32), "another vocabulary than the model's, 96"),
    ],
)
def test_sets_of_another_vocabulary_are_refused(words: np.ndarray, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        left_out(Ragged(torch.from_numpy(words), torch.tensor([len(words)])), 96, torch.device("cpu"))
    with pytest.raises(ValueError, match="of 96"):
        kept_of(words, 96)


def test_a_model_with_more_logits_has_the_others_left_out() -> None:
    """Larger models of a family pad their vocabulary further; a reference or teacher may be one."""
    words = Ragged(torch.tensor([-1, 5], dtype=torch.int32), torch.tensor([2]))
    assert (~left_out(words, 96, torch.device("cpu"))).nonzero()[:, 1].tolist() == [0, 2]


def test_rows_that_were_sampled_from_everything_have_no_words() -> None:
    two = np.array([1, 2], np.int32).tobytes()
    found = read_kept(column(None, [two, b""], []), torch.tensor([3, 2, 0]))
    assert found is not None and found.lengths.tolist() == [0, 0, 0, 2, 0]
    assert read_kept(column(None, None), torch.tensor([3, 2])) is None
    with pytest.raises(ValueError, match="row 0: kept_tokens has 1 entries for 3 tokens"):
        read_kept(column([two], [two, two]), torch.tensor([3, 2]))
    with pytest.raises(ValueError, match="32-bit words"):
        read_kept(column([b"abc"]), torch.tensor([1]))


def test_parts_of_a_table_have_their_own_sets(tmp_path: Path) -> None:
    """Also of a table of several pieces, and one that was written to a file and read."""
    entries = [np.array([token], np.int32).tobytes() for token in range(6)]
    pieces = [*column(entries[:2]).chunks, *column(None, entries[2:]).chunks]
    whole = pa.table({"kept_tokens": pa.chunked_array(pieces)})
    pq.write_table(whole, tmp_path / "kept.parquet")
    lengths = torch.tensor([2, 3, 4])
    for table in (whole, pq.read_table(tmp_path / "kept.parquet")):
        for first, ids in enumerate(([0, 1, 2, 3, 4, 5], [2, 3, 4, 5], [2, 3, 4, 5])):
            found = read_kept(table.slice(first)["kept_tokens"], lengths[first:])
            assert found is not None and found.values.tolist() == ids
            assert found.lengths.tolist() == [1, 1, 0, 0, 0, 1, 1, 1, 1][int(lengths[:first].sum()) :]


def measured(
    logits: torch.Tensor, targets: torch.Tensor, kept: np.ndarray, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the trainer computes of logits, without a model."""
    module = CausalLogprobs.__new__(CausalLogprobs)
    torch.nn.Module.__init__(module)
    module.entropy_grad, module.split_head = True, True
    words = words_of(kept)
    lengths = torch.tensor([len(row) for row in words])
    return module._measure(logits, targets, temperature, Ragged(torch.from_numpy(np.concatenate(words)), lengths))


def test_tokens_that_a_model_masks_itself_have_no_part_in_the_entropy() -> None:
    """Such a model's head is not run apart from the rest."""
    module = CausalLogprobs.__new__(CausalLogprobs)
    torch.nn.Module.__init__(module)
    module.entropy_grad, module.split_head = True, False
    logits = torch.tensor([[0.0, 0.0, -torch.inf], [2.0, -torch.inf, 2.0]], requires_grad=True)
    logprobs, entropies = module._measure(logits, torch.tensor([1, 2]), 0.5, None)
    for found in (-logprobs, entropies):
        torch.testing.assert_close(found, torch.full((2,), math.log(2.0)))
    (logprobs + entropies).sum().backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, torch.tensor([[-1.0, 1.0, 0.0], [-1.0, 0.0, 1.0]]))


def test_logprobs_entropies_and_gradients_among_the_tokens_by_hand() -> None:
    """Logits 2 log 3, 0, 2 log 5 at temperature 2, the last left out: 3/4 and 1/4. With p of the tokens that were left,
    d log p_0 / d logit = ([1, 0] - p) / temperature, and nothing of the one that was not."""
    logits = torch.tensor([[2 * math.log(3), 0.0, 2 * math.log(5)]], requires_grad=True)
    logprob, entropy = measured(logits, torch.tensor([0]), np.array([[True, True, False]]), 2.0)
    assert logprob.item() == pytest.approx(math.log(0.75))
    assert entropy.item() == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    (gradient,) = torch.autograd.grad(logprob.sum(), logits, retain_graph=True)
    assert gradient[0].tolist() == pytest.approx([0.125, -0.125, 0.0])
    # dH / d logit_i = -p_i (log p_i + H) / temperature
    (gradient,) = torch.autograd.grad(entropy.sum(), logits)
    by_hand = -0.75 * (math.log(0.75) + entropy.item()) / 2
    assert gradient[0].tolist() == pytest.approx([by_hand, -by_hand, 0.0], abs=1e-6)


@pytest.mark.parametrize("weight", [1e-6, -3.0, 1e6])
def test_the_gradient_of_the_entropy_is_finite_whatever_its_weight(weight: float) -> None:
    """The weight of a token has the number of ranks as a factor, and may be above 1."""
    logits = torch.tensor([[1.0, 2.0, 3.0, -4.0]], requires_grad=True)
    kept = np.array([[True, False, True, True]])
    _, entropy = measured(logits, torch.tensor([0]), kept, 1.0)
    (gradient,) = torch.autograd.grad((weight * entropy).sum(), logits)
    alone = logits.detach()[:, [0, 2, 3]].requires_grad_()
    probs = torch.softmax(alone, -1)
    (expected,) = torch.autograd.grad(-(weight * probs * probs.log()).sum(), alone)
    assert gradient[0, [0, 2, 3]].tolist() == pytest.approx(expected[0].tolist(), rel=1e-4, abs=1e-9 * abs(weight))
    assert gradient[0, 1] == 0.0


@given(st.integers(0, 2**31), st.floats(0.3, 3.0))
def test_gradients_are_those_of_a_softmax_of_the_tokens_alone(seed: int, temperature: float) -> None:
    """In float64, of a policy gradient; the ratio to the distribution that sampled has mean 1 under it, exactly."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 40, generator=generator, dtype=torch.double)
    kept = torch.rand(3, 40, generator=generator) < 0.4
    targets = torch.randint(40, (3,), generator=generator)
    kept[torch.arange(3), targets] = True
    own = logits.clone().requires_grad_()
    logprobs, _ = measured(own, targets, kept.numpy(), temperature)
    logprobs.sum().backward()
    for row in range(3):
        alone = logits[row, kept[row]].clone().requires_grad_()
        place = int(kept[row, : targets[row]].sum())
        expected = torch.log_softmax(alone / temperature, -1)[place]
        expected.backward()
        assert own.grad is not None and alone.grad is not None
        assert logprobs[row].item() == pytest.approx(expected.item(), abs=1e-5)
        assert torch.allclose(own.grad[row, kept[row]], alone.grad, atol=1e-5)
        assert (own.grad[row, ~kept[row]] == 0).all()
    # Another policy, of the same tokens: sum over what may be sampled of p (q / p) = 1.
    other = torch.randn(3, 40, generator=generator, dtype=torch.double)
    every = [measured(other, torch.full((3,), token), kept.numpy(), temperature)[0].exp() for token in range(40)]
    assert torch.allclose(torch.stack(every, -1).sum(-1), torch.ones(3), atol=1e-5)


def test_micro_batches_have_the_sets_of_their_tokens() -> None:
    """Padded, packed and behind a shared prompt, in any order of rows."""
    rows: list[dict[str, Any]] = [
        {"prompt_uid": "p", "sample_index": index, "prompt_ids": [1, 2], "response_ids": ids, "kept_tokens": kept}
        for index, (ids, kept) in enumerate(
            [
                ([3, 4], [np.array([3, 9], np.int32).tobytes(), b""]),
                ([5], None),
                ([6, 7, 8], [np.array([token], np.int32).tobytes() for token in (6, 7, 8)]),
            ]
        )
    ]
    blank = {"attempt": 0, "segment": 0, "rollout_logprobs": [], "weight_versions": [], "turns": []}
    table = pa.Table.from_pylist(
        [blank | row | {"loss_mask": [True] * len(row["response_ids"])} for row in rows], schema=ROLLOUTS
    ).select(
        ["prompt_uid", "sample_index", "attempt", "segment", "prompt_ids", "response_ids", "loss_mask", "kept_tokens"]
    )
    tokens = TokenTable(table)
    for batch in (tokens.batch([2, 0, 1]), tokens.packed_batch([2, 0, 1]), tokens.packed_batch([2, 0, 1], shared=True)):
        assert batch.kept is not None
        assert batch.targets.tolist() == [6, 7, 8, 3, 4, 5]
        assert batch.kept.lengths.tolist() == [1, 1, 1, 2, 0, 0]
        assert batch.kept.values.tolist() == [6, 7, 8, 3, 9]
        halves = batch.kept.split(4)
        assert [part.lengths.tolist() for part in halves] == [[1, 1], [1, 2], [0], [0]]
        assert replace(batch, kept=None).to("cpu").kept is None
    assert tokens.batch([1]).kept is not None  # the table has sets, this row none
    for filler in (tokens.batch([]), tokens.packed_batch([])):  # the head runs as often on a rank without rows
        assert filler.kept is not None and filler.kept.lengths.tolist() == []
        assert [part.lengths.tolist() for part in filler.kept.split(2)] == [[], []]
