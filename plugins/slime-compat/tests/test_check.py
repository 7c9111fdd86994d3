"""What is refused at start, by its text; what the text does not show is refused where it is imported."""

from __future__ import annotations

import pytest

from slime_compat.check import load_checked
from slime_compat.forms import rollout_forms
from slime_core.errors import PluginError

REWARD = "accepted: fn(args, sample, **kwargs), or fn(args, samples, **kwargs)"
GENERATE = "accepted: async fn(args, sample, sampling_params[, evaluation])"

WRONG = {
    "too few": ("custom_rm_path", "def f(args): ...", f"(args, sample).*{REWARD}"),
    "too many": (
        "dynamic_sampling_filter_path",
        "def f(args, samples, threshold): ...",
        "'threshold'.*accepted: fn(args, samples)",
    ),
    "named only": ("dynamic_sampling_filter_path", "def f(args, samples, *, threshold): ...", "'threshold'"),
    "the wrong way round": ("dynamic_sampling_filter_path", "def f(samples, args): ...", "parameter 1 is 'samples'"),
    "not async": (
        "custom_generate_function_path",
        "def f(args, sample, sampling_params): ...",
        f"is not async.*{GENERATE}",
    ),
    "async": (
        "rollout_sample_filter_path",
        "async def f(args, groups): ...",
        "it is async.*accepted: fn(args, groups).",
    ),
    "neither form": (
        "custom_generate_function_path",
        "async def f(args, samples, sampling_params): ...",
        "it takes 'samples'; it takes 'sampling_params'",
    ),
    "a class without methods": (
        "data_source_path",
        "class Mine:\n    def __init__(self, args): ...\n    def get_samples(self, n): ...",
        "it has no method add_samples",
    ),
    "a method that takes too much": (
        "custom_rm_path",
        "class Mine:\n    def compute_reward(self, prompts, responses, truths): ...",
        "method compute_reward.*'truths'",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_function_of_another_form_is_refused_before_it_runs(write, case: str) -> None:
    setting, text, message = WRONG[case]
    with pytest.raises(PluginError) as refused:
        write(setting, f"raise AssertionError('this file was run')\n{text}")
    assert str(refused.value).startswith(f"--{setting.replace('_', '-')} mine.py: ")
    for part in message.split(".*"):
        assert part in str(refused.value)


@pytest.mark.parametrize("case", WRONG)
def test_the_same_is_refused_where_it_is_imported(write, case: str) -> None:
    setting, text, _ = WRONG[case]
    options = write(setting, text, name=":f" if "def f" in text else ":Mine", checked=False)
    with pytest.raises(PluginError, match="cannot be called"):
        load_checked(options, setting, rollout_forms(group_rm=options.group_rm))


def test_a_name_that_is_not_there_is_refused_with_the_nearest(write) -> None:
    with pytest.raises(PluginError) as refused:
        write("custom_rm_path", "def reward(args, sample): ...\ndef other(): ...", name=":rewrad")
    assert "--custom-rm-path mine.py:rewrad" in str(refused.value)


def test_the_function_with_the_known_parameter_names_is_chosen(write) -> None:
    text = "def near(left, right): return 9.0\n\nasync def mine(args, sample, **kwargs): return 1.0\n"
    options = write("custom_rm_path", text)
    assert load_checked(options, "custom_rm_path", rollout_forms(group_rm=options.group_rm)).function.__name__ == "mine"


def test_several_functions_that_fit_are_refused(write) -> None:
    with pytest.raises(PluginError) as refused:
        write("custom_rm_path", "def one(args, sample): ...\ndef two(args, sample): ...\ndef three(): ...")
    assert "--custom-rm-path mine.py" in str(refused.value)
    assert str(refused.value).endswith("Write mine.py:NAME.")


def test_none_that_fits_is_refused_with_what_there_is(write) -> None:
    with pytest.raises(PluginError, match=r"one, two .*fn\(args, groups\)"):
        write("rollout_sample_filter_path", "def one(args): ...\ndef two(): ...")


def test_text_that_is_no_python_is_refused(write) -> None:
    with pytest.raises(PluginError, match=r"--custom-rm-path mine\.py: .*invalid syntax"):
        write("custom_rm_path", "def f(:")


def test_a_decorated_function_is_judged_where_it_is_imported(write) -> None:
    text = """
        import functools

        def twice(function):
            @functools.wraps(function)
            def doubled(args, sample):
                return 2 * function(args, sample)
            return doubled

        @twice
        def reward(args, sample):
            return 1.0

        @twice
        def narrow(args):
            return 1.0
        """
    options = write("custom_rm_path", text, name=":reward")
    assert load_checked(options, "custom_rm_path", rollout_forms(group_rm=options.group_rm)).function(None, None) == 2.0
    options = write("custom_rm_path", text, name=":narrow")
    with pytest.raises(PluginError, match="it takes 1 of the 2 arguments"):
        load_checked(options, "custom_rm_path", rollout_forms(group_rm=options.group_rm))


def test_a_module_of_a_package_is_read_without_importing_it(tmp_path, write, monkeypatch) -> None:
    package = tmp_path / "lab"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('this package was run')")
    (package / "rewards.py").write_text("def reward(args): ...")
    monkeypatch.syspath_prepend(tmp_path)
    from slime_compat.check import check_texts
    from slime_core.plugins.loading import find_function

    source = find_function("lab.rewards.reward", setting="custom_rm_path")
    options = write("custom_rm_path", "def f(args, sample): ...")
    with pytest.raises(PluginError, match=r"--custom-rm-path lab\.rewards\.reward: def reward\(args\)"):
        check_texts({"custom_rm_path": (source,)}, rollout_forms(group_rm=options.group_rm))
