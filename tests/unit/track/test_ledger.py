"""Where every prompt group ended, counted from the files of a run folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.errors import CheckpointError, RunError
from slime_core.track.ledger import JOURNAL, Journal, Recount
from slime_core.track.samples import SampleWriter
from slime_core.types import Sample, Status


def group(number: int, *statuses: Status, cause: str | None = None) -> list[Sample]:
    found = [Sample(group_index=number, index=2 * number + place, status=one) for place, one in enumerate(statuses)]
    for sample in found:
        sample.failure_cause = cause if sample.status is Status.FAILED else None
    return found


DONE, CUT, FAILED, ABORTED = Status.COMPLETED, Status.TRUNCATED, Status.FAILED, Status.ABORTED


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path)


@pytest.fixture
def close(tmp_path: Path, journal: Journal):
    """Writes the file of a rollout, and closes it."""

    def write(rollout: int, *groups: list[Sample], dropped: tuple[tuple[str, list[Sample]], ...] = ()) -> None:
        left_out = [(reason, sample) for reason, one in dropped for sample in one]
        SampleWriter(tmp_path).write("train", rollout, [one for each in groups for one in each], dropped=left_out)
        journal.closed(rollout)

    return write


@pytest.fixture
def recount(tmp_path: Path):
    def read(**limits: int) -> Recount:
        found = Recount(tmp_path)
        found.read(**limits)
        return found

    return read


def ids(*numbers: int) -> dict[int, list[int]]:
    return {number: [2 * number, 2 * number + 1] for number in numbers}


def test_every_group_ends_in_one_place(journal, close, recount):
    journal.took(ids(0, 1, 2, 3, 4))
    stale = ("stale", group(3, DONE, DONE))
    close(
        0,
        group(0, DONE, CUT),
        group(2, FAILED, FAILED, cause="engine"),
        dropped=(("zero_std", group(1, DONE, DONE)), stale),
    )
    found = recount()
    assert found.groups == {
        ("trained", ""): 1,
        ("filtered", "zero_std"): 1,
        ("failed", "engine"): 1,
        ("evicted", ""): 1,
    }
    assert found.open == {4: (8, 9)}
    found.check(ids(4))
    assert found.metrics(held=0, in_flight=1) == {
        **{"ledger/taken": 5.0, "ledger/trained": 1.0, "ledger/filtered": 1.0, "ledger/failed": 1.0},
        **{"ledger/evicted": 1.0, "ledger/held": 0.0, "ledger/in_flight": 1.0, "ledger/returned": 0.0},
    }


@pytest.mark.parametrize("again", ["aborted", "requeued"])
def test_a_group_that_was_put_back_has_not_ended_and_counts_once(journal, close, recount, again):
    journal.took(ids(0))
    journal.gave_back([0])
    close(
        0,
        *([group(0, DONE, ABORTED)] if again == "aborted" else []),
        dropped=(("requeued", group(0, DONE, DONE)),) if again == "requeued" else (),
    )
    found = recount()
    assert (found.taken, found.returned, found.open, found.groups) == (1, {0}, {}, {})
    journal.took(ids(0))
    close(1, group(0, DONE, DONE))
    found.read()
    assert (found.taken, found.returned, found.open, found.groups) == (1, set(), {}, {("trained", ""): 1})


def test_a_source_may_hand_out_again_what_was_trained_and_put_back(journal, close, recount):
    journal.took(ids(0))
    close(0, group(0, DONE, DONE))
    journal.gave_back([0])
    journal.took(ids(0))
    close(1, group(0, DONE, DONE))
    found = recount()
    assert (found.taken, found.groups) == (2, {("trained", ""): 2})


def test_only_what_was_added_is_read_and_the_count_is_that_of_a_fresh_reader(tmp_path, journal, close, recount):
    journal.took(ids(0))
    close(0, group(0, DONE, DONE))
    found = recount()
    (tmp_path / "train-000000.jsonl").unlink()
    journal.took(ids(1))
    close(1, group(1, DONE, DONE))
    found.read()
    assert found.groups == {("trained", ""): 2}
    with pytest.raises(CheckpointError, match=r"train-000000\.jsonl .*No such"):
        recount()


def test_a_resumed_run_forgets_what_came_after_its_checkpoint(tmp_path, journal, close, recount):
    journal.took(ids(0))
    close(0, group(0, DONE, DONE))
    position = journal.position()
    journal.took(ids(1, 2))
    close(1, group(1, DONE, DONE))
    Journal(tmp_path).rewind(position, held={})
    found = recount()
    assert (found.groups, found.open) == ({("trained", ""): 1}, {})
    journal.took(ids(1))
    close(1, group(1, FAILED, FAILED, cause="engine"))
    assert recount().groups == {("trained", ""): 1, ("failed", "engine"): 1}


def test_rows_after_a_checkpoint_can_be_left_out_and_a_torn_line_always_is(tmp_path, journal, recount):
    journal.took(ids(0))
    position = journal.position()
    journal.took(ids(1))
    assert recount(until=position).open == {0: (0, 1)}
    with (tmp_path / JOURNAL).open("a") as file:
        file.write('{"take": [[2')
    found = recount()
    assert found.open == {0: (0, 1), 1: (2, 3)}


def test_a_journal_of_another_run_is_not_taken_for_the_own_one_because_it_is_long(tmp_path, journal, recount):
    journal.took(ids(0, 1))
    position = journal.position()
    mark = journal.mark(position)
    other = Journal(tmp_path / "other")
    other.took(ids(5, 6, 7, 8, 9))  # a first try in that folder, killed before its first row
    resumed = Journal(tmp_path / "other")
    resumed.rewind(position, held=ids(1), mark=mark)
    found = Recount(tmp_path / "other")
    found.read()
    assert found.open == {1: (2, 3)}
    again = Journal(tmp_path)
    again.rewind(position, held=ids(1), mark=mark)
    assert recount().open == {0: (0, 1), 1: (2, 3)}


def test_a_journal_starts_over_in_another_folder_and_where_a_failed_start_left_files(tmp_path, recount):
    Journal(tmp_path).rewind(12345, held=ids(4))
    assert (recount().taken, recount().open) == (1, {4: (8, 9)})
    again = Journal(tmp_path)
    assert again.position() == 0
    again.took(ids(0))
    assert recount().open == {0: (0, 1)}


def test_without_a_folder_nothing_is_written(tmp_path):
    journal = Journal(None)
    journal.took(ids(0))
    journal.rewind(None, held={})
    assert journal.position() == 0
    assert list(tmp_path.iterdir()) == []


FIRST, BOTH = group(0, DONE, DONE), group(7, DONE, DONE)


@pytest.mark.parametrize(
    ("taken", "rollouts", "names"),
    [
        ([[0]], [[FIRST], [FIRST]], r"train-000001\.jsonl .*groups 0 .*trained"),
        ([[0]], [[FIRST, BOTH]], "groups 7 "),
        ([[5]], [[group(5, DONE)]], r"train-000000\.jsonl .*group 5 .*samples 11"),
        ([[3], [3]], [], "group 3 "),
    ],
    ids=["trained twice", "never handed out", "a sample is missing", "handed out twice at once"],
)
def test_a_group_that_the_files_contradict_is_named(journal, close, recount, taken, rollouts, names):
    for groups in taken:
        journal.took(ids(*groups))
    for rollout, groups in enumerate(rollouts):
        close(rollout, *groups)
    with pytest.raises(RunError, match=names):
        recount()


@pytest.mark.parametrize(("held", "names"), [([], r"groups 1 .*nowhere"), ([0, 1], r"groups 0 .*held")])
def test_a_group_that_is_nowhere_or_held_although_it_was_trained_is_named(journal, close, recount, held, names):
    journal.took(ids(0, 1))
    close(0, FIRST)
    with pytest.raises(RunError, match=names):
        recount().check(ids(*held))


def test_a_group_with_one_trained_sample_is_trained_and_its_others_have_places_of_their_own(journal, close, recount):
    journal.took(ids(0))
    done, failed = group(0, DONE, FAILED, cause="timeout")
    close(0, [done, failed])
    found = recount()
    assert found.groups == {("trained", ""): 1}
    assert found.samples == {("trained", ""): 1, ("failed", "timeout"): 1}
