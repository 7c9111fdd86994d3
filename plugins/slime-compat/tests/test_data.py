"""Data sources as slime's users write them."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from slime_compat.data import BufferedSource, PathSource, SourceView
from slime_compat.options import PathOptions
from slime_core import RunView
from slime_core.errors import PluginError
from slime_core.plugins.contracts import PromptRequest
from slime_core.types import PromptGroup, Sample


@pytest.fixture
def request_of(tmp_path: Path) -> PromptRequest:
    rows = [{"prompt": f"{n}+1", "label": str(n + 1), "metadata": {"level": n % 2}} for n in range(5)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return PromptRequest(tmp_path / "train.jsonl", n_samples_per_prompt=2, shuffle=False)


def prompts(groups: list[PromptGroup]) -> list[str]:
    return [str(group[0].prompt) for group in groups]


OLDEST_LAST = """
    def newest(args, rollout_id, buffer, num_samples):
        assert rollout_id is None
        chosen = buffer[-num_samples:]
        del buffer[-num_samples:]
        return chosen
"""


def test_the_function_chooses_from_what_was_put_back(write, request_of) -> None:
    source = BufferedSource(write("buffer_filter_path", OLDEST_LAST), RunView(prompts=request_of))
    first = source.next_groups(3)
    first[1][0].tokens = [1, 2]
    source.put_back(first)
    again = source.next_groups(2)
    assert prompts(again) == ["1+1", "2+1"]
    assert again[0][0].tokens == [1, 2]
    assert prompts(source.next_groups(3)) == ["0+1", "3+1", "4+1"]
    assert len(source) == 5


def test_a_resumed_buffer_holds_what_it_held(write, request_of) -> None:
    options = write("buffer_filter_path", OLDEST_LAST)
    source = BufferedSource(options, RunView(prompts=request_of))
    groups = source.next_groups(2)
    groups[0][0].response, groups[0][0].reward = "7", {"score": 1.0}
    source.put_back(groups)
    state = json.loads(json.dumps(source.state()))
    resumed = BufferedSource(options, RunView(prompts=request_of))
    resumed.restore(state)
    assert resumed.next_groups(4) == source.next_groups(4)


def test_a_function_that_takes_too_much_is_refused(write, request_of) -> None:
    text = "def f(args, rollout_id, buffer, num_samples): return buffer"
    source = BufferedSource(write("buffer_filter_path", text), RunView(prompts=request_of))
    source.put_back(source.next_groups(3))
    with pytest.raises(PluginError, match="for 1 groups"):
        source.next_groups(1)


BY_ARGS = """
    import json
    from pathlib import Path

    from slime_core import Sample

    class Mine:
        def __init__(self, args):
            self.rows = [json.loads(line) for line in Path(args.prompt_data).read_text().splitlines()]
            self.next, self.back = 0, []

        def get_samples(self, n):
            again, self.back = self.back[:n], self.back[n:]
            rows = [self.rows[(self.next + i) % len(self.rows)] for i in range(n - len(again))]
            self.next += len(rows)
            return again + [[Sample(prompt=row["prompt"], label=row["label"]) for _ in range(2)] for row in rows]

        def add_samples(self, samples):
            self.back += samples
"""

BY_DATASET = """
    class Levels:
        def __init__(self, dataset, args):
            self.samples, self.next = [one for one in dataset if one.metadata["level"] == args.level], 0

        def get_samples(self, num_samples):
            found = [self.samples[(self.next + i) % len(self.samples)] for i in range(num_samples)]
            self.next += num_samples
            return found

        def add_samples(self, samples):
            raise AssertionError

        def __len__(self):
            return len(self.samples)
"""


def by_level(options: PathOptions, level: int) -> PathOptions:
    options.arguments.level = level
    return options


def test_a_class_made_with_args_hands_out_groups_and_takes_them_back(write, request_of) -> None:
    source = PathSource(write("data_source_path", BY_ARGS), RunView(prompts=request_of))
    first = source.next_groups(2)
    assert [(one.group_index, one.index) for group in first for one in group] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    source.put_back(first[1:])
    assert prompts(source.next_groups(2)) == ["1+1", "2+1"]
    assert len(source) == 5


def test_a_class_made_with_a_dataset_may_hand_out_single_samples(write, request_of) -> None:
    source = PathSource(by_level(write("data_source_path", BY_DATASET), 1), RunView(prompts=request_of))
    (group,) = source.next_groups(1)
    assert [(one.prompt, one.label, one.group_index, one.index) for one in group] == [
        ("1+1", "2", 0, 0),
        ("1+1", "2", 0, 1),
    ]
    (again,) = source.next_groups(2)[1:]
    assert (again[0].prompt, again[1].index, len(source)) == ("1+1", 5, 2)


USERS = """
    from slime.data import RolloutDataSource

    class Mine(RolloutDataSource):
        def __init__(self, dataset, args):
            self.dataset = dataset

        def get_samples(self, n):
            assert len(self.dataset) == 5 and self.dataset[0].prompt == "0+1"
            return self.dataset.sample(n)
"""


def test_a_dataset_makes_samples(write, request_of) -> None:
    source = PathSource(write("data_source_path", USERS), RunView(prompts=request_of))
    groups = source.next_groups(40)
    assert set(prompts(groups)) == {f"{n}+1" for n in range(5)}
    assert [len(group) for group in groups] == [2] * 40


WITH_BUFFER = """
    from slime.rollout.data_source import RolloutDataSourceWithBuffer

    class Mine(RolloutDataSourceWithBuffer):
        def buffer_filter(self, args, buffer, n):
            buffer.sort(key=lambda group: -group[0].index)
            return buffer[:n]
"""


def test_slimes_buffered_source_without_a_constructor_chooses_by_its_filter(write, request_of) -> None:
    source = PathSource(write("data_source_path", WITH_BUFFER), RunView(prompts=request_of))
    first = source.next_groups(3)
    source.put_back(first)
    assert prompts(source.next_groups(4)) == ["2+1", "1+1", "0+1", "3+1"]


def test_a_class_without_a_constructor_is_made_without_arguments(write, request_of) -> None:
    text = """
    from slime.data import Sample

    class Mine:
        def get_samples(self, n):
            return [Sample(prompt="1+1", label="2") for _ in range(n)]

        def add_samples(self, samples):
            pass
    """
    source = PathSource(write("data_source_path", text), RunView(prompts=request_of))
    assert prompts(source.next_groups(2)) == ["1+1", "1+1"]


def test_a_resume_repeats_the_requests_to_a_class_without_state(write, request_of) -> None:
    options = write("data_source_path", BY_ARGS)
    source = PathSource(options, RunView(prompts=request_of))
    for n in (2, 2, 1):
        source.next_groups(n)
    state = json.loads(json.dumps(source.state()))
    assert state == {"asked": [[2, 2], [1, 1]], "returned": [], "groups": 5}
    resumed = PathSource(options, RunView(prompts=request_of))
    resumed.restore(state)
    assert resumed.next_groups(2) == source.next_groups(2)


def test_a_resume_puts_returned_groups_back_again(write, request_of) -> None:
    options = write("data_source_path", BY_ARGS)
    source = PathSource(options, RunView(prompts=request_of))
    first = source.next_groups(2)
    first[1][0].tokens, first[1][0].response = [1, 2], "half"
    source.put_back(first[1:])
    source.next_groups(2)
    source.put_back([*source.next_groups(1), [Sample(prompt="9+9", response="of the user"), Sample()]])
    resumed = PathSource(options, RunView(prompts=request_of))
    resumed.restore(json.loads(json.dumps(source.state())))
    assert resumed.state() == source.state()
    again = PathSource(options, RunView(prompts=request_of))
    again.restore(json.loads(json.dumps(resumed.state())))
    wanted, found = source.next_groups(4), again.next_groups(4)
    assert prompts(found) == ["3+1", "9+9", "4+1", "0+1"]
    assert [[(one.prompt, one.index, one.group_index, one.response) for one in group] for group in found] == [
        [(one.prompt, one.index, one.group_index, one.response) for one in group] for group in wanted
    ]


def test_a_group_that_was_put_back_comes_as_new_samples_when_resumed(write, request_of) -> None:
    options = write("data_source_path", BY_ARGS)
    source = PathSource(options, RunView(prompts=request_of))
    groups = source.next_groups(3)
    groups[1][0].tokens, groups[1][0].response = [1, 2], "half"
    source.put_back(groups[1:2])
    resumed = PathSource(options, RunView(prompts=request_of))
    resumed.restore(json.loads(json.dumps(source.state())))
    (group, _) = resumed.next_groups(2)
    assert [(one.prompt, one.group_index, one.index, one.response) for one in group] == [
        ("1+1", 1, 2, ""),
        ("1+1", 1, 3, ""),
    ]


def test_a_class_that_hands_out_other_groups_when_resumed_is_refused(write, request_of) -> None:
    text = """
        from slime_core import Sample

        class Restless:
            def __init__(self, args):
                self.first = args.first

            def get_samples(self, n):
                return [[Sample(group_index=self.first + i) for _ in range(2)] for i in range(n)]

            def add_samples(self, samples): ...
        """
    options = write("data_source_path", text)
    options.arguments.first = 10
    source = PathSource(options, RunView(prompts=request_of))
    source.put_back(source.next_groups(2)[1:])
    state = source.state()
    options.arguments.first = 20
    with pytest.raises(PluginError, match="return group 11"):
        PathSource(options, RunView(prompts=request_of)).restore(state)


def test_a_class_that_saves_is_loaded(write, request_of, tmp_path) -> None:
    text = (
        BY_ARGS
        + """
        def save(self, rollout_id):
            Path(f"{self.folder}/{rollout_id}.txt").write_text(str(self.next))

        def load(self, rollout_id=None):
            self.next = int(Path(f"{self.folder}/{rollout_id}.txt").read_text())
    """.replace("{self.folder}", str(tmp_path))
    )
    options = write("data_source_path", text, "--output-dir", str(tmp_path))
    source = PathSource(options, RunView(prompts=request_of))
    source.next_groups(2)
    source.next_groups(1)
    resumed = PathSource(options, RunView(prompts=request_of))
    resumed.restore(source.state())
    assert (tmp_path / "1.txt").read_text() == "3"
    assert prompts(resumed.next_groups(2)) == ["3+1", "4+1"]


BOTH = """
    from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer

    class Mine(RolloutDataSourceWithBuffer):
        def get_samples(self, num_samples):
            return super().get_samples(num_samples)

    class Chooses(RolloutDataSourceWithBuffer):
        def buffer_filter(self, args, buffer, n):
            return buffer[:n]

    class Without(RolloutDataSource):
        pass

    class Alone:
        def get_samples(self, num_samples): return []
        def add_samples(self, samples): pass
"""


def both(write, name: str) -> PathOptions:
    Path("choose.py").write_text(textwrap.dedent(OLDEST_LAST))
    return write("data_source_path", BOTH, "--buffer-filter-path", "choose.py", name=f":{name}")


def test_a_class_with_slimes_buffer_calls_the_filter_that_is_given_with_it(write, request_of) -> None:
    source = PathSource(both(write, "Mine"), RunView(prompts=request_of))
    source.put_back(source.next_groups(3))
    assert prompts(source.next_groups(1)) == ["2+1"]


@pytest.mark.parametrize("name", ["Chooses", "Without", "Alone"])
def test_a_class_that_never_calls_the_filter_is_refused(write, request_of, name: str) -> None:
    with pytest.raises(PluginError) as refused:
        PathSource(both(write, name), RunView(prompts=request_of))
    assert all(word in str(refused.value) for word in ("--buffer-filter-path", "--data-source-path", name))


def test_a_class_derived_from_the_buffered_source_chooses_by_a_method(write, request_of) -> None:
    text = """
        from slime_compat.data import BufferedDataSource

        class ByPriority(BufferedDataSource):
            def buffer_filter(self, args, buffer, n):
                buffer.sort(key=lambda group: -group[0].metadata["level"])
                return buffer[:n]
        """
    options = write("data_source_path", text)
    source = PathSource(options, RunView(prompts=request_of))
    source.put_back(source.next_groups(2))
    state = json.loads(json.dumps(source.state()))
    assert prompts(source.next_groups(3)) == ["1+1", "0+1", "2+1"]
    resumed = PathSource(options, RunView(prompts=request_of))
    resumed.restore(state)
    assert prompts(resumed.next_groups(2)) == ["1+1", "0+1"]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("None", "get_samples(2) returned None"),
        ("[]", "get_samples(2) returned []"),
        ("[['1+1'], ['2+2']]", "returned a list of list"),
    ],
)
def test_a_malformed_group_is_refused(write, request_of, returned: str, message: str) -> None:
    text = f"class C:\n    def __init__(self, args): ...\n    def get_samples(self, n): return {returned}\n"
    source = PathSource(
        write("data_source_path", text + "    def add_samples(self, s): ..."), RunView(prompts=request_of)
    )
    with pytest.raises(PluginError) as refused:
        source.next_groups(2)
    assert str(refused.value).startswith("--data-source-path mine.py: ")
    assert message in str(refused.value)


def test_functions_see_the_runs_source_with_the_methods_of_slime(write, request_of) -> None:
    view = SourceView(PathSource(write("data_source_path", BY_ARGS), RunView(prompts=request_of)))
    groups = view.get_samples(2)
    view.add_samples(groups[:1])
    assert prompts(view.get_samples(1)) == ["0+1"]
    assert len(view) == 5
