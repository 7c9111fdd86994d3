"""Devices are lent to one role at a time."""

from __future__ import annotations

import pytest

from slime_core.cluster.lending import Lending


def test_the_borrower_is_known_inside_the_block_only() -> None:
    lending = Lending()
    with lending.lend("learner"):
        assert lending.borrower == "learner"
    assert lending.borrower is None


def test_devices_come_back_when_the_borrower_fails() -> None:
    lending = Lending()
    with pytest.raises(RuntimeError, match="no gradient"), lending.lend("learner"):
        raise RuntimeError("no gradient")
    assert lending.borrower is None


def test_devices_cannot_be_lent_twice() -> None:
    lending = Lending()
    refused = pytest.raises(AssertionError, match="lent to 'learner'; 'critic'")
    with lending.lend("learner"), refused, lending.lend("critic"):
        pass
