"""``args``: every setting, by our name and by slime's."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime_compat.arguments import slime_arguments
from slime_compat.options import PathOptions, read_extra
from slime_core.config.load import load, peek
from slime_core.errors import ConfigError
from slime_core.plugins.construction import run_plan
from slime_offpolicy.options import OffPolicyOptions


def options(*argv: str, **extra: object) -> PathOptions:
    return PathOptions(plan=run_plan(load(argv, check_rules=False).config), sources={}, extra=extra)


def arguments(found: PathOptions, **derived: object) -> SimpleNamespace:
    return slime_arguments(found.plan, found.extra, **derived)


def test_settings_have_their_names_and_those_of_slime() -> None:
    args = arguments(options("--seed", "7", "--hf-checkpoint", "/m", "--rollout-stop", "x"), sglang_router_port=1)
    assert (args.seed, args.rollout_seed, args.hf_checkpoint, args.rollout_stop) == (7, 7, "/m", ["x"])
    assert args.sglang_router_port == 1


def test_batch_sizes_are_what_the_run_uses() -> None:
    args = arguments(options("--rollout-batch-size", "4", "--n-samples-per-prompt", "2"))
    assert (args.global_batch_size, args.num_steps_per_rollout) == (8, 1)


def test_bounds_of_corrections_are_those_of_their_plugin_or_its_defaults() -> None:
    args = arguments(options())
    defaults = OffPolicyOptions()
    assert (args.tis_clip, args.tis_clip_low, args.opsm_delta) == (
        defaults.tis_clip,
        defaults.tis_clip_low,
        defaults.opsm_delta,
    )
    plan = run_plan(load([], check_rules=False).config, {"offpolicy": OffPolicyOptions(tis_clip=3.0)})
    args = slime_arguments(plan, {})
    assert (args.tis_clip, args.tis_threshold, args.tis_clip_low) == (3.0, 3.0, 0.0)


def test_what_is_written_to_args_stays_in_its_process() -> None:
    made = options("--seed", "7")
    made.arguments.mine = lambda: None
    again = pickle.loads(pickle.dumps(made))
    assert (again.arguments.seed, hasattr(again.arguments, "mine"), made.arguments.mine()) == (7, False, None)


def test_entries_of_the_custom_config_are_attributes(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("search_url: http://localhost\ntop: 3\n")
    args = arguments(options(**read_extra(path, options().plan)))
    assert (args.search_url, args.top) == ("http://localhost", 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n", "found list; accepted is a table of names and values"),
        ("lr: 1\n", "lr are settings of the run; give them as flags"),
        ("a: [\n", "cannot be read"),
    ],
)
def test_a_custom_config_that_is_no_table_of_new_names_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_extra(path, options().plan)


def test_a_path_selects_the_component_of_its_name() -> None:
    resolved = load(("--custom-rm-path", "mine.py"), check_rules=False)
    assert resolved.config.rollout.rm_type == "custom_rm_path"
    assert str(resolved.provenance["rm_type"]) == "flag --custom-rm-path"
    assert peek(("--custom-rm-path", "mine.py", "--spec", "a.b", "f")).paths == {
        "custom_rm_path": ("mine.py",),
        "spec": ("a.b:f",),
    }


def test_a_plugins_preset_gives_way_to_a_path() -> None:
    presets = {"advantage_estimator": ("grpo", "grpo")}
    resolved = load(("--custom-advantage-function-path", "a.b"), presets=presets, check_rules=False)
    assert resolved.config.algorithm.advantage_estimator == "custom_advantage_function_path"


def test_a_path_beside_another_component_is_a_mistake() -> None:
    message = "--custom-rm-path stands in for rm_type, and flag --rm-type says math; accepted: one of the two"
    with pytest.raises(ConfigError, match=message):
        load(("--custom-rm-path", "mine.py", "--rm-type", "math"), check_rules=False)


def test_two_ways_to_choose_the_data_source_are_a_mistake() -> None:
    resolved = load(("--buffer-filter-path", "a.b"), check_rules=False)
    assert resolved.config.data.data_source == "buffer_filter_path"
    message = "--data-source-path stands in for data_source, and flag --buffer-filter-path says buffer_filter_path"
    with pytest.raises(ConfigError, match=message):
        load(("--buffer-filter-path", "a.b", "--data-source-path", "a.C"), check_rules=False)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ("--group-rm",),
            "group_rm = true has no effect without custom_rm_path; add --custom-rm-path, or leave it out",
        ),
        (("--rm-model-path", "/m"), "rm_model_path = /m has no effect without custom_rm_path"),
        (("--custom-config-path", "a.yaml"), "a.yaml has no effect: no function is named by path"),
    ],
)
def test_settings_of_functions_that_are_not_there_are_mistakes(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(("--advantage-estimator", "grpo", *argv))


def test_an_evaluation_function_needs_no_prompts_of_the_core() -> None:
    argv = ("--advantage-estimator", "grpo", "--hf-checkpoint", "/m", "--eval-interval", "2")
    with pytest.raises(ConfigError, match="eval_interval = 2 needs eval_prompt_data or"):
        load(argv)
    with pytest.raises(ConfigError) as refused:
        load((*argv, "--eval-function-path", "mine.py"))
    assert "eval_interval" not in str(refused.value)
