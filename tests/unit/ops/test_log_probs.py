"""Log-probabilities and entropies by chunks, against plain torch on all logits at once."""

from __future__ import annotations

import math

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slime_core.errors import RunError
from slime_core.ops.log_probs import log_probs_and_entropy

ROWS = torch.tensor([0, 1, 3, 4, 6])
TARGETS = torch.tensor([4, 10, 0, 7, 7])
SLOPES, BENDS = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0]), torch.tensor([0.1, 1.0, -1.0, 2.0, 0.0])
CHUNKS = [None, 1, 2, 3, 4, 7, 100]


def logits(dtype: torch.dtype = torch.float32, rows: int = 8, width: int = 11) -> torch.Tensor:
    """With a gradient, and no leaf, as those of a model."""
    generator = torch.Generator().manual_seed(0)
    return (5 * torch.randn(rows, width, generator=generator)).to(dtype).requires_grad_() * 1


def plain(logits_TV: torch.Tensor, *, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    log_p_UV = (logits_TV[ROWS] / temperature).log_softmax(-1)
    return log_p_UV.gather(1, TARGETS[:, None])[:, 0], -(log_p_UV.exp() * log_p_UV).sum(-1)


def gradient(values: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(values, of)[0]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("consume", [False, True])
@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_values_and_gradients_are_those_of_log_softmax(chunk_size, consume, temperature):
    ours, theirs = logits(torch.float64), logits(torch.float64)
    how = {"temperature": temperature, "chunk_size": chunk_size, "consume": consume}
    found_U, entropy_U = log_probs_and_entropy(ours, rows_U=ROWS, targets_U=TARGETS, **how)
    expected_U, expected_entropy_U = plain(theirs, temperature=temperature)
    torch.testing.assert_close(found_U, expected_U, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(entropy_U, expected_entropy_U, rtol=1e-13, atol=1e-13)
    slopes = (found_U * SLOPES).sum() + (entropy_U * BENDS).sum()
    expected = (expected_U * SLOPES).sum() + (expected_entropy_U * BENDS).sum()
    torch.testing.assert_close(gradient(slopes, ours), gradient(expected, theirs), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_one_chunk_size_gives_the_bits_of_another(with_entropy):
    def measured(chunk_size: int | None) -> list[torch.Tensor | None]:
        ours = logits()
        found = log_probs_and_entropy(
            ours, rows_U=ROWS, targets_U=TARGETS, chunk_size=chunk_size, with_entropy=with_entropy
        )
        return [*found, gradient((found[0] * SLOPES).sum(), ours)]

    for chunk_size in CHUNKS:
        for found, expected in zip(measured(chunk_size), measured(None), strict=True):
            assert (found is None and expected is None and not with_entropy) or torch.equal(found, expected)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_blocks_that_fit_the_caches_give_the_bits_of_one_block(monkeypatch, rows):
    def measured() -> list[torch.Tensor]:
        ours = logits()
        found_U, entropy_U = log_probs_and_entropy(ours, rows_U=ROWS, targets_U=TARGETS)
        assert entropy_U is not None
        return [found_U, entropy_U, gradient((found_U * SLOPES).sum() + (entropy_U * BENDS).sum(), ours)]

    expected = measured()
    monkeypatch.setattr("slime_core.ops.log_probs.CACHED_NUMBERS", rows * logits().size(1))
    assert all(map(torch.equal, measured(), expected))


@pytest.mark.parametrize("consume", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 1, 3])
def test_tokens_may_share_a_row_and_stand_in_any_order(chunk_size, consume):
    # A prompt that stands once predicts the first token of each of its responses.
    rows, targets = torch.tensor([6, 2, 2, 0, 2, 6]), torch.tensor([3, 1, 9, 0, 1, 4])
    slopes, bends = torch.arange(6) - 1.5, torch.arange(6) + 0.5
    ours, theirs = logits(torch.float64), logits(torch.float64)
    how = {"chunk_size": chunk_size, "consume": consume}
    found_U, entropy_U = log_probs_and_entropy(ours, rows_U=rows, targets_U=targets, **how)
    log_p_UV = theirs[rows].log_softmax(-1)
    expected_U, expected_entropy_U = log_p_UV.gather(1, targets[:, None])[:, 0], -(log_p_UV.exp() * log_p_UV).sum(-1)
    torch.testing.assert_close(found_U, expected_U)
    found = gradient((found_U * slopes + entropy_U * bends).sum(), ours)
    torch.testing.assert_close(found, gradient((expected_U * slopes + expected_entropy_U * bends).sum(), theirs))


@pytest.mark.parametrize("consume", [False, True])
def test_a_row_of_prompts_alone_has_no_gradient_at_all(consume):
    nothing, ours = torch.zeros(0, dtype=torch.int64), logits()
    found_U, entropy_U = log_probs_and_entropy(ours, rows_U=nothing, targets_U=nothing, consume=consume)
    assert (len(found_U), len(entropy_U)) == (0, 0)
    assert not gradient(found_U.sum() + entropy_U.sum(), ours).any()


def test_large_logits_do_not_overflow():
    rows, targets = torch.tensor([0, 1]), torch.tensor([3, 10])
    found_U, entropy_U = log_probs_and_entropy(torch.full((2, 11), 1e4), rows_U=rows, targets_U=targets)
    assert entropy_U.tolist() == pytest.approx([2.3978953] * 2)  # log 11
    assert found_U.tolist() == pytest.approx([-2.3978953] * 2)


def test_nearly_certain_tokens_keep_their_small_entropy():
    row = torch.tensor([[0.0, -20.0, -20.0]])
    found_U, entropy_U = log_probs_and_entropy(row, rows_U=torch.tensor([0]), targets_U=torch.tensor([1]))
    assert found_U.item() == pytest.approx(-20, rel=1e-6)
    assert entropy_U.item() == pytest.approx(2 * 2.0611536e-9 * 21, rel=1e-2, abs=1e-7)


def test_bfloat16_logits_are_computed_in_float32():
    ours, theirs = logits(torch.bfloat16), logits(torch.bfloat16)
    found_U, entropy_U = log_probs_and_entropy(ours, rows_U=ROWS, targets_U=TARGETS, consume=True, chunk_size=2)
    expected_U, expected_entropy_U = plain(theirs.float(), temperature=1.0)
    assert found_U.dtype == entropy_U.dtype == torch.float32
    torch.testing.assert_close(found_U, expected_U, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy_U, expected_entropy_U, rtol=1e-5, atol=1e-6)
    slopes = gradient((found_U * SLOPES).sum(), ours)
    assert slopes.dtype == torch.bfloat16
    # Rounded once, from float32: 1 - p is not the difference of two rounded numbers.
    exact = gradient((expected_U * SLOPES).sum(), theirs)
    torch.testing.assert_close(slopes, exact, rtol=2**-8, atol=0)


def test_a_consumed_gradient_lies_where_the_logits_were():
    ours = logits()
    place = ours.data_ptr()
    found_U, _ = log_probs_and_entropy(ours, rows_U=ROWS, targets_U=TARGETS, consume=True)
    assert gradient(found_U.sum(), ours).data_ptr() == place


@pytest.mark.parametrize("is_used", ["by another operation", "by a second backward pass"])
def test_logits_that_are_used_again_are_not_consumed_in_silence(is_used):
    ours = logits()
    squared = ours.square().sum() if is_used == "by another operation" else 0
    found_U, _ = log_probs_and_entropy(ours, rows_U=ROWS, targets_U=TARGETS, consume=True)
    if is_used == "by a second backward pass":
        torch.autograd.grad(found_U.sum(), ours, retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        gradient(squared + found_U.sum(), ours)


def test_a_gradient_of_the_gradient_is_refused():
    ours = logits()
    found_U, _ = log_probs_and_entropy(ours, rows_U=ROWS, targets_U=TARGETS)
    with pytest.raises(RunError, match="differentiable once"):
        torch.autograd.grad(found_U.sum(), ours, create_graph=True)


# --- Memory -----------------------------------------------------------------------------------------------------------


class Peak(TorchDispatchMode):
    """The most bytes of tensors that operations made and that were alive at once, by storage."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[object, int]] = {}
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if _is(one)}
        for one in filter(_is, tree_leaves(result)):
            storage = one.untyped_storage()
            if storage._cdata not in given:
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self.bytes = max(self.bytes, sum(size for _, size in self._alive.values()))
        return result


def _is(one: object) -> bool:
    return isinstance(one, torch.Tensor)


def peak_rows(*, chunk_size: int | None, dtype: torch.dtype, entropy: bool) -> float:
    """What a forward and a backward pass hold beyond the logits, in rows of float32; 16 rows of 1024 predict."""
    rows, width = 16, 1024
    ours = logits(dtype, rows=20, width=width)
    with Peak() as peak:
        found_U, entropy_U = log_probs_and_entropy(
            ours,
            rows_U=torch.arange(rows),
            targets_U=torch.arange(rows),
            chunk_size=chunk_size,
            consume=True,
            temperature=0.7,
        )
        gradient((found_U + entropy_U if entropy else found_U).sum(), ours)
    return peak.bytes / (4 * width)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 8, 2, 1])
def test_no_more_than_one_chunk_is_held_beyond_the_logits(chunk_size, entropy, dtype):
    allowed = max(chunk_size or 16, 2)
    held = peak_rows(chunk_size=chunk_size, dtype=dtype, entropy=entropy)
    # Less than a row on top: the numbers that there are of each token and row.
    assert 0.49 * allowed < held < allowed + 0.7


@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_a_logit_of_minus_infinity_adds_nothing_to_the_entropy_or_its_gradient(chunk_size):
    # The limit of p log p is 0: the entropy of (1/2, 1/4, 1/4) in nats is 1.5 log 2, wherever the zero stands.
    probs_V = torch.tensor([0.5, 0.0, 0.25, 0.25], dtype=torch.float64)
    logits_TV = probs_V.log()[None].requires_grad_() * 1
    log_probs_U, entropy_U = log_probs_and_entropy(
        logits_TV, rows_U=torch.tensor([0]), targets_U=torch.tensor([2]), chunk_size=chunk_size
    )
    assert log_probs_U.tolist() == pytest.approx([math.log(0.25)])
    assert entropy_U.tolist() == pytest.approx([1.5 * math.log(2)])
    found_TV = gradient(entropy_U.sum(), logits_TV)
    # -p (log p + H): Cover and Thomas, eq. 2.1, through the softmax Jacobian.
    expected = [-p * (math.log(p) + 1.5 * math.log(2)) if p else 0.0 for p in probs_V.tolist()]
    assert found_TV[0].tolist() == pytest.approx(expected, abs=1e-12)
