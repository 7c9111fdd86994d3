"""Signatures of training-side functions: refused on the driver by their text, and in the learner once imported."""

from __future__ import annotations

import re

import pytest

from slime_compat.forms import rollout_forms
from slime_compat.options import CompatOptions
from slime_compat.parts import loss_parts
from slime_compat.training import TRAINING_FORMS, check, check_training_functions
from slime_core import LossParts, NamesCode
from slime_core.cli.main import main
from slime_core.errors import PluginError
from tests.function_paths import options_for

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


def test_every_setting_of_the_learner_has_a_form():
    assert TAKES.keys() == TRAINING_FORMS.keys()
    named = {
        name
        for name, field in CompatOptions.model_fields.items()
        if any(isinstance(entry, NamesCode) for entry in field.metadata)
    }
    assert named == TRAINING_FORMS.keys() | rollout_forms(group_rm=False).keys()


@pytest.mark.parametrize(("setting", "parameters"), TAKES.items())
def test_the_functions_of_slimes_users_are_accepted(tmp_path, setting, parameters):
    options = options_for(tmp_path, f"def f({parameters}):\n    pass\n", **{setting: "f"})
    check_training_functions(options.sources)
    check(options)


@pytest.mark.parametrize("setting", TAKES)
@pytest.mark.parametrize("head", ["def f()", "async def f({})", "def f({}, extra)"])
def test_others_are_refused_by_their_text_and_by_what_is_imported(tmp_path, setting, head):
    takes = re.sub(r"=\w+|, \*\*kwargs", "", TAKES[setting])
    options = options_for(tmp_path, f"{head.format(takes)}:\n    pass\n", **{setting: "f"})
    flag = f"--{setting.replace('_', '-')} .*mine.py:f: (async )?def f.* cannot be called: "
    with pytest.raises(PluginError, match=flag) as by_text:
        check_training_functions(options.sources)
    with pytest.raises(PluginError) as by_import:
        check(options)
    assert str(by_import.value) == str(by_text.value)


def test_the_message_says_what_was_found_and_what_is_accepted(tmp_path):
    code = "def tis(args, pg_loss, train_log_probs):\n    pass\n"
    options = options_for(tmp_path, code, custom_tis_function_path="tis")
    with pytest.raises(PluginError) as refused:
        check(options)
    assert "rollout_log_probs, loss_masks, total_lengths, response_lengths" in str(refused.value)


def test_a_run_without_functions_of_the_loss_keeps_the_core_s_parts(tmp_path):
    assert loss_parts(options_for(tmp_path, "def f(args): ...", custom_megatron_init_path="f")) == LossParts()


def test_the_functions_of_the_loss_are_its_parts(tmp_path):
    code = "def tis(*, args, pg_loss, **_): ...\n"
    found = loss_parts(options_for(tmp_path, code, custom_tis_function_path="tis"))
    assert found.given == {"correct"}


def test_a_run_is_refused_by_the_text_before_anything_starts(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text("raise SystemExit('this must not run')\n\n\ndef tis(args, pg_loss):\n    pass\n")
    folder = tmp_path / "run"
    words = ["run", "--plugin", "grpo", "--custom-tis-function-path", f"{file}:tis", "--output-dir", str(folder)]
    assert main(words) == 2
    assert "mine.py:tis" in capsys.readouterr().err
    assert not folder.exists()
