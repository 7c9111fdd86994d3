"""What the options of the plugin may be, where they stand, and what activates the plugin."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.config.explain import to_toml
from slime_core.config.load import Resolved, load, peek
from slime_core.errors import ConfigError
from slime_core.plugins.activation import ActivePlugins, activate
from slime_core.plugins.selection import check_settings
from slime_datasets.options import DatasetsOptions

HERE = Path(__file__)
TRAJECTORIES = "--data-source buffered --generate-function from_buffer"


def activated(*argv: str) -> ActivePlugins:
    seen = peek(argv)
    return activate(seen.plugins, choices=seen.choices, flags=seen.flags, code=seen.code, without=seen.no_plugins)


def checked(*argv: str) -> Resolved:
    argv = (*["--advantage-estimator", "sft", "--rollout-max-response-len", "8", "--num-rollout", "1"], *argv)
    active = activated(*argv)
    found = load(argv, **active.for_settings)
    check_settings(found, active.registry)
    return found


@pytest.mark.parametrize(
    "line",
    [
        f"--prompt-mix {HERE} 0.7 {HERE.parent / 'test_masks.py'} 0.3 --streaming-data --shuffle-window 8",
        f"--data-source buffered --prompt-mix {HERE} 1 --streaming-data",
        "--prompt-mix /absent 1 --load-debug-rollout-data rollouts.jsonl",
        "--generate-function from_messages --loss-mask-type qwen3",
        "--data-source buffered --buffer-filter newest",
        "--data-source buffered --buffer-filter stratified --buffer-key level",
        f"{TRAJECTORIES} --buffer-data {HERE}",
        f"--data-source datasets:buffered --generate-function datasets:from_buffer --buffer-data {HERE}",
    ],
)
def test_options_that_are_read_are_accepted(line: str) -> None:
    checked(*line.split())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"--prompt-data {HERE} --prompt-mix {HERE} 1", f"prompt_mix = {HERE} 1"),
        (f"--prompt-mix {HERE} 1 {HERE.parent}/../tests/{HERE.name} 2", f"prompt_mix names {HERE} 2"),
        (f"--prompt-mix {HERE} 1 {HERE.parent / 'test_masks.py'} 2000", "prompt_mix: weight 1"),
        ("--prompt-mix /absent 1", "prompt_mix"),
        (
            "--plugin datasets --shuffle-window 8",
            "shuffle_window = 8 needs streaming_data. Add --streaming-data, or leave --shuffle-window out",
        ),
        ("--shuffle-window 8 --streaming-data --no-rollout-shuffle", "--shuffle-window or --no-rollout-shuffle"),
        (f"--plugin {HERE.parent / 'sources.py'} --data-source endless --streaming-data", "--streaming-data"),
        (
            f"--streaming-data --data-source-path {HERE.parent / 'sources.py'}:Endless",
            "data_source, and flag --streaming-data",
        ),
        ("--generate-function from_messages --loss-mask-type mistral", "--loss-mask-type: found 'mistral'"),
        ("--plugin datasets --buffer-filter newest", "--buffer-filter"),
        (f"{TRAJECTORIES} --buffer-data /absent", "buffer_data"),
        (f"--data-source buffered --buffer-data {HERE}", "--generate-function from_buffer"),
        ("--data-source buffered --buffer-filter stratified", "--buffer-key FIELD"),
        ("--data-source buffered --buffer-key level", "--buffer-key FIELD"),
    ],
)
def test_options_that_are_wrong_or_do_nothing_are_refused(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checked(*line.split())
    assert message in str(caught.value)


def test_a_flag_alone_is_refused_with_what_to_add() -> None:
    with pytest.raises(ConfigError) as caught:
        checked("--buffer-filter", "newest")
    assert "'datasets' (slime-datasets" in str(caught.value)
    assert "add --plugin datasets" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        checked("--plugin", "datasets", "--buffer-filter", "newest")
    assert "name a data source" in str(caught.value)


@pytest.mark.parametrize("name", ["auto", "prefix", "qwen", "qwen3", "qwen3_5", "distill_qwen"])
def test_every_name_of_a_loss_mask_type_is_accepted_and_means_the_same(name: str) -> None:
    found = checked("--plugin", "datasets", "--loss-mask-type", name)
    assert found.plugin_options["datasets"] == DatasetsOptions(loss_mask_type="auto")


def test_the_old_section_of_a_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    lines = ["[data]", 'data_source = "buffered"', 'buffer_filter = "newest"', 'loss_mask_type = "prefix"']
    file.write_text("\n".join(lines))
    found = checked("--config", str(file))
    assert found.plugin_options["datasets"] == DatasetsOptions(buffer_filter="newest")
    written = tmp_path / "config.toml"
    written.write_text(to_toml(found))
    assert checked("--config", str(written)).plugin_options == found.plugin_options


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
def test_a_mix_or_a_stream_selects_its_data_source_where_the_run_names_no_other(line: str, source: str) -> None:
    found = checked(*line.split())
    assert found.config.data.data_source == source
    by = found.provenance["data_source"]
    assert str(by) == (f"flag {line.split()[0]}" if source == "streams" else str(by))


def test_a_mix_has_paths_and_weights_from_flags_and_from_a_file(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b"):
        (tmp_path / name).write_text("{}")
    wanted = ((tmp_path / "a.jsonl@[:9]", 0.7), (tmp_path / "b", 0.3))
    words = [str(word) for pair in wanted for word in pair]
    assert checked("--prompt-mix", *words).plugin_options["datasets"] == DatasetsOptions(prompt_mix=wanted)
    file = tmp_path / "run.toml"
    file.write_text('[data]\ndata_source = "prompts"\nprompt_mix = [["a.jsonl@[:9]", 0.7], ["b", 0.3]]\n')
    found = checked("--config", str(file))
    assert found.plugin_options["datasets"] == DatasetsOptions(prompt_mix=wanted)
    assert found.config.data.data_source == "streams"
    assert not found.config.eval.eval_prompt_data  # the built-in demo's own are not for other prompts


def test_the_formats_of_a_mix_activate_their_plugins(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "b.rows").write_text("")
    line = ["--plugin", "datasets", "--prompt-mix", str(tmp_path / "a.jsonl"), "1", str(tmp_path / "b.rows"), "1"]
    seen = peek(line)
    named = [(one.kind, one.name, one.where) for one in seen.choices(activate(["datasets"]).registry)]
    assert ("prompt_format", "rows", "--prompt-mix") in named
