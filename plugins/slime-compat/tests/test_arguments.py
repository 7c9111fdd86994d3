"""Settings of functions by path, and ``args``, from which the functions read every setting."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime_compat.arguments import slime_arguments
from slime_compat.paths import PathOptions, read_extra
from slime_core.components.construction import run_view
from slime_core.components.selection import check_settings
from slime_core.config.check import unmet
from slime_core.config.explain import to_toml
from slime_core.config.load import load
from slime_core.config.schema import RunConfig
from slime_core.errors import ConfigError
from slime_offpolicy.options import OffPolicyOptions
from tests.function_paths import resolve


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def f(args, sample): return 1.0\n")


def options(*argv: str, **extra: object) -> PathOptions:
    return PathOptions(plan=run_view(load(argv, check_rules=False).config), sources={}, extra=extra)


def config(*argv: str) -> RunConfig:
    return resolve(argv)[0].config


# --- args -------------------------------------------------------------------------------------------------------------


def test_settings_have_their_names_and_those_of_slime() -> None:
    words = ("--seed", "7", "--hf-checkpoint", "/m", "--rollout-stop", "x", "--rollout-num-gpus-per-engine", "4")
    plan = options(*words, "--rollout-batch-size", "4", "--n-samples-per-prompt", "2").plan
    args = slime_arguments(plan, {"mine": 3}, sglang_router_port=1)
    assert (args.seed, args.rollout_seed, args.hf_checkpoint, args.rollout_stop) == (7, 7, "/m", ["x"])
    assert (args.global_batch_size, args.num_steps_per_rollout, args.sglang_tp_size) == (8, 1, 4)
    assert (args.mine, args.sglang_router_port) == (3, 1)


@pytest.mark.parametrize("given", [OffPolicyOptions(), OffPolicyOptions(tis_clip=3.0)])
def test_bounds_of_corrections_are_those_of_their_plugin_or_its_defaults(given: OffPolicyOptions) -> None:
    is_default = given == OffPolicyOptions()
    plan = run_view(load([], check_rules=False).config, {} if is_default else {"offpolicy": given})
    args = slime_arguments(plan, {})
    expected = (given.tis_clip, given.tis_clip, given.tis_clip_low, given.opsm_delta)
    assert (args.tis_clip, args.tis_threshold, args.tis_clip_low, args.opsm_delta) == expected


def test_attributes_set_on_args_stay_in_their_process() -> None:
    made = options("--seed", "7")
    made.arguments.mine = lambda: None
    again: SimpleNamespace = pickle.loads(pickle.dumps(made)).arguments
    assert (again.seed, hasattr(again, "mine"), made.arguments.mine()) == (7, False, None)


@pytest.mark.parametrize(("text", "named"), [("- a\n", "list"), ("lr: 1\n", "lr"), ("a: [\n", "cannot be read")])
def test_a_custom_config_that_is_no_table_of_new_names_is_refused(text: str, named: str) -> None:
    Path("mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=f"--custom-config-path mine.yaml: .*{named}"):
        read_extra(Path("mine.yaml"), options().plan)


# --- What a path selects ----------------------------------------------------------------------------------------------


def test_a_path_selects_the_component_of_its_name() -> None:
    resolved, active = resolve(["--custom-rm-path", "mine.py", "--spec", "mine.py", "f"])
    assert resolved.config.rollout.rm_type == "custom_rm_path"
    assert str(resolved.provenance["rm_type"]) == "flag --custom-rm-path"
    paths = {name: [source.path for source in sources] for name, sources in active.functions["compat"].items()}
    assert paths == {"custom_rm_path": ["mine.py"], "spec": ["mine.py:f"]}


def test_a_path_replaces_the_preset_of_a_plugin_and_not_a_component_that_is_named() -> None:
    found = config("--plugin", "grpo", "--custom-advantage-function-path", "mine.py")
    assert found.algorithm.advantage_estimator == "custom_advantage_function_path"
    with pytest.raises(ConfigError, match=r"--custom-rm-path .* --rm-type"):
        resolve(["--custom-rm-path", "mine.py", "--rm-type", "math"])


def test_filters_come_after_the_transforms_that_are_named() -> None:
    flags = ("--sample-transforms", "mask_truncated", "--rollout-sample-filter-path", "mine.py")
    found = config("--plugin", "grpo", *flags, "--dynamic-sampling-filter-path", "mine.py")
    filters = ("dynamic_sampling_filter_path", "rollout_sample_filter_path")
    assert found.rollout.sample_transforms[-2:] == filters


def test_a_data_source_by_path_calls_the_buffer_filter_itself() -> None:
    words = ("--buffer-filter-path", "mine.py")
    assert config(*words).data.data_source == "buffer_filter_path"
    assert config(*words, "--data-source-path", "mine.py").data.data_source == "data_source_path"


def test_the_settings_of_a_file_are_read_in_the_old_section_and_as_a_run_writes_them() -> None:
    Path("run.toml").write_text('[custom]\ncustom_rm_path = "mine.py"\nspec = []\n')
    assert config("--config", "run.toml").rollout.rm_type == "custom_rm_path"
    path = str(Path("mine.py").absolute())
    first, _ = resolve(["--custom-rm-path", path, "--dynamic-sampling-filter-path", path])
    Path("run.toml").write_text(to_toml(first))
    again, active = resolve(["--config", "run.toml"])
    assert (again.config, again.plugin_options) == (first.config, first.plugin_options)
    assert list(active.functions["compat"]) == ["dynamic_sampling_filter_path", "custom_rm_path"]


def test_sglangs_tensor_parallel_size_is_the_size_of_an_engine() -> None:
    cluster = config("--sglang-tp-size", "2").cluster
    assert (cluster.rollout_num_gpus_per_engine, cluster.rollout_num_gpus) == (2, 2)
    with pytest.raises(ConfigError, match="rollout_num_gpus_per_engine"):
        resolve(["--sglang-tp-size", "2", "--rollout-num-gpus-per-engine", "1"])


def test_a_layer_spec_is_a_module_and_a_function() -> None:
    with pytest.raises(ConfigError, match=r"--spec: .*a\.b\.c"):
        resolve(["--spec", "a.b.c"])


# --- Functions that slime ships ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "path", "instead"),
    [
        ("--rollout-function-path", "slime_plugins.rollout_buffer.generate", "a function of your own"),
        ("--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout", "--advantage-estimator sft"),
        ("--rollout-function-path", "slime.rollout.fully_async_rollout.generate_rollout_fully_async", "--async-buffer"),
        ("--custom-rm-path", "slime.rollout.rm_hub.f1.f1_score", "--rm-type"),
        ("--spec", "slime_plugins.models.glm4", "slime-models"),
    ],
)
def test_functions_that_slime_ships_are_refused_with_what_to_write(flag: str, path: str, instead: str) -> None:
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
def test_slimes_default_functions_are_what_the_core_does(flag: str, path: str) -> None:
    resolved, active = resolve(["--plugin", "grpo", flag, path])
    default = config("--plugin", "grpo")
    assert (resolved.config.rollout, resolved.config.data) == (default.rollout, default.data)
    assert active.functions == {}


def test_slimes_filter_of_groups_without_a_difference_is_ours() -> None:
    name = "check_reward_nonzero_std"
    path = f"slime.rollout.filter_hub.dynamic_sampling_filters.{name}"
    resolved, active = resolve(["--plugin", "grpo", "--dynamic-sampling-filter-path", path])
    (source,) = active.functions["compat"]["dynamic_sampling_filter_path"]
    assert (source.path, source.attribute) == (f"slime_compat.outputs.{name}", name)
    assert resolved.config.rollout.sample_transforms[-1] == "dynamic_sampling_filter_path"
    check_settings(resolved, active.registry, code=active.functions)


# --- Settings that do not fit together --------------------------------------------------------------------------------


def messages(*flags: str) -> list[str]:
    """Return the mistakes of the settings."""
    resolved, active = resolve(["--advantage-estimator", "grpo", *flags])
    found = list(unmet(resolved.values()))
    try:
        check_settings(resolved, active.registry, code=active.functions)
    except ConfigError as mistakes:
        found += [line.removeprefix("  - ") for line in str(mistakes).splitlines()[1:-1]]
    return found


FUNCTIONS = """
def loss(args, batch, logits, sum_of_sample_mean): ...
def tis(*, args, pg_loss, **kwargs): ...
def r(total_lengths, response_lengths, loss_masks, calculate_per_token_loss): ...
def post(args, rollout_id, rollout_data): ...
def s(args, config, vp_stage): ...
def m(pre_process, post_process): ...
def hook(args, version_dir, rollout_engines): ...
def measure(args, rollout_id, data_source, evaluation=False): ...
"""
CP2 = "--actor-num-gpus-per-node 2 --context-parallel-size 2"
LOSS = "--custom-loss-function-path mine.py:loss"
TIS = "--custom-tis-function-path mine.py:tis"
REDUCER = "--custom-pg-loss-reducer-function-path mine.py:r"
POST = "--rollout-data-postprocess-path mine.py:post"
WRITE = "--custom-update-weight-post-write-path mine.py:hook"


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--group-rm", "custom_rm_path"),
        ("--rm-model-path /m", "custom_rm_path"),
        ("--custom-config-path /a.yaml", "custom_config_path = /a.yaml"),
        (f"{LOSS} {CP2}", "with context_parallel_size = 2"),
        (f"{LOSS} --corrections tis", "with corrections = tis"),
        (f"{LOSS} --policy-loss clipped", "with policy_loss = clipped"),
        (f"{LOSS} --rollout-top-p 0.9", "with rollout_top_p = 0.9"),
        (f"{LOSS} --rollout-top-k 4", "with rollout_top_k = 4"),
        (f"{LOSS} --loss-token-divisor 8", "with loss_token_divisor = 8"),
        (f"{LOSS} --get-mismatch-metrics", "with get_mismatch_metrics = true"),
        (f"{LOSS} --use-kl-loss --use-unbiased-kl", "with use_unbiased_kl = true"),
        (f"{LOSS} {TIS}", "with custom_loss_function_path = mine.py:loss"),
        (f"{TIS} --use-rollout-logprobs", "with use_rollout_logprobs = true"),
        (f"{TIS} --true-on-policy-mode", "with true_on_policy_mode = true"),
        (f"{TIS} {CP2}", "with context_parallel_size = 2"),
        (f"{REDUCER} {CP2}", "with context_parallel_size = 2"),
        (f"{REDUCER} --loss-token-divisor 8", "with loss_token_divisor"),
        (f"{POST} {CP2}", "with context_parallel_size = 2"),
        (f"{POST} --critic-num-gpus 1", "with critic_num_gpus = 1"),
        ("--spec mine.py s --custom-model-provider-path mine.py:m", "with custom_model_provider_path = mine"),
        (WRITE, "distributed"),
        (f"{WRITE} --colocate", "tensor"),
    ],
)
def test_settings_that_exclude_each_other_or_do_nothing_are_mistakes(line: str, named: str) -> None:
    Path("mine.py").write_text(FUNCTIONS)
    (message,) = messages(*line.split())
    assert named in message


@pytest.mark.parametrize("line", ["--update-weight-transport disk", "--colocate --actor-num-nodes 2"])
def test_a_post_write_function_fits_weight_updates_by_disk(line: str) -> None:
    Path("mine.py").write_text(FUNCTIONS)
    assert messages(*WRITE.split(), *line.split()) == []


def test_an_evaluation_function_needs_no_prompts_of_the_core() -> None:
    Path("mine.py").write_text(FUNCTIONS)
    words = ("--hf-checkpoint", "/m", "--eval-interval", "2")
    assert any("eval_prompt_data" in message for message in messages(*words))
    assert not any("eval" in message for message in messages(*words, "--eval-function-path", "mine.py:measure"))
