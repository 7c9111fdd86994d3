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
    resolved = load(argv, **active.offered.for_load)
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
        (f"--prompt-mix {HERE} 1 {HERE.parent}/../tests/{HERE.name} 2", f"prompt_mix names {HERE} 2"),
        (f"--prompt-mix {HERE} 1 {OTHER} 2000", "prompt_mix: weight 1"),
        ("--prompt-mix /absent 1", "prompt_mix"),
        ("--shuffle-window 8", "streaming_data"),
        ("--shuffle-window 8 --streaming-data --no-rollout-shuffle", "--no-rollout-shuffle"),
        (f"--plugin {HERE.with_name('sources.py')} --data-source endless --streaming-data", "--streaming-data"),
        (f"--streaming-data --data-source-path {HERE.with_name('sources.py')}:Endless", "--streaming-data"),
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


@pytest.mark.parametrize(
    ("line", "source"),
    [
        (f"--prompt-mix {HERE} 1", "streams"),
        ("--streaming-data", "streams"),
        ("--streaming-data --data-source prompts", "streams"),
        ("--streaming-data --data-source buffered", "buffered"),
        ("--plugin datasets --no-streaming-data", "prompts"),
    ],
)
def test_a_mix_or_a_stream_selects_its_data_source_if_the_run_names_no_other(line: str, source: str) -> None:
    resolved = checked(*line.split())
    assert resolved.config.data.data_source == source
    assert source != "streams" or str(resolved.provenance["data_source"]) == f"flag {line.split()[0]}"


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
    assert resolved.config.data.data_source == "streams"
    assert not resolved.config.eval.eval_prompt_data  # the built-in demo's are not for other prompts


@pytest.mark.parametrize(
    ("named", "reads"),
    [
        ("rows.parquet", True),
        ("rows.parquet@[:3]", True),
        ("many", True),
        ("*.parquet", True),
        ("saved", True),
        ("rows.jsonl", False),
        ("*.jsonl", False),
        ("lines", False),
    ],
)
@pytest.mark.parametrize("flags", ["--prompt-data", "--eval-prompt-data held-out", "--prompt-mix"])
def test_it_takes_part_in_runs_with_a_prompt_file_that_it_reads(
    tmp_path: Path, named: str, reads: bool, flags: str
) -> None:
    for folder in ("many", "saved", "lines"):
        (tmp_path / folder).mkdir()
    for file in ("rows.parquet", "rows.jsonl", "many/a.parquet", "many/b.jsonl", "lines/a.jsonl", "saved/state.json"):
        (tmp_path / file).write_text("")
    words = [*flags.split(), str(tmp_path / named), *(["1"] if flags == "--prompt-mix" else [])]
    active = activate_peeked(peek(words), builds_model=False)
    assert ("datasets" in active.registry.loaded) is (reads or flags == "--prompt-mix")
    formats = {use.name for use in peek(words).uses(active.offered).components if use.kind == "prompt_format"}
    assert bool(formats & {"parquet", "state.json"}) is reads
