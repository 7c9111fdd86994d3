"""The suite of advantage estimators of scope ``sample``: from the rewards of whole groups to one number per sample."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from slime_core import GroupedRewards
from slime_testing.harness import Kind
from slime_testing.suite import ComponentSuite, given, require

__all__ = ["AdvantageEstimatorSuite"]

TINY = 1e-12
"""A negligible difference of rewards: above float32's resolution near 0, below every epsilon in use."""

NEGLIGIBLE = 0.05
"""Largest advantage that such a difference may cause; without an epsilon it is about 0.7."""

CLOSE = 1e-4
"""Tolerance, relative or absolute, of two ways to compute one advantage: allows for float32 and an epsilon."""

_NUMBERS = (st.integers(-8, 8), st.integers(1, 40), st.integers(0, 3))
"""Reward in eighths, number of response tokens, number of masked tokens."""


@st.composite
def group_ids(draw: Any, *, fewest_groups: int = 1) -> NDArray[np.int64]:
    """Generate ids of groups with one to five samples each, interleaved: int64 [B]."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=fewest_groups, max_size=4))
    ids = [number for number, size in enumerate(sizes) for _ in range(size)]
    return np.array(draw(st.permutations(ids)), np.int64)


@st.composite
def batches(draw: Any, *, fewest_groups: int = 1) -> GroupedRewards:
    """Generate rewards that float32 represents exactly, with lengths and numbers of trained tokens."""
    groups_B = draw(group_ids(fewest_groups=fewest_groups))
    numbers = [draw(st.lists(each, min_size=len(groups_B), max_size=len(groups_B))) for each in _NUMBERS]
    eighths_B, lengths_B, masked_B = (np.array(column, np.int64) for column in numbers)
    rewards_B = (eighths_B / 8).astype(np.float32)
    trained_B = np.maximum(lengths_B - masked_B, 1)
    return GroupedRewards(rewards_B, groups_B, lengths_B, trained_B, np.arange(len(groups_B)))


class AdvantageEstimatorSuite(ComponentSuite):
    """For estimators that are added with ``scope="sample"``, the default."""

    kind: ClassVar[Kind] = Kind.ADVANTAGE_ESTIMATOR

    def test_the_scope_is_sample(self) -> None:
        scope = self.traits().scope
        require(scope == "sample", f"its scope is {scope!r}; test it with TokenAdvantageEstimatorSuite")

    @given(batch=batches())
    def test_every_sample_gets_one_finite_float32_number(self, batch: GroupedRewards) -> None:
        advantages_B: Any = _estimated(self, batch)
        returned = f"{type(advantages_B).__name__} of {_described(advantages_B)}"
        is_column = isinstance(advantages_B, np.ndarray) and advantages_B.shape == (len(batch),)
        require(is_column, f"estimate() returned {returned}; a numpy array of shape ({len(batch)},) is wanted")
        require(advantages_B.dtype == np.float32, f"estimate() returned {returned}; float32 is wanted")
        require(bool(np.isfinite(advantages_B).all()), f"an advantage is NaN or infinite: {advantages_B}")

    @given(groups_B=group_ids(), reward=st.sampled_from([0.0, 1.0, -3.0, 0.1, 1e4]))
    def test_constant_rewards_give_finite_advantages(self, groups_B: NDArray[np.int64], reward: float) -> None:
        advantages_B = _estimated(self, _batch(np.full(len(groups_B), reward), groups_B))
        require(
            bool(np.isfinite(advantages_B).all()),
            f"all rewards are {reward}, and an advantage is NaN or infinite: {advantages_B}. A division by a standard "
            "deviation needs an epsilon.",
        )

    @given(groups_B=group_ids(), chosen=st.lists(st.booleans(), min_size=20, max_size=20))
    def test_a_negligible_difference_of_rewards_stays_negligible(
        self, groups_B: NDArray[np.int64], chosen: list[bool]
    ) -> None:
        rewards_B = np.where(chosen[: len(groups_B)], TINY, 0.0)
        equal_B = _estimated(self, _batch(np.zeros(len(groups_B)), groups_B))
        nearly_B = _estimated(self, _batch(rewards_B, groups_B))
        if not np.isfinite(equal_B).all():  # another property reports this
            return
        require(
            bool(np.all(np.abs(nearly_B - equal_B) <= NEGLIGIBLE)),
            f"rewards that differ by {TINY} have the advantages {nearly_B}: a division by their standard deviation "
            "has no epsilon, or one that is too small.",
        )

    @given(batch=batches())
    def test_the_batch_is_not_changed(self, batch: GroupedRewards) -> None:
        before = {name: getattr(batch, name).copy() for name in _COLUMNS}
        _estimated(self, batch)
        changed = [name for name, column in before.items() if not np.array_equal(column, getattr(batch, name))]
        require(not changed, f"estimate() changed its input: {', '.join(changed)}. Work on a copy.")

    @given(batch=batches(), seed=st.integers(0, 99))
    def test_permuting_the_samples_permutes_the_advantages(self, batch: GroupedRewards, seed: int) -> None:
        order = np.random.default_rng(seed).permutation(len(batch))
        straight_B, shuffled_B = _estimated(self, batch), _estimated(self, _taken(batch, order))
        _require_close(
            shuffled_B,
            straight_B[order],
            "the advantages depend on where in the batch a sample stands. Samples of a group may stand anywhere: group "
            "by groups_B, and return the order that came in.",
        )

    @given(batch=batches(), ids=st.permutations([7, -3, 1000, 2]))
    def test_group_ids_are_names_without_meaning(self, batch: GroupedRewards, ids: list[int]) -> None:
        renamed = _batch(batch.rewards_B, np.array(ids)[batch.groups_B], batch.lengths_B, batch.mask_sums_B)
        _require_close(
            _estimated(self, renamed),
            _estimated(self, batch),
            "the advantages depend on the numbers of the groups or on their order; any integers may be ids.",
        )

    @given(batch=batches(fewest_groups=2))
    def test_other_groups_change_nothing(self, batch: GroupedRewards) -> None:
        traits = self.traits()
        if "groups" not in traits.reads or traits.across_groups:
            return
        together_B = _estimated(self, batch)
        for group in np.unique(batch.groups_B):
            (members,) = np.nonzero(batch.groups_B == group)
            _require_close(
                together_B[members],
                _estimated(self, _taken(batch, members)),
                "the advantages of a group depend on the rewards of other groups: a mean or a standard deviation is "
                "taken over the whole batch. If that is intended, add the estimator with across_groups=True.",
            )

    @given(batch=batches())
    def test_a_higher_reward_in_a_group_never_has_the_lower_advantage(self, batch: GroupedRewards) -> None:
        alike_B = np.full(len(batch), 5)
        advantages_B = _estimated(self, _batch(batch.rewards_B, batch.groups_B, alike_B, alike_B))
        for group in np.unique(batch.groups_B):
            (members,) = np.nonzero(batch.groups_B == group)
            by_reward = advantages_B[members[np.argsort(batch.rewards_B[members], kind="stable")]]
            require(
                bool(np.all(np.diff(by_reward) >= -CLOSE)),
                f"of two samples of one group, equal except for the reward, the better one has the lower advantage: "
                f"{by_reward} by ascending reward.",
            )

    @given(batch=batches(), siblings=st.integers(2, 4))
    def test_a_rollout_that_fanned_out_counts_once(self, batch: GroupedRewards, siblings: int) -> None:
        if "rollouts" not in self.traits().reads:
            return
        _require_close(
            _estimated(self, _fanned_out(batch, siblings))[siblings - 1 :],
            _estimated(self, _fanned_out(batch, 1)),
            f"the advantages change when the first sample comes as {siblings} siblings of the same reward, which share "
            "a rollout and its tokens. Count rollouts (rollouts_B), as slime_core.ops.groups does.",
        )

    @given(batch=batches(), seed=st.integers(0, 99))
    def test_only_the_declared_columns_are_read(self, batch: GroupedRewards, seed: int) -> None:
        reads = self.traits().reads
        numbers = np.random.default_rng(seed)
        others = {
            name: column if name[:-2] in reads else numbers.integers(1, 9, len(batch)).astype(column.dtype)
            for name, column in ((name, getattr(batch, name)) for name in _COLUMNS)
        }
        _require_close(
            _estimated(self, GroupedRewards(**others)),
            _estimated(self, batch),
            f"the advantages depend on a column that is not declared: reads={sorted(reads)}.",
        )


_COLUMNS = ("rewards_B", "groups_B", "lengths_B", "mask_sums_B", "rollouts_B")


def _batch(rewards_B: Any, groups_B: Any, lengths_B: Any = None, mask_sums_B: Any = None) -> GroupedRewards:
    """Return columns of the right dtype; without lengths, five tokens per sample, all trained."""
    fives_B = np.full(len(groups_B), 5)
    lengths_B, mask_sums_B = (fives_B if column is None else column for column in (lengths_B, mask_sums_B))
    columns = (groups_B, lengths_B, mask_sums_B, np.arange(len(groups_B)))
    return GroupedRewards(np.array(rewards_B, np.float32), *(np.array(column, np.int64) for column in columns))


def _fanned_out(batch: GroupedRewards, siblings: int) -> GroupedRewards:
    """Replace the first sample by ``siblings`` of one rollout, which share its twelve trained tokens."""
    numbers = np.concatenate([np.zeros(siblings, np.int64), np.arange(1, len(batch))])
    fanned = _taken(batch, numbers)
    fanned.lengths_B[:siblings] = fanned.mask_sums_B[:siblings] = 12 // siblings
    return fanned


def _taken(batch: GroupedRewards, order: NDArray[np.int64]) -> GroupedRewards:
    return GroupedRewards(**{name: getattr(batch, name)[order] for name in _COLUMNS})


def _estimated(suite: ComponentSuite, batch: GroupedRewards) -> NDArray[np.float32]:
    # Suppresses numpy's warnings: the property reports a NaN in the result with a better message.
    with np.errstate(all="ignore"):
        advantages_B: NDArray[np.float32] = suite.make().estimate(batch)
    return advantages_B


def _require_close(found_B: NDArray[Any], wanted_B: NDArray[Any], otherwise: str) -> None:
    close = np.allclose(found_B, wanted_B, rtol=CLOSE, atol=CLOSE, equal_nan=True)
    require(bool(close), f"{otherwise}\nFound {found_B}, wanted {wanted_B}.")


def _described(value: Any) -> str:
    return f"shape {getattr(value, 'shape', 'none')} and dtype {getattr(value, 'dtype', 'none')}"
