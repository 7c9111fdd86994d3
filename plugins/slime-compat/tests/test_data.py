"""Data sources as slime's users write them."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime_compat.data import BufferedSource, PathSource
from slime_compat.paths import PathOptions
from slime_core import PromptGroup, RunView, Sample
from slime_core.errors import PluginError
from slime_core.provisional import PromptRequest

Make = Callable[..., Any]


@pytest.fixture
def make(write, tmp_path: Path) -> Make:
    """``make(text)``: the class in ``text`` as a data source; ``make(options=...)``: that of options, once more."""
    rows = [{"prompt": f"{n}+1", "label": str(n + 1), "metadata": {"level": n % 2}} for n in range(5)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = RunView(prompts=PromptRequest(tmp_path / "train.jsonl", n_samples_per_prompt=2, shuffle=False))

    def made(text: str = "", *flags: str, name: str = "", options: PathOptions | None = None, **args: Any) -> Any:
        options = options or write("data_source_path", text, *flags, name=name)
        vars(options.arguments).update(args)
        source = BufferedSource if "data_source_path" not in options.sources else PathSource
        return source(options, run)

    return made


def prompts(groups: list[PromptGroup]) -> list[str]:
    return [str(group[0].prompt) for group in groups]


def fields(groups: list[PromptGroup]) -> list[tuple[Any, ...]]:
    return [(one.prompt, one.group_index, one.index, one.response) for group in groups for one in group]


def stored(source: PathSource | BufferedSource) -> dict[str, Any]:
    """The state as a checkpoint holds it."""
    state: dict[str, Any] = json.loads(json.dumps(source.state()))
    return state


# --- --buffer-filter-path ---------------------------------------------------------------------------------------------

NEWEST = """
    def newest(args, rollout_id, buffer, num_samples):
        assert rollout_id is None
        chosen = buffer[-num_samples:]
        del buffer[-num_samples:]
        return chosen
"""


def test_the_function_chooses_from_the_buffer_also_after_a_resume(write, make: Make) -> None:
    options = write("buffer_filter_path", NEWEST)
    source, resumed = make(options=options), make(options=options)
    groups = source.next_groups(3)
    groups[1][0].tokens, groups[1][0].reward = [1, 2], {"score": 1.0}
    source.put_back(groups)
    resumed.restore(stored(source))
    again = source.next_groups(2)
    assert (prompts(again), again[0][0].tokens) == (["1+1", "2+1"], [1, 2])
    assert resumed.next_groups(2) == again
    assert prompts(source.next_groups(3)) == prompts(resumed.next_groups(3)) == ["0+1", "3+1", "4+1"]
    assert len(source) == 5


def test_a_function_that_takes_too_much_is_refused(write, make: Make) -> None:
    source = make(options=write("buffer_filter_path", "def f(args, rollout_id, buffer, num_samples): return buffer"))
    source.put_back(source.next_groups(3))
    with pytest.raises(PluginError, match="1 groups"):
        source.next_groups(1)


# --- --data-source-path -----------------------------------------------------------------------------------------------

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
SAVES = """
        def save(self, rollout_id):
            Path(f"{self.folder}/{rollout_id}.txt").write_text(str(self.next))

        def load(self, rollout_id=None):
            self.next = int(Path(f"{self.folder}/{rollout_id}.txt").read_text())
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
SAMPLES = """
    from slime.data import RolloutDataSource

    class Mine(RolloutDataSource):
        def __init__(self, dataset, args):
            self.dataset = dataset

        def get_samples(self, n):
            assert len(self.dataset) == 5 and self.dataset[0].prompt == "0+1"
            return self.dataset.sample(n)
"""


def test_a_class_made_with_args_hands_out_groups_and_takes_them_back(make: Make) -> None:
    source = make(BY_ARGS)
    first = source.next_groups(2)
    assert [(one.group_index, one.index) for group in first for one in group] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    source.put_back(first[1:])
    assert prompts(source.next_groups(2)) == ["1+1", "2+1"]
    assert len(source) == 5


def test_a_class_made_with_a_dataset_may_hand_out_single_samples(make: Make) -> None:
    source = make(BY_DATASET, level=1)
    assert fields(source.next_groups(1)) == [("1+1", 0, 0, ""), ("1+1", 0, 1, "")]
    (_, again) = source.next_groups(2)
    assert (again[0].prompt, again[0].label, again[1].index, len(source)) == ("1+1", "2", 5, 2)


def test_a_dataset_makes_samples(make: Make) -> None:
    groups = make(SAMPLES).next_groups(40)
    assert set(prompts(groups)) == {f"{n}+1" for n in range(5)}
    assert [len(group) for group in groups] == [2] * 40


@pytest.mark.parametrize("returned", ["None", "[]", "[['1+1'], ['2+2']]"])
def test_a_malformed_group_is_refused(make: Make, returned: str) -> None:
    text = f"class C:\n    def get_samples(self, n): return {returned}\n    def add_samples(self, s): ..."
    with pytest.raises(PluginError, match=r"^--data-source-path mine\.py: get_samples"):
        make(text).next_groups(2)


# --- Resumes ----------------------------------------------------------------------------------------------------------


def test_a_resume_repeats_the_calls_to_a_class_without_state(write, make: Make) -> None:
    options = write("data_source_path", BY_ARGS)
    source, resumed, again = (make(options=options) for _ in range(3))
    first = source.next_groups(2)
    first[1][0].tokens, first[1][0].response = [1, 2], "half"
    source.put_back(first[1:])
    source.next_groups(2)
    source.put_back([*source.next_groups(1), [Sample(prompt="9+9", response="of the user"), Sample()]])
    assert source.state()["asked"] == [[2, 2], [1, 1]]
    resumed.restore(stored(source))
    assert resumed.state() == source.state()
    again.restore(stored(resumed))
    groups = again.next_groups(4)
    assert prompts(groups) == ["3+1", "9+9", "4+1", "0+1"]
    assert fields(groups) == fields(resumed.next_groups(4)) == fields(source.next_groups(4))


def test_a_group_that_was_put_back_comes_as_new_samples_when_resumed(write, make: Make) -> None:
    options = write("data_source_path", BY_ARGS)
    source, resumed = make(options=options), make(options=options)
    groups = source.next_groups(3)
    groups[1][0].tokens, groups[1][0].response = [1, 2], "half"
    source.put_back(groups[1:2])
    resumed.restore(stored(source))
    assert fields(resumed.next_groups(2)[:1]) == [("1+1", 1, 2, ""), ("1+1", 1, 3, "")]


def test_a_class_that_hands_out_other_groups_when_resumed_is_refused(make: Make) -> None:
    text = """
        from slime_core import Sample

        class Restless:
            def __init__(self, args): self.first = args.first
            def get_samples(self, n): return [[Sample(group_index=self.first + i) for _ in range(2)] for i in range(n)]
            def add_samples(self, samples): ...
        """
    source = make(text, first=10)
    source.put_back(source.next_groups(2)[1:])
    with pytest.raises(PluginError, match="group 11"):
        make(text, first=20).restore(stored(source))


def test_a_class_that_saves_is_loaded(write, make: Make, tmp_path: Path) -> None:
    text = BY_ARGS + SAVES.replace("{self.folder}", str(tmp_path))
    options = write("data_source_path", text, "--output-dir", str(tmp_path))
    source, resumed = make(options=options), make(options=options)
    source.next_groups(2)
    source.next_groups(1)
    resumed.restore(stored(source))
    assert (tmp_path / "1.txt").read_text() == "3"
    assert prompts(resumed.next_groups(2)) == ["3+1", "4+1"]


# --- Classes with slime's buffer --------------------------------------------------------------------------------------


def test_a_class_with_slimes_buffer_chooses_by_its_filter_also_after_a_resume(write, make: Make) -> None:
    text = """
        from slime.rollout.data_source import RolloutDataSourceWithBuffer

        class ByPriority(RolloutDataSourceWithBuffer):
            def buffer_filter(self, args, buffer, n):
                buffer.sort(key=lambda group: -group[0].metadata["level"])
                return buffer[:n]
        """
    options = write("data_source_path", text)
    source, resumed = make(options=options), make(options=options)
    source.put_back(source.next_groups(2))
    resumed.restore(stored(source))
    assert prompts(source.next_groups(3)) == prompts(resumed.next_groups(3)) == ["1+1", "0+1", "2+1"]


BOTH = """
    from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer

    class Mine(RolloutDataSourceWithBuffer):
        def get_samples(self, num_samples): return super().get_samples(num_samples)

    class Chooses(RolloutDataSourceWithBuffer):
        def buffer_filter(self, args, buffer, n): return buffer[:n]

    class Without(RolloutDataSource): pass

    class Alone:
        def get_samples(self, num_samples): return []
        def add_samples(self, samples): pass
"""


def test_a_class_with_slimes_buffer_calls_the_filter_of_the_run(make: Make) -> None:
    Path("choose.py").write_text(textwrap.dedent(NEWEST))
    source = make(BOTH, "--buffer-filter-path", "choose.py", name=":Mine")
    source.put_back(source.next_groups(3))
    assert prompts(source.next_groups(1)) == ["2+1"]


@pytest.mark.parametrize("name", ["Chooses", "Without", "Alone"])
def test_a_class_that_never_calls_the_filter_is_refused(make: Make, name: str) -> None:
    Path("choose.py").write_text(textwrap.dedent(NEWEST))
    with pytest.raises(PluginError) as refused:
        make(BOTH, "--buffer-filter-path", "choose.py", name=f":{name}")
    assert all(word in str(refused.value) for word in ("--buffer-filter-path", "--data-source-path", name))
