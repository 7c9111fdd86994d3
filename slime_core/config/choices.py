"""Which components and prompt formats the settings name, and where: what may activate a plugin that offers them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core.config.prompt_paths import PromptPath
from slime_core.config.reward_sum import reward_names
from slime_core.errors import DataError

__all__ = ["KIND_NAMED_BY", "PROMPT_FORMAT", "Choice", "NamedCode", "choices", "prompt_formats"]

KIND_NAMED_BY = {
    "generate_function": "generate_function",
    "rm_type": "reward_model",
    "sample_transforms": "sample_transform",
    "data_source": "data_source",
    "rollout_source": "rollout_source",
    "advantage_estimator": "advantage_estimator",
    "policy_loss": "policy_loss",
    "corrections": "correction",
}
"""Setting -> the kind of component that it names."""

PROMPT_FORMAT = "prompt_format"


@dataclass(frozen=True, slots=True)
class Choice:
    """A name that the settings give.

    Example: ``--corrections tis`` is ``Choice("correction", "tis", "--corrections")``.

    Arguments:
        kind: of component, as :class:`~slime_core.plugins.component.Kind` spells it, or :data:`PROMPT_FORMAT`.
        name: of the component, ``plugin:component``, or the prompt format.
        where: what names it, for messages.
    """

    kind: str
    name: str
    where: str


@dataclass(frozen=True, slots=True)
class NamedCode:
    """A function that an option of a plugin names by path.

    Example: ``--custom-rm-path mine.py`` is ``NamedCode("compat", "custom_rm_path", "--custom-rm-path", "mine.py")``.
    """

    plugin: str
    option: str
    flag: str
    path: str


def choices(
    values: Mapping[str, Any], origins: Mapping[str, str], *, prompts: Collection[str] = ()
) -> Iterator[Choice]:
    """Every component and prompt format that ``values`` (setting -> value) name.

    Arguments:
        origins: setting -> where its value comes from, for messages.
        prompts: settings of plugins whose paths are prompt files.
    """
    for setting, kind in KIND_NAMED_BY.items():
        for name in _names(setting, values.get(setting)):
            yield Choice(kind, name, origins.get(setting, setting))
    for one in values.get("eval_datasets") or ():
        for setting in ("generate_function", "rm_type"):
            for name in _names(setting, getattr(one, setting)):
                yield Choice(KIND_NAMED_BY[setting], name, f"{setting} of evaluation set {one.name}")
    for setting, path in _prompt_paths(values, prompts):
        for name in prompt_formats(path):
            yield Choice(PROMPT_FORMAT, name, origins.get(setting, setting))


def prompt_formats(path: Path) -> list[str]:
    """The formats that what ``path`` means could be of, each once; empty where it means nothing.

    Example: ``train.parquet@[:100]`` has the format ``parquet``.
    """
    try:
        return PromptPath.read(path).formats()
    except (DataError, OSError):
        return []


def _names(setting: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, tuple):
        return value
    return reward_names(value) if setting == "rm_type" else (value,)


def _prompt_paths(values: Mapping[str, Any], others: Collection[str]) -> Iterator[tuple[str, Path]]:
    if (path := values.get("prompt_data")) is not None:
        yield "prompt_data", path
    yield from ((setting, path) for setting in others for path in _paths_in(values.get(setting)))
    yield from (("eval_prompt_data", path) for _, path in values.get("eval_prompt_data") or ())
    yield from (("eval_datasets", one.path) for one in values.get("eval_datasets") or ())


def _paths_in(value: Any) -> Iterator[Path]:
    if isinstance(value, Path):
        yield value
    elif isinstance(value, tuple):
        yield from (path for one in value for path in _paths_in(one))
