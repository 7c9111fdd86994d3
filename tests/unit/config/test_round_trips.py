"""The same settings, given as flags, as TOML or as the file that a run writes, make the same run."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
import tomli_w
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from slime_core.config.engine_flags import megatron_settings
from slime_core.config.explain import to_toml
from slime_core.config.load import Resolved, load, peek
from slime_core.config.options import Once
from slime_core.config.sampling import EvalDataset
from slime_core.config.settings import InWords, Setting, as_words, core_settings
from slime_core.plugins.activation import activate_line

"""The standard workflow, with fewer devices and prompts, and an engine's flag of each kind."""


# --- Any settings -----------------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1).filter(lambda text: text != "none")
PATH = TEXT.map(lambda text: Path(os.path.abspath("/data/" + text.lstrip("/"))))

NAME = st.from_regex(r"[A-Za-z0-9.+-][A-Za-z0-9.+ -]{0,9}", fullmatch=True).filter(lambda text: text != "none")

DATASETS = st.builds(
    EvalDataset,
    name=NAME,
    path=PATH,
    temperature=st.none() | st.floats(0, 2),
    top_k=st.none() | st.integers(1, 9),
    stop=st.none() | st.lists(TEXT, max_size=2).map(tuple),
    apply_chat_template=st.none() | st.booleans(),
    rm_type=st.none() | TEXT,
)

FILES = PATH.filter(lambda path: "{" not in str(path))
EXPRESSIONS = st.sampled_from([(), (r"layers\.0\.",), ("norm", "router")])
CHECKED: dict[str, st.SearchStrategy[Any]] = {
    "apply_chat_template_kwargs": st.sampled_from(["{}", '{"enable_thinking": false}']),
    "corrections": st.lists(TEXT, max_size=3, unique=True).map(tuple),
    "eval_prompt_data": st.lists(st.tuples(NAME, PATH), max_size=3).map(tuple),
    "freeze_params_name_list": EXPRESSIONS,
    "job_name": NAME.filter(lambda name: name[0].isalnum()),
    "load_debug_rollout_data": st.none() | FILES,
    "multimodal_keys": st.none() | st.just('{"image": "images"}'),
    "only_train_params_name_list": EXPRESSIONS,
    "rollout_external_engine_addrs": st.sampled_from([(), ("10.0.0.7:30000",), ("a:1", "b:2")]),
    "save_debug_rollout_data": st.none() | FILES,
    "save_debug_train_data": st.none() | FILES,
}
"""Values of settings that take only some texts."""

UNDER_TEST = [
    setting
    for setting in [
        *core_settings().values(),
        *megatron_settings().values(),
    ]
    if setting.key != "plugins" and not setting.notes(Once) and InWords("JSON") not in setting.info.metadata
]


def values_of(setting: Setting) -> st.SearchStrategy[Any]:
    if setting.key in CHECKED:
        return CHECKED[setting.key]
    if any(isinstance(entry, InWords) for entry in setting.info.metadata):
        _, _, choices = setting.accepts.partition("one of ")
        return st.sampled_from([int(choice) for choice in choices.split(", ")]) if choices else st.integers(0, 10**9)
    return values(setting.info.annotation, setting.info.metadata)


def values(annotation: Any, metadata: Any = ()) -> st.SearchStrategy[Any]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        nested = [entry.metadata if isinstance(entry, FieldInfo) else [entry] for entry in arguments[1:]]
        return values(arguments[0], [entry for entries in nested for entry in entries])
    if origin in (Union, UnionType):
        return st.one_of(*(values(argument, metadata) for argument in arguments))
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, arguments))
    simple = {NoneType: st.none(), bool: st.booleans(), str: TEXT, Path: PATH, EvalDataset: DATASETS}
    return simple[annotation] if annotation in simple else numbers(annotation, metadata)


def numbers(kind: type, metadata: Any) -> st.SearchStrategy[Any]:
    adapter = TypeAdapter(Annotated[(kind, *metadata)] if metadata else kind)

    def is_accepted(value: Any) -> bool:
        with suppress(ValidationError):
            return adapter.validate_python(value) == value
        return False

    anything = (
        st.sampled_from([-1, 0, 1, 2]) | st.integers(0, 10**9) if kind is int else st.floats(0, 1) | st.floats(1, 1e300)
    )
    return anything.filter(is_accepted)


def chosen(draw: st.DrawFn) -> dict[str, tuple[Setting, Any]]:
    settings = draw(st.lists(st.sampled_from(UNDER_TEST), max_size=6, unique_by=lambda setting: setting.key))
    return {setting.key: (setting, draw(values_of(setting))) for setting in settings}


def as_flags(setting: Setting, value: Any) -> list[str]:
    match value:
        case None:
            return [f"{setting.flag}=none"]
        case bool():
            return [f"{setting.flag}={str(value).lower()}"]
        case tuple() if setting.is_pairs:
            return [word for name, path in value for word in (setting.flag, str(name), str(path))]
        case tuple():
            return [f"{setting.flag}={as_words(entry)}" for entry in value]
    return [f"{setting.flag}={value}"]


def as_toml(value: Any) -> Any:
    match value:
        case None:
            return "none"
        case Path():
            return str(value)
        case tuple():
            return list(map(as_toml, value))
        case EvalDataset():
            return {name: as_toml(entry) for name, entry in value if entry is not None}
    return value


@hypothesis_settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(picked=st.composite(chosen)())
def test_any_settings_are_the_same_as_flags_as_toml_and_written_again(
    picked: dict[str, tuple[Setting, Any]], tmp_path: Path
) -> None:
    picked = {key: (setting, value) for key, (setting, value) in picked.items() if value != ()}
    flags = [word for setting, value in picked.values() for word in as_flags(setting, value)]
    tables: dict[str, dict[str, Any]] = {}
    for setting, value in picked.values():
        tables.setdefault(setting.section, {})[setting.name] = as_toml(value)
    by_flags = load(flags, check_rules=False)
    for name, text in {"twin.toml": tomli_w.dumps(tables), "written.toml": to_toml(by_flags)}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert load(["--config", str(tmp_path / name)], check_rules=False).config == by_flags.config
    values = by_flags.values()
    assert {key: values[key][1] for key in picked} == {key: value for key, (_, value) in picked.items()}


# --- Examples ---------------------------------------------------------------------------------------------------------


EXAMPLES = Path(__file__).parents[3] / "examples"
TOML_FILES = sorted(path for path in EXAMPLES.rglob("*.toml") if path.name != "pyproject.toml")


def resolve(argv: list[str]) -> Resolved:
    seen = peek(argv)
    active = activate_line(seen)
    return load(argv, **active.for_load, check_rules=False)


@pytest.mark.parametrize("path", TOML_FILES, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_an_example_resolves(path: Path) -> None:
    assert resolve(["--config", str(path)]).config.run.plugins


def test_the_arithmetic_example_is_the_embedded_run_spelt_out() -> None:
    spelt_out = resolve(["--config", str(EXAMPLES / "arithmetic" / "run.toml")])
    embedded = resolve(["--plugin", "grpo"])
    assert (spelt_out.config, spelt_out.plugin_options) == (embedded.config, embedded.plugin_options)
