"""Options of the plugin: which are accepted, what they select, and the prompt files with which it takes part."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.cli.activation import activate_peeked
from slime_core.components.selection import check_settings
from slime_core.config.explain import to_toml
from slime_core.config.load import Resolved, load, peek
from slime_core.errors import ConfigError
from slime_datasets.options import DatasetsOptions

HERE = Path(__file__)
OTHER = HERE.with_name("test_masks.py")
TRAJECTORIES = "--data-source buffered --generate-function from_buffer"


def checked(*argv: str) -> Resolved:
    argv = (*["--advantage-estimator", "sft", "--rollout-max-response-len", "8", "--num-rollout", "1"], *argv)
    active = activate_peeked(peek(argv), builds_model=False)
    resolved = load(argv, **active.for_load)
    check_settings(resolved, active.registry)
    return resolved


@pytest.mark.parametrize(
    "line",
    [
        f"--prompt-mix {HERE} 0.7 {OTHER} 0.3 --streaming-data --shuffle-window 8",
        f"--data-source buffered --prompt-mix {HERE} 1 --streaming-data",
        "--prompt-mix /absent 1 --load-debug-rollout-data rollouts.jsonl",
        "--data-source buffered --buffer-filter newest",
        "--data-source buffered --buffer-filter stratified --buffer-key level",
        f"{TRAJECTORIES} --buffer-data {HERE}",
        f"--data-source datasets:buffered --generate-function datasets:from_buffer --buffer-data {HERE}",
    ],
)
def test_options_that_are_read_are_accepted(line: str) -> None:
    checked(*line.split())


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (f"--prompt-data {HERE} --prompt-mix {HERE} 1", f"prompt_mix = {HERE} 1"),
        (f"--prompt-mix {HERE} 1 {HERE.parent}/../tests/{HERE.name} 2", "prompt_mix"),
        (f"--prompt-mix {HERE} 1 {OTHER} 2000", "prompt_mix: weight 1"),
        ("--shuffle-window 8", "streaming_data"),
        ("--shuffle-window 8 --streaming-data --no-rollout-shuffle", "--no-rollout-shuffle"),
        (f"--plugin {HERE.with_name('sources.py')} --data-source endless --streaming-data", "--streaming-data"),
        ("--generate-function from_messages --loss-mask-type mistral", "'mistral'"),
        ("--buffer-filter newest", "--buffer-filter"),
        (f"{TRAJECTORIES} --buffer-data /absent", "buffer_data"),
        (f"--data-source buffered --buffer-data {HERE}", "--generate-function from_buffer"),
        ("--data-source buffered --buffer-filter stratified", "--buffer-key FIELD"),
        ("--data-source buffered --buffer-key level", "--buffer-key FIELD"),
    ],
)
def test_options_that_are_wrong_or_do_nothing_are_refused(line: str, named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        checked(*line.split())
    assert named in str(refused.value)


@pytest.mark.parametrize("name", ["auto", "prefix", "qwen", "qwen3", "qwen3_5", "distill_qwen"])
def test_every_name_of_a_loss_mask_type_is_accepted_and_means_the_same(name: str) -> None:
    options = checked("--generate-function", "from_messages", "--loss-mask-type", name).plugin_options
    assert options["datasets"] == DatasetsOptions(loss_mask_type="auto")


def test_the_old_section_of_a_file_is_read_and_written_as_a_table(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[data]\ndata_source = "buffered"\nbuffer_filter = "newest"\nloss_mask_type = "prefix"\n')
    resolved = checked("--config", str(file))
    assert resolved.plugin_options["datasets"] == DatasetsOptions(buffer_filter="newest")
    file.write_text(to_toml(resolved))
    assert checked("--config", str(file)).plugin_options == resolved.plugin_options


def test_a_mix_has_paths_and_weights_from_flags_and_from_a_file(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b"):
        (tmp_path / name).write_text("{}")
    options = DatasetsOptions(prompt_mix=((tmp_path / "a.jsonl@[:9]", 0.7), (tmp_path / "b", 0.3)))
    words = [str(word) for pair in options.prompt_mix for word in pair]
    assert checked("--prompt-mix", *words).plugin_options["datasets"] == options
    file = tmp_path / "run.toml"
    file.write_text('[data]\ndata_source = "prompts"\nprompt_mix = [["a.jsonl@[:9]", 0.7], ["b", 0.3]]\n')
    resolved = checked("--config", str(file))
    assert resolved.plugin_options["datasets"] == options
    assert not resolved.config.eval.eval_prompt_data  # the built-in demo's are not for other prompts
