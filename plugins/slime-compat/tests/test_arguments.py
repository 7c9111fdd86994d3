"""``args``: every setting, by our name and by slime's."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime_compat.arguments import slime_arguments
from slime_compat.options import PathOptions, read_extra
from slime_core.config.check import unmet
from slime_core.config.explain import to_toml
from slime_core.config.load import load
from slime_core.errors import ConfigError
from slime_core.plugins.construction import run_view
from slime_core.plugins.selection import check_settings
from slime_offpolicy.options import OffPolicyOptions
from tests.function_paths import handed, resolve


def options(*argv: str, **extra: object) -> PathOptions:
    return PathOptions(plan=run_view(load(argv, check_rules=False).config), sources={}, extra=extra)


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
    plan = run_view(load([], check_rules=False).config, {"offpolicy": OffPolicyOptions(tis_clip=3.0)})
    args = slime_arguments(plan, {})
    assert (args.tis_clip, args.tis_threshold, args.tis_clip_low) == (3.0, 3.0, 0.0)


def test_attributes_set_on_args_stay_in_their_process() -> None:
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
    ("text", "message"), [("- a\n", "found list"), ("lr: 1\n", "lr are settings"), ("a: [\n", "cannot be read")]
)
def test_a_custom_config_that_is_no_table_of_new_names_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_extra(path, options().plan)


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def f(args, sample): return 1.0\n")


def test_args_have_the_settings_of_slime_by_their_own_names() -> None:
    args = handed(["--custom-rm-path", "mine.py", "--max-turns", "3"]).arguments
    assert (args.custom_rm_path, args.max_turns, args.group_rm, args.custom_loss_function_path) == (
        "mine.py",
        3,
        False,
        None,
    )


def test_a_path_selects_the_component_of_its_name() -> None:
    resolved, active = resolve(["--custom-rm-path", "mine.py", "--spec", "mine.py", "f"])
    assert resolved.config.rollout.rm_type == "custom_rm_path"
    assert str(resolved.provenance["rm_type"]) == "flag --custom-rm-path"
    found = {name: [source.path for source in sources] for name, sources in active.functions["compat"].items()}
    assert found == {"custom_rm_path": ["mine.py"], "spec": ["mine.py:f"]}


def test_filters_come_after_the_transforms_that_are_named() -> None:
    flags = ["--sample-transforms", "x", "--rollout-sample-filter-path", "mine.py"]
    resolved, _ = resolve([*flags, "--dynamic-sampling-filter-path", "mine.py"])
    assert resolved.config.rollout.sample_transforms == (
        "x",
        "dynamic_sampling_filter_path",
        "rollout_sample_filter_path",
    )


def test_a_plugins_preset_gives_way_to_a_path() -> None:
    resolved, _ = resolve(["--plugin", "grpo", "--custom-advantage-function-path", "mine.py"])
    assert resolved.config.algorithm.advantage_estimator == "custom_advantage_function_path"


def test_a_path_in_the_old_section_of_a_file_is_read() -> None:
    Path("run.toml").write_text('[custom]\ncustom_rm_path = "mine.py"\nspec = []\n')
    resolved, _ = resolve(["--config", "run.toml"])
    assert resolved.config.rollout.rm_type == "custom_rm_path"


def test_the_written_settings_of_a_run_are_read_again() -> None:
    path = str(Path("mine.py").absolute())
    flags = ["--custom-rm-path", path, "--dynamic-sampling-filter-path", path]
    first, _ = resolve(flags)
    Path("run.toml").write_text(to_toml(first))
    again, active = resolve(["--config", "run.toml"])
    assert (again.config, again.plugin_options) == (first.config, first.plugin_options)
    assert list(active.functions["compat"]) == ["dynamic_sampling_filter_path", "custom_rm_path"]


def test_a_path_together_with_another_component_is_a_mistake() -> None:
    message = "--custom-rm-path .* --rm-type"
    with pytest.raises(ConfigError, match=message):
        resolve(["--custom-rm-path", "mine.py", "--rm-type", "math"])


def test_a_data_source_by_path_calls_the_buffer_filter_itself() -> None:
    resolved, _ = resolve(["--buffer-filter-path", "mine.py"])
    assert resolved.config.data.data_source == "buffer_filter_path"
    resolved, _ = resolve(["--buffer-filter-path", "mine.py", "--data-source-path", "mine.py"])
    assert resolved.config.data.data_source == "data_source_path"


def test_a_rule_of_slimes_given_as_a_reward_function_is_a_reward_model_here() -> None:
    with pytest.raises(ConfigError, match="--rm-type"):
        resolve(["--custom-rm-path", "slime.rollout.rm_hub.f1.f1_score"])


def test_sglangs_tensor_parallel_size_is_the_size_of_an_engine() -> None:
    resolved, _ = resolve(["--sglang-tp-size", "2"])
    assert resolved.config.cluster.rollout_num_gpus_per_engine == 2
    assert resolved.config.cluster.rollout_num_gpus == 2
    assert arguments(options("--rollout-num-gpus-per-engine", "4")).sglang_tp_size == 4
    with pytest.raises(ConfigError, match="rollout_num_gpus_per_engine"):
        resolve(["--sglang-tp-size", "2", "--rollout-num-gpus-per-engine", "1"])


def test_a_preset_cannot_name_code() -> None:
    Path("bold.py").write_text(
        "from slime_core import hookimpl\n@hookimpl\ndef slime_presets():\n    return {'custom_rm_path': 'mine.py'}\n"
    )
    with pytest.raises(ConfigError, match=r"compat\.custom_rm_path"):
        resolve(["--plugin", "compat", "--plugin", "./bold.py"])


@pytest.mark.parametrize(
    ("flag", "path", "instead"),
    [
        ("--rollout-function-path", "slime_plugins.rollout_buffer.generate", "a function of your own"),
        ("--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout", "--advantage-estimator sft"),
        (
            "--rollout-function-path",
            "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
            "--async-buffer-size",
        ),
        ("--spec", "slime_plugins.models.glm4", "slime-models"),
    ],
)
def test_functions_that_slime_ships_are_named_with_what_to_write_in_their_place(flag, path, instead) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve([flag, path, *(["get_glm_spec"] if flag == "--spec" else [])])
    assert flag in str(refused.value)
    assert instead in str(refused.value)


@pytest.mark.parametrize(
    ("flag", "path"),
    [
        ("--rollout-function-path", "slime.rollout.sglang_rollout.generate_rollout"),
        ("--eval-function-path", "slime.rollout.sglang_rollout.generate_rollout"),
        ("--custom-generate-function-path", "slime.rollout.sglang_rollout:generate"),
        ("--data-source-path", "slime.rollout.data_source.RolloutDataSourceWithBuffer"),
        ("--data-source-path", "slime.rollout.data_source.RolloutDataSource"),
        ("--buffer-filter-path", "slime.rollout.data_source.pop_first"),
    ],
)
def test_slimes_default_functions_are_what_the_core_does(flag, path) -> None:
    resolved, active = resolve(["--plugin", "grpo", flag, path])
    plain = resolve(["--plugin", "grpo"])[0].config
    assert (resolved.config.rollout, resolved.config.data) == (plain.rollout, plain.data)
    assert active.functions == {}


def test_slimes_filter_of_groups_without_a_difference_is_ours() -> None:
    name = "check_reward_nonzero_std"
    path = f"slime.rollout.filter_hub.dynamic_sampling_filters.{name}"
    resolved, active = resolve(["--plugin", "grpo", "--dynamic-sampling-filter-path", path])
    (source,) = active.functions["compat"]["dynamic_sampling_filter_path"]
    assert (source.path, source.attribute) == (f"slime_compat.outputs.{name}", name)
    assert resolved.config.rollout.sample_transforms[-1] == "dynamic_sampling_filter_path"
    from slime_core.plugins.selection import check_settings

    check_settings(resolved, active.registry, code=active.functions)


def messages(*flags: str) -> list[str]:
    """What the checks of the settings find."""
    resolved, active = resolve(["--advantage-estimator", "grpo", *flags])
    found = list(unmet(resolved.values()))
    try:
        check_settings(resolved, active.registry, code=active.functions)
    except ConfigError as mistakes:
        found += [line.removeprefix("  - ") for line in str(mistakes).splitlines()[1:-1]]
    return found


CP2 = ("--actor-num-gpus-per-node", "2", "--context-parallel-size", "2")
LOSS = ("--custom-loss-function-path", "mine.py:loss")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--group-rm",), "custom_rm_path"),
        (("--rm-model-path", "/m"), "custom_rm_path"),
        (("--custom-config-path", "/a.yaml"), "custom_config_path = /a.yaml"),
    ],
)
def test_settings_of_functions_that_are_not_there_are_mistakes(flags: tuple[str, ...], message: str) -> None:
    (found,) = messages("--plugin", "compat", *flags)
    assert message in found


@pytest.mark.parametrize(
    ("flags", "excludes"),
    [
        ((*LOSS, *CP2), "context_parallel_size = 2"),
        ((*LOSS, "--corrections", "tis"), "corrections = tis"),
        ((*LOSS, "--policy-loss", "clipped"), "policy_loss = clipped"),
        ((*LOSS, "--rollout-top-p", "0.9"), "rollout_top_p = 0.9"),
        ((*LOSS, "--rollout-top-k", "4"), "rollout_top_k = 4"),
        ((*LOSS, "--loss-token-divisor", "8"), "loss_token_divisor = 8"),
        ((*LOSS, "--get-mismatch-metrics"), "get_mismatch_metrics = true"),
        ((*LOSS, "--use-kl-loss", "--use-unbiased-kl"), "use_unbiased_kl = true"),
        ((*LOSS, "--custom-tis-function-path", "mine.py:tis"), "custom_loss_function_path = mine.py:loss"),
        (("--custom-tis-function-path", "mine.py:tis", "--use-rollout-logprobs"), "use_rollout_logprobs = true"),
        (("--custom-tis-function-path", "mine.py:tis", "--true-on-policy-mode"), "true_on_policy_mode = true"),
        (("--custom-tis-function-path", "mine.py:tis", *CP2), "context_parallel_size = 2"),
        (("--custom-pg-loss-reducer-function-path", "mine.py:r", *CP2), "context_parallel_size = 2"),
        (("--custom-pg-loss-reducer-function-path", "mine.py:r", "--loss-token-divisor", "8"), "loss_token_divisor"),
        (("--rollout-data-postprocess-path", "mine.py:post", *CP2), "context_parallel_size = 2"),
        (("--rollout-data-postprocess-path", "mine.py:post", "--critic-num-gpus", "1"), "critic_num_gpus = 1"),
        (("--spec", "mine.py", "s", "--custom-model-provider-path", "mine.py:m"), "custom_model_provider_path = mine"),
    ],
)
def test_a_function_excludes_the_component_that_it_replaces(flags: tuple[str, ...], excludes: str) -> None:
    Path("mine.py").write_text(
        "def loss(args, batch, logits, sum_of_sample_mean): ...\n"
        "def tis(*, args, pg_loss, **kwargs): ...\n"
        "def r(total_lengths, response_lengths, loss_masks, calculate_per_token_loss): ...\n"
        "def post(args, rollout_id, rollout_data): ...\n"
        "def s(args, config, vp_stage): ...\n"
        "def m(pre_process, post_process): ...\n"
    )
    (found,) = messages(*flags)
    assert f" with {excludes}" in found
    assert "cannot be combined" in found


@pytest.mark.parametrize(
    ("flags", "transport"),
    [
        ((), "distributed"),
        (("--colocate",), "tensor"),
        (("--update-weight-transport", "disk"), None),
        (("--colocate", "--actor-num-nodes", "2"), None),
    ],
)
def test_a_post_write_function_needs_weight_updates_by_disk(flags: tuple[str, ...], transport: str | None) -> None:
    Path("mine.py").write_text("def hook(args, version_dir, rollout_engines): ...\n")
    found = messages("--custom-update-weight-post-write-path", "mine.py", *flags)
    assert [f"travel by {transport}" in one for one in found] == [True] * bool(transport)


def test_a_layer_spec_is_a_module_and_a_function() -> None:
    with pytest.raises(ConfigError, match=r"--spec: found 'a\.b\.c'"):
        resolve(["--spec", "a.b.c"])


def test_an_evaluation_function_needs_no_prompts_of_the_core() -> None:
    argv = ["--advantage-estimator", "grpo", "--hf-checkpoint", "/m", "--eval-interval", "2"]
    assert any("eval_interval = 2 needs eval_prompt_data or" in one for one in messages(*argv[2:]))
    Path("mine.py").write_text("def f(args, rollout_id, data_source, evaluation=False): ...\n")
    assert not any("eval_interval" in one for one in messages(*argv[2:], "--eval-function-path", "mine.py"))
