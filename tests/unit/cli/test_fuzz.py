"""A short set of the cases of ``make fuzz``: bad input of every kind ends in one clear error."""

from __future__ import annotations

import pytest

from tests.fuzz import KINDS, findings


@pytest.mark.parametrize("kind", KINDS)
def test_bad_input_ends_in_one_clear_error(kind: str) -> None:
    assert list(findings(range(100_000, 100_012), seed=1, kind=kind)) == []


def test_a_command_that_fails_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(words: list[str]) -> int:
        raise KeyError(words[0])

    monkeypatch.setattr("tests.fuzz.slime", fails)
    (found,) = findings(range(1), seed=1, kind="flags")
    assert "KeyError" in found


@pytest.mark.parametrize("number", [2657, 3028, 4413, 5240])
def test_inputs_that_the_fuzz_campaign_found_are_handled(number: int) -> None:
    """A file that is /, a header without a dtype, a required version of 5,000 digits."""
    assert list(findings(range(number, number + 1), seed=1)) == []
