"""The suite of data sources: whole prompt groups, and the same stream after every resume."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from hypothesis import strategies as st

from slime_core import RunView
from slime_core.provisional import PromptRequest, PromptScreen
from slime_core.types import PromptGroup, Status
from slime_testing.harness import Kind
from slime_testing.subject import default_run
from slime_testing.suite import ComponentSuite, given, require

__all__ = ["DataSourceSuite"]

ROWS = tuple({"prompt": f"{number} + 1 =", "label": str(number + 1), "metadata": {"n": number}} for number in range(7))
"""Rows of the example file: few, so that every stream reaches its second epoch."""

sizes_lists = st.lists(st.integers(1, 5), min_size=1, max_size=5)


class DataSourceSuite(ComponentSuite):
    """For data sources.

    Attributes:
        rows: JSON objects of the file that the source gets; a source that needs no file ignores it.
    """

    kind: ClassVar[Kind] = Kind.DATA_SOURCE
    rows: ClassVar[Sequence[dict[str, Any]]] = ROWS

    @given(max_examples=15, sizes=sizes_lists, of_a_prompt=st.integers(1, 3))
    def test_groups_have_the_requested_size(self, sizes: list[int], of_a_prompt: int) -> None:
        with self._source(of_a_prompt) as source:
            for n in sizes:
                groups = source.next_groups(n)
                require(len(groups) == n, f"next_groups({n}) returned {len(groups)} groups")
                group_sizes = [len(group) for group in groups]
                require(
                    set(group_sizes) == {of_a_prompt},
                    f"groups of {of_a_prompt} samples were requested, found {group_sizes}",
                )

    @given(max_examples=15, sizes=sizes_lists)
    def test_samples_are_pending_and_distinguished_by_their_numbers(self, sizes: list[int]) -> None:
        with self._source() as source:
            groups = [group for n in sizes for group in source.next_groups(n)]
        samples = [sample for group in groups for sample in group]
        started = [sample.status for sample in samples if sample.status is not Status.PENDING or sample.response_length]
        require(
            not started, f"samples are handed out as {started[:3]}; only pending ones without a response are wanted"
        )
        numbers = [[sample.group_index for sample in group] for group in groups]
        alike = all(len(set(group)) == 1 and None not in group for group in numbers)
        require(alike, f"samples of one group must share one group_index; found {numbers[:3]}")
        require(len({group[0] for group in numbers}) == len(groups), f"two groups share a group_index: {numbers}")
        indices = [sample.index for sample in samples]
        require(len(set(indices)) == len(indices), f"two samples share an index: {indices}")

    @given(max_examples=15, before=sizes_lists, after=sizes_lists)
    def test_it_resumes_the_same_stream(self, before: list[int], after: list[int]) -> None:
        with self._source() as source, self._source() as resumed:
            _drain(source, before)
            resumed.restore(_through_json(source.state()))
            expected, actual = _drain(source, after), _drain(resumed, after)
        _require_same(
            actual, expected, "restored from state(), another source continues with other prompts or numbers."
        )

    @given(max_examples=15, before=sizes_lists, number=st.integers(1, 4))
    def test_what_was_put_back_comes_first(self, before: list[int], number: int) -> None:
        with self._source() as source:
            _drain(source, before)
            groups = source.next_groups(number)
            expected = [_named(group) for group in groups]
            source.put_back(groups)
            actual = _drain(source, [number])
        require(
            sorted(map(str, actual)) == sorted(map(str, expected)),
            f"{expected} was put back, and {actual} came next: groups that were put back are lost or come late.",
        )

    @given(max_examples=15, before=sizes_lists, number=st.integers(1, 4))
    def test_what_was_put_back_survives_a_restart(self, before: list[int], number: int) -> None:
        with self._source() as source, self._source() as resumed:
            _drain(source, before)
            source.put_back(source.next_groups(number))
            resumed.restore(_through_json(source.state()))
            expected, actual = _drain(source, [number, 3]), _drain(resumed, [number, 3])
        _require_same(actual, expected, "groups that were put back are lost when the source is restored.")

    @given(max_examples=15, before=sizes_lists, after=sizes_lists)
    def test_a_state_stays_what_it_was(self, before: list[int], after: list[int]) -> None:
        with self._source() as source:
            _drain(source, before)
            groups = source.next_groups(2)
            state = source.state()
            written = _through_json(state)
            source.put_back(groups)
            _drain(source, after)
            require(
                _through_json(state) == written,
                "the state that state() returned changed while the source went on; return a copy.",
            )

    @given(max_examples=15, sizes=sizes_lists)
    def test_reading_the_state_changes_nothing(self, sizes: list[int]) -> None:
        with self._source() as source, self._source() as inspected:
            expected = _drain(source, sizes)
            actual = []
            for n in sizes:
                inspected.state()
                actual += _drain(inspected, [n])
        _require_same(actual, expected, "two sources of one request differ, or reading the state moves the stream.")

    def test_screening_leaves_the_stream_as_it_is(self) -> None:
        if (screen := self._screen()) is None:
            return
        with self._run() as run, self._source() as source:
            expected = _drain(source, [3, 9])
            screen(run, PromptScreen(setting="prompt_data"))
            actual = _drain(self.make(run), [3, 9])
        _require_same(actual, expected, "after screen(), a new source of the same request hands out other prompts.")

    def _screen(self) -> Callable[[RunView, PromptScreen], object] | None:
        """Return the source's ``screen``; None if it has none."""
        subject = self.subject()
        screen = getattr(subject.active.load(self.kind, subject.component.name), "screen", None)
        return None if screen is None else partial(screen, subject.options)

    @contextmanager
    def _source(self, of_a_prompt: int = 2) -> Iterator[Any]:
        with self._run(of_a_prompt) as run:
            yield self.make(run)

    @contextmanager
    def _run(self, of_a_prompt: int = 2) -> Iterator[RunView]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "prompts.jsonl")
            path.write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8")
            # Every source gets a file of the same name, because a source may bind its state to the name.
            request = PromptRequest(path, n_samples_per_prompt=of_a_prompt, seed=5)
            yield replace(default_run(self.subject()), seed=5, n_samples_per_prompt=of_a_prompt, prompts=request)


def _drain(source: Any, sizes: Sequence[int]) -> list[Any]:
    return [_named(group) for n in sizes for group in source.next_groups(n)]


def _named(group: PromptGroup) -> list[tuple[Any, ...]]:
    return [(sample.group_index, sample.index, str(sample.prompt), sample.label) for sample in group]


def _require_same(actual: list[Any], expected: list[Any], otherwise: str) -> None:
    different = next((pair for pair in zip(actual, expected, strict=False) if pair[0] != pair[1]), None)
    require(
        different is None and len(actual) == len(expected),
        f"{otherwise}\nFound {different and different[0]}, wanted {different and different[1]} (group_index, index, "
        "prompt, label).",
    )


def _through_json(state: Any) -> Any:
    """Return the state after a round trip through JSON, as in a checkpoint."""
    try:
        return json.loads(json.dumps(state, allow_nan=False))
    except (TypeError, ValueError) as error:
        require(
            False,
            f"state() returned {state!r}, which JSON cannot hold ({error}); numbers, texts, lists and dicts "
            "with text keys are wanted",
        )
