"""Every condition in the annotation of a core setting refuses and accepts, and names settings that exist."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import TypeAdapter, ValidationError

from slime_core.config.check import out_of_bounds, unmet
from slime_core.config.engine_flags import megatron_settings
from slime_core.config.engines import EngineGroup
from slime_core.config.options import AtMost, Below, Conflicts, Needs
from slime_core.config.sampling import EvalDataset
from slime_core.config.settings import Setting, core_settings

SETTINGS = core_settings()
TABLES: dict[str, Any] = {
    "engine_groups": (EngineGroup(num_gpus=1),),
    "eval_datasets": (EvalDataset(name="aime", path=Path("aime.jsonl")),),
    "eval_prompt_data": (("aime", Path("aime.jsonl")),),
    "rollout_external_engine_addrs": ("10.0.0.7:30000",),
}

Case = tuple[str, int]


def cases() -> Iterator[Case]:
    """The name of each setting with conditions, and the place of each condition among its annotations."""
    for name, setting in SETTINGS.items():
        for place, entry in enumerate(setting.info.metadata):
            if isinstance(entry, Needs | Conflicts):
                yield name, place


def other_value(setting: Setting) -> Any:
    """A value that the setting accepts and that is not its default."""
    kinds = [setting.info.annotation, *get_args(setting.info.annotation)]
    choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    names: list[Any] = [Path("file"), "name", ("name",)]
    for value in [TABLES.get(setting.name), *choices, True, False, 2, 3, 0.5, *names]:
        try:
            read = TypeAdapter[Any](setting.info.annotation).validate_python(value, strict=True)
        except ValidationError:
            continue
        if read is not None and read != setting.default:
            return read
    raise AssertionError(f"no other value of {setting.name} is known here")


def values(conditions: dict[str, list[Any]], **given: Any) -> dict[str, tuple[Setting, Any]]:
    """All settings of the core, with ``given`` values, and without conditions but for ``conditions`` (of a setting)."""
    found = {}
    for name, setting in SETTINGS.items():
        info = copy.copy(setting.info)
        info.metadata = conditions.get(name, [])
        found[name] = (replace(setting, info=info), given.get(name, setting.default))
    return found


def messages(case: Case, **others: Any) -> list[str]:
    """The messages where the setting is given and only this condition is checked."""
    name, place = case
    condition = SETTINGS[name].info.metadata[place]
    value = other_value(SETTINGS[name]) if condition.when is None else condition.when
    return list(unmet(values({name: [condition]}, **others, **{name: value})))


def verdicts(case: Case) -> tuple[list[str], list[list[str]]]:
    """The messages where the condition does not hold, and those of every way in which it holds."""
    condition = SETTINGS[case[0]].info.metadata[case[1]]
    known = [SETTINGS[name] for name in condition.settings if name in SETTINGS]
    given = {one.name: other_value(one) if condition.equals is None else condition.equals for one in known}
    if isinstance(condition, Needs):
        return messages(case), [messages(case, **{name: value}) for name, value in given.items()]
    assert all(len(messages(case, **{name: value})) == 1 for name, value in given.items())
    lifting = [(name, value) for name, value in condition.unless if name in SETTINGS]
    spared = [given | {name: other_value(SETTINGS[name]) if value is None else value} for name, value in lifting]
    return messages(case, **given), [messages(case, **others) for others in [{}, *spared]]


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: f"{case[0]}-{case[1]}")
def test_a_condition_refuses_and_accepts(case: Case) -> None:
    refused, accepted = verdicts(case)
    assert [case[0] in message for message in refused] == [True]
    assert not any(accepted)


def test_conditions_name_settings_that_exist() -> None:
    flags = (point.name.replace("-", "_") for point in entry_points(group="slime.flags"))
    known = {*SETTINGS, *flags, *megatron_settings()}
    found = [SETTINGS[name].info.metadata[place] for name, place in cases()]
    assert {name for entry in found for name in (*entry.settings, *dict(entry.unless))} <= known


def test_a_condition_is_silent_where_one_of_its_settings_has_no_usable_value() -> None:
    given = values({"kl_loss_coef": [Needs("use_kl_loss")]}, kl_loss_coef=0.1)
    assert len(list(unmet(given))) == 1
    assert [*unmet(given, broken={"use_kl_loss"}), *unmet(given, broken={"kl_loss_coef"})] == []


def test_an_evaluation_looks_at_the_conditions_of_its_own_sections() -> None:
    conditions = {"kl_loss_coef": [Needs("use_kl_loss")], "eval_num_gpus_per_engine": [Needs("eval_num_gpus")]}
    given = values(conditions, kl_loss_coef=0.1, eval_num_gpus_per_engine=2)
    (message,) = unmet(given, sections={"eval"})
    assert "eval_num_gpus_per_engine" in message


def test_a_bound_holds_where_both_values_are_usable() -> None:
    bounds = {"min_lr": [AtMost("lr", "critic_lr")], "num_critic_only_steps": [Below("num_rollout")]}
    given = values(bounds, min_lr=2.0, lr=1.0, num_critic_only_steps=3, num_rollout=3)
    assert [message.split()[0] for message in out_of_bounds(given)] == ["min_lr", "num_critic_only_steps"]
    assert list(out_of_bounds(given, broken={"lr", "num_critic_only_steps"})) == []
    assert list(out_of_bounds(given, sections={"eval"})) == []
    assert list(out_of_bounds(values(bounds, min_lr=1.0, lr=1.0, num_critic_only_steps=2, num_rollout=3))) == []


def test_bounds_name_settings_that_exist() -> None:
    found = [bound for setting in SETTINGS.values() for bound in setting.notes(AtMost)]
    assert {name for bound in found for name in bound.settings} <= SETTINGS.keys()
