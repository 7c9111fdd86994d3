"""``--sglang-config FILE``: engine groups and auxiliary models, in slime's YAML format.

    sglang:
      - name: actor                      # the first whose weights are updated is the policy
        num_gpus_per_engine: 2
        server_groups:                   # or engine_groups
          - {worker_type: regular, num_gpus: 4, overrides: {chunked_prefill_size: 4096}}
      - name: judge
        model_path: Qwen3-8B
        update_weights: false
        server_groups: [{worker_type: regular, num_gpus: 2}]

As in slime, ``rollout_num_gpus`` then counts the GPUs of all models; the core's setting counts only the policy's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from slime_core.errors import ConfigError
from slime_core.provisional import DerivedSetting
from slime_core.types import JsonValue

__all__ = ["SlimeEngines", "derived_engines", "read_slime_engines"]

GROUPS = ("server_groups", "engine_groups")
SAY_THE_SAME = ("engine_groups", "engine_models", "prefill_num_servers", "rollout_external_engine_addrs")
NOT_BUILT = {
    "placeholder": "unused GPUs need not be reserved; leave the group out",
    "encoder": "separate encoders are not built yet",
}


@dataclass(frozen=True, slots=True)
class SlimeEngines:
    """The content of the file, as settings of the core.

    Arguments:
        groups: engine groups of the policy, as ``engine_groups``.
        models: auxiliary models, as ``engine_models``.
        of_policy: number of GPUs of the policy's engines.
        of_others: number of GPUs of the auxiliary models' engines.
    """

    groups: list[JsonValue]
    models: list[JsonValue]
    of_policy: int
    of_others: int

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of all engines."""
        return self.of_policy + self.of_others

    @property
    def sum(self) -> str:
        """Both numbers and their sum, as text for messages."""
        return f"{self.of_policy} (policy) + {self.of_others} (other models) = {self.num_gpus}"


Count = Annotated[int, Field(ge=1)]


class _ServerGroup(BaseModel):
    """One of a model's ``server_groups``; see the setting ``engine_groups`` of the core."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_gpus: Count
    num_gpus_per_engine: Count | None = None
    worker_type: Literal["regular", "prefill", "decode"] = "regular"
    overrides: dict[str, Any] = {}  # checked by the core


def read_slime_engines(path: Path, *, policy: Path | None) -> SlimeEngines:
    """Read the file's groups and models.

    Arguments:
        policy: ``hf_checkpoint``, the default of ``model_path``; None means the built-in model.

    Raises:
        ConfigError: the file cannot be read, is malformed, or requests something that is not built; the message names
            the place.
    """
    listed = [_Model(where, entry, path.parent, policy) for where, entry in _entries(path)]
    mine = [model for model in listed if model.is_updated]
    if len(mine) != 1:
        names = ", ".join(model.name for model in mine) or "none"
        raise ConfigError(
            f"--sglang-config {path}: the weights of one model are updated, the policy's; found {names}. Say "
            "update_weights: true for that one and false for the others."
        )
    others = [model for model in listed if not model.is_updated]
    groups = mine[0].groups(sized=True)
    return SlimeEngines(
        groups=[group.model_dump() for group in groups],
        models=[model.auxiliary() for model in others],
        of_policy=sum(group.num_gpus for group in groups),
        of_others=sum(group.num_gpus for model in others for group in model.groups(sized=False)),
    )


def derived_engines(path: Path, settings: Mapping[str, JsonValue]) -> Iterator[DerivedSetting]:
    """Yield the settings of the core that replace ``sglang_config``.

    Arguments:
        settings: settings of the core that the run gives.

    Raises:
        ConfigError: the file is wrong, does not add up to ``rollout_num_gpus``, or another setting duplicates it.
    """
    twice = [name for name in SAY_THE_SAME if settings.get(name)]
    if twice:
        raise ConfigError(f"--sglang-config {path} lists the engines, and {twice[0]} does too; leave one out")
    policy = settings.get("hf_checkpoint")
    engines = read_slime_engines(path, policy=Path(policy) if isinstance(policy, str) else None)
    num_gpus = settings.get("rollout_num_gpus", engines.num_gpus)
    if num_gpus != engines.num_gpus:
        raise ConfigError(
            f"--sglang-config {path}: its groups have {engines.sum} GPUs, but rollout_num_gpus = {num_gpus}, which "
            "counts those of all its models; make the two equal"
        )
    option = "sglang_config"
    yield DerivedSetting("engine_groups", engines.groups, option)
    yield DerivedSetting("engine_models", engines.models, option)
    yield DerivedSetting("rollout_num_gpus", engines.of_policy, option, given="replace")


def _entries(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"--sglang-config {path}: cannot be read: {error}. Give a YAML file.") from None
    models = content.get("sglang") if isinstance(content, Mapping) else None
    if not isinstance(models, list) or not models or not all(isinstance(model, Mapping) for model in models):
        raise ConfigError(f"--sglang-config {path}; accepted: a list of models under the key sglang; found none")
    for number, entry in enumerate(models):
        yield f"--sglang-config {path}: sglang[{number}]", entry


class _Model:
    """One entry of the list of models."""

    def __init__(self, where: str, entry: Mapping[str, Any], base: Path, policy: Path | None) -> None:
        names = {"name", "model_path", "update_weights", "num_gpus_per_engine", *GROUPS}
        _refuse_unknown(where, entry, names)
        self._where = where
        self._entry = entry
        self.name = str(entry.get("name", ""))
        if not self.name:
            raise ConfigError(f"{where}: has no name; give each model a name")
        stated = entry.get("model_path")
        self._path = policy if stated is None else base / Path(str(stated)).expanduser()
        same = stated is None or (policy is not None and base / Path(str(stated)).expanduser() == policy)
        updates = entry.get("update_weights")
        self.is_updated = same if updates is None else bool(updates)
        if self.is_updated and not same:
            raise ConfigError(
                f"{where} ({self.name}): update_weights with model_path = {stated}, and the weights that the run "
                f"trains are those of hf_checkpoint = {policy}; leave model_path out, or say update_weights: false"
            )

    def groups(self, *, sized: bool) -> tuple[_ServerGroup, ...]:
        """Return the groups; ``sized``: groups without ``num_gpus_per_engine`` get the model's."""
        listed: Sequence[Any] = next((self._entry[name] for name in GROUPS if self._entry.get(name)), ())
        if not listed:
            raise ConfigError(f"{self._where} ({self.name}): has no {' or '.join(GROUPS)}; say num_gpus in one of them")
        defaults = {"num_gpus_per_engine": self._entry.get("num_gpus_per_engine")} if sized else {}
        return tuple(self._group(number, defaults | dict(group)) for number, group in enumerate(listed))

    def auxiliary(self) -> JsonValue:
        """Return the model as an entry of the core's ``engine_models``."""
        if self._path is None:
            raise ConfigError(f"{self._where} ({self.name}): has no model_path, and the run names no --hf-checkpoint")
        return {
            "name": self.name,
            "model_path": str(self._path),
            "num_gpus_per_engine": self._entry.get("num_gpus_per_engine"),
            "engine_groups": [group.model_dump() for group in self.groups(sized=False)],
        }

    def _group(self, number: int, entry: Mapping[str, Any]) -> _ServerGroup:
        where = f"{self._where} ({self.name}), group {number}"
        kind = str(entry.get("worker_type", "regular"))
        if kind in NOT_BUILT:
            raise ConfigError(f"{where}: worker_type = {kind}: {NOT_BUILT[kind]}")
        try:
            return _ServerGroup.model_validate(dict(entry))
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            raise ConfigError(f"{where}: {name} = {first['input']!r}: {first['msg']}") from None


def _refuse_unknown(where: str, entry: Mapping[str, Any], names: set[str]) -> None:
    unknown = sorted(set(map(str, entry)) - names)
    if unknown:
        raise ConfigError(f"{where}: knows no {', '.join(unknown)}; accepted: {', '.join(sorted(names))}")
