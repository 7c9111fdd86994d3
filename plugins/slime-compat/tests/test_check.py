"""Signatures that are refused: on the driver by the text of a function, and again where it is imported."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slime_compat.check import check_functions
from slime_compat.forms import TRAINING, forms_of
from slime_compat.options import CompatOptions
from slime_compat.paths import PathOptions
from slime_compat.plugin import slime_loss_parts
from slime_core import NamesCode
from slime_core.cli.main import main
from slime_core.components.functions import find_function
from slime_core.errors import PluginError
from slime_core.provisional import LossParts
from tests.function_paths import options_for


def loaded(options: PathOptions, setting: str = "custom_rm_path"):
    return options.function(setting).function


WRONG = {
    "too few": ("custom_rm_path", "def f(args): ...", ["(args, sample)", "fn(args, samples, **kwargs)"]),
    "too many": ("dynamic_sampling_filter_path", "def f(args, samples, threshold): ...", ["'threshold'", "fn("]),
    "named only": ("dynamic_sampling_filter_path", "def f(args, samples, *, threshold): ...", ["'threshold'"]),
    "the wrong way round": ("dynamic_sampling_filter_path", "def f(samples, args): ...", ["parameter 1", "'samples'"]),
    "not async": (
        "custom_generate_function_path",
        "def f(args, sample, sampling_params): ...",
        ["not async", "async fn(args, sample, sampling_params[, evaluation])"],
    ),
    "async": ("rollout_sample_filter_path", "async def f(args, groups): ...", ["async", "fn(args, groups)"]),
    "neither form": (
        "custom_generate_function_path",
        "async def f(args, samples, sampling_params): ...",
        ["'samples'", "'sampling_params'"],
    ),
    "a class without methods": (
        "data_source_path",
        "class Mine:\n    def __init__(self, args): ...\n    def get_samples(self, n): ...",
        ["add_samples"],
    ),
    "a method that takes too much": (
        "custom_rm_path",
        "class Mine:\n    def compute_reward(self, prompts, responses, truths): ...",
        ["compute_reward", "'truths'"],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_function_of_another_form_is_refused_by_its_text_and_by_what_is_imported(write, case: str) -> None:
    setting, text, named = WRONG[case]
    with pytest.raises(PluginError) as refused:
        write(setting, f"raise AssertionError('this file was run')\n{text}")
    assert str(refused.value).startswith(f"--{setting.replace('_', '-')} mine.py: ")
    assert all(word in str(refused.value) for word in named)
    options = write(setting, text, name=":f" if "def f" in text else ":Mine", checked=False)
    with pytest.raises(PluginError, match="cannot be called"):
        loaded(options, setting)


@pytest.mark.parametrize(
    ("text", "name", "named"),
    [
        ("def reward(args, sample): ...\ndef other(): ...", ":rewrad", "reward"),
        ("def one(args, sample): ...\ndef two(args, sample): ...\ndef three(): ...", "", "mine.py:NAME"),
        ("def one(args): ...\ndef two(): ...", "", "one, two"),
        ("def f(:", "", "invalid syntax"),
    ],
)
def test_a_file_without_exactly_one_function_that_fits_is_refused(write, text: str, name: str, named: str) -> None:
    with pytest.raises(PluginError, match=rf"--custom-rm-path mine\.py.*{named}"):
        write("custom_rm_path", text, name=name)


BOTH = """
    def near(left, right): return 9.0

    async def reward_func(args, sample, **kwargs) -> float: return 1.0

    async def batched_custom_rm(args, samples) -> list[float]: return [2.0 for _ in samples]
"""


@pytest.mark.parametrize(("flags", "name"), [((), "reward_func"), (("--group-rm",), "batched_custom_rm")])
def test_the_function_with_the_preferred_parameter_names_is_chosen(write, flags: tuple[str, ...], name: str) -> None:
    assert loaded(write("custom_rm_path", BOTH, *flags)).__name__ == name


def test_a_decorated_function_is_judged_where_it_is_imported(write) -> None:
    text = """
        import functools

        def twice(function):
            @functools.wraps(function)
            def doubled(args, sample):
                return 2 * function(args, sample)
            return doubled

        @twice
        def reward(args, sample): return 1.0

        @twice
        def narrow(args): return 1.0
        """
    assert loaded(write("custom_rm_path", text, name=":reward"))(None, None) == 2.0
    options = write("custom_rm_path", text, name=":narrow")
    with pytest.raises(PluginError, match="1 of the 2 arguments"):
        loaded(options)


def test_a_module_of_a_package_is_read_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "lab"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('this package was run')")
    (package / "rewards.py").write_text("def reward(args): ...")
    monkeypatch.syspath_prepend(tmp_path)
    source = find_function("lab.rewards.reward", setting="custom_rm_path")
    with pytest.raises(PluginError, match=r"--custom-rm-path lab\.rewards\.reward: def reward\(args\)"):
        check_functions({"custom_rm_path": (source,)}, group_rm=False, has_model=False)


def test_a_reward_class_that_needs_a_model_is_refused_without_one(write) -> None:
    code = """
    class Judge:
        def __init__(self, model_path): ...
        def compute_reward(self, prompts, responses): ...
    """
    sources = write("custom_rm_path", code).sources
    with pytest.raises(PluginError, match="model_path"):
        check_functions(sources, group_rm=False, has_model=False)
    check_functions(sources, group_rm=False, has_model=True)
    optional = write("custom_rm_path", code.replace("model_path)", "model_path=None)")).sources
    check_functions(optional, group_rm=False, has_model=False)


# --- The functions of the learner -------------------------------------------------------------------------------------

TAKES = {
    "custom_advantage_function_path": "args, rollout_data",
    "custom_loss_function_path": "args, batch, logits, sum_of_sample_mean",
    "custom_tis_function_path": "*, args, pg_loss, **kwargs",
    "custom_pg_loss_reducer_function_path": "total_lengths, response_lengths, loss_masks, calculate_per_token_loss",
    "rollout_data_postprocess_path": "args, rollout_id, rollout_data",
    "custom_model_provider_path": "pre_process=True, post_process=True, vp_stage=None",
    "spec": "args, config, vp_stage=None",
    "custom_megatron_init_path": "args",
    "custom_megatron_before_log_prob_hook_path": "args, model, store_prefix",
    "custom_megatron_before_train_step_hook_path": "args, rollout_id, step_id, model, optimizer, opt_param_scheduler",
    "custom_update_weight_post_write_path": "args, version_dir, rollout_engines",
}


def test_every_setting_of_a_function_has_a_form() -> None:
    assert TAKES.keys() == TRAINING.keys()
    fields = CompatOptions.model_fields.items()
    named = {name for name, field in fields if any(isinstance(entry, NamesCode) for entry in field.metadata)}
    assert named == forms_of(group_rm=False).keys()


@pytest.mark.parametrize("setting", TAKES)
def test_functions_of_the_learner_are_accepted_with_slimes_signature_alone(tmp_path: Path, setting: str) -> None:
    options = options_for(tmp_path, f"def f({TAKES[setting]}): ...", **{setting: "f"})
    check_functions(options.sources, group_rm=False, has_model=False)
    assert options.function(setting)
    takes = re.sub(r"=\w+|, \*\*kwargs", "", TAKES[setting])
    for head in ("def f()", f"async def f({takes})", f"def f({takes}, extra)"):
        options = options_for(tmp_path, f"{head}: ...", **{setting: "f"})
        flag = f"--{setting.replace('_', '-')} .*mine.py:f: (async )?def f.* cannot be called: "
        with pytest.raises(PluginError, match=flag) as by_text:
            check_functions(options.sources, group_rm=False, has_model=False)
        with pytest.raises(PluginError) as by_import:
            options.function(setting)
        assert str(by_import.value) == str(by_text.value)


def test_the_functions_of_the_loss_are_its_parts_and_the_others_stay_the_cores(tmp_path: Path) -> None:
    assert slime_loss_parts(options_for(tmp_path, "def f(args): ...", custom_megatron_init_path="f")) == LossParts()
    code = "def tis(*, args, pg_loss, **_): ...\n"
    assert slime_loss_parts(options_for(tmp_path, code, custom_tis_function_path="tis")).given == {"correct"}


def test_a_run_is_refused_by_the_text_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = tmp_path / "mine.py", tmp_path / "run"
    file.write_text("raise SystemExit('this must not run')\n\n\ndef tis(args, pg_loss):\n    pass\n")
    words = ["run", "--plugin", "grpo", "--custom-tis-function-path", f"{file}:tis", "--output-dir", str(folder)]
    assert main(words) == 2
    assert "mine.py:tis" in capsys.readouterr().err
    assert not folder.exists()
