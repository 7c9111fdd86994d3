"""``--sglang-config FILE``: groups of engines and models beside the policy, in the YAML form that slime has for them.

    sglang:
      - name: actor                      # the first whose weights are updated is the policy
        num_gpus_per_engine: 2
        server_groups:                   # or engine_groups
          - {worker_type: regular, num_gpus: 4, overrides: {chunked_prefill_size: 4096}}
      - name: judge
        model_path: Qwen3-8B
        update_weights: false
        server_groups: [{worker_type: regular, num_gpus: 2}]

There, as in slime, ``rollout_num_gpus`` counts the GPUs of all models; what comes out of here counts the policy's
apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from slime_core.config.serving import EngineGroup, EngineModel
from slime_core.errors import ConfigError

__all__ = ["SlimeEngines", "read_slime_engines", "stand_ins"]

GROUPS = ("server_groups", "engine_groups")
SAY_THE_SAME = ("engine_groups", "engine_models", "prefill_num_servers", "rollout_external_engine_addrs")
NOT_BUILT = {
    "placeholder": "GPUs that nobody uses need not be reserved; leave the group out",
    "encoder": "encoders apart from their models are not built yet",
}


@dataclass(frozen=True, slots=True)
class SlimeEngines:
    """What the file says: groups of the policy's engines, and models beside it."""

    groups: tuple[EngineGroup, ...]
    models: tuple[EngineModel, ...]

    @property
    def of_policy(self) -> int:
        """GPUs of the policy's engines."""
        return sum(group.num_gpus for group in self.groups)

    @property
    def beside(self) -> int:
        """GPUs of all other models."""
        return sum(group.num_gpus for model in self.models for group in model.groups)

    @property
    def sum(self) -> str:
        """Both, and what they add up to."""
        return f"{self.of_policy} (policy) + {self.beside} (other models) = {self.of_policy + self.beside}"


def read_slime_engines(path: Path, *, policy: Path | None) -> SlimeEngines:
    """The file's groups and models.

    Arguments:
        policy: ``hf_checkpoint``; None: the embedded model. A model without ``model_path`` has this one.

    Raises:
        ConfigError: it cannot be read, is not of this form, or asks for what is not built; says where.
    """
    listed = [_Model(where, entry, path.parent, policy) for where, entry in _entries(path)]
    mine = [model for model in listed if model.is_updated]
    if len(mine) != 1:
        found = ", ".join(model.name for model in mine) or "none"
        raise ConfigError(
            f"--sglang-config {path}: the weights of one model are updated, the policy's; found {found}. Say "
            "update_weights: true for that one and false for the others."
        )
    others = tuple(model.beside() for model in listed if not model.is_updated)
    return SlimeEngines(mine[0].groups(sized=True), others)


def stand_ins(values: Mapping[str, Any]) -> dict[str, Any]:
    """What ``sglang_config`` among ``values`` says, as settings that stand in for it; empty: it is not there.

    Raises:
        ConfigError: the file is wrong, does not add up to ``rollout_num_gpus``, or another setting says the same.
    """
    path = values.get("sglang_config")
    if path is None:
        return {}
    twice = [name for name in SAY_THE_SAME if values.get(name)]
    if twice:
        raise ConfigError(f"--sglang-config {path} says what engines there are, and so does {twice[0]}; leave one out")
    found = read_slime_engines(path, policy=values.get("hf_checkpoint"))
    asked = values.get("rollout_num_gpus", found.of_policy + found.beside)
    if asked != found.of_policy + found.beside:
        raise ConfigError(
            f"--sglang-config {path}: its groups have {found.sum} GPUs, but rollout_num_gpus = {asked}, which counts "
            "those of all its models; make the two equal"
        )
    return {
        "engine_groups": found.groups,
        "engine_models": found.models,
        "rollout_num_gpus": found.of_policy,
        "sglang_config": None,
    }


def _entries(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"--sglang-config {path}: cannot be read: {error}. Give a YAML file.") from None
    models = found.get("sglang") if isinstance(found, Mapping) else None
    if not isinstance(models, list) or not models or not all(isinstance(one, Mapping) for one in models):
        raise ConfigError(f"--sglang-config {path}: accepted is a list of models under the key sglang; found none")
    for number, entry in enumerate(models):
        yield f"--sglang-config {path}: sglang[{number}]", entry


class _Model:
    """One entry of the list."""

    def __init__(self, where: str, entry: Mapping[str, Any], base: Path, policy: Path | None) -> None:
        known = {"name", "model_path", "update_weights", "num_gpus_per_engine", *GROUPS}
        _refuse_unknown(where, entry, known)
        self._where, self._entry = where, entry
        self.name = str(entry.get("name", ""))
        if not self.name:
            raise ConfigError(f"{where}: has no name; give each model one of its own")
        stated = entry.get("model_path")
        self._path = policy if stated is None else base / Path(str(stated)).expanduser()
        same = stated is None or (policy is not None and base / Path(str(stated)).expanduser() == policy)
        asked = entry.get("update_weights")
        self.is_updated = same if asked is None else bool(asked)
        if self.is_updated and not same:
            raise ConfigError(
                f"{where} ({self.name}): update_weights with model_path = {stated}, and the weights that the run "
                f"trains are those of hf_checkpoint = {policy}; leave model_path out, or say update_weights: false"
            )

    def groups(self, *, sized: bool) -> tuple[EngineGroup, ...]:
        """The groups; ``sized``: with the model's ``num_gpus_per_engine`` where they have none of their own."""
        listed: Sequence[Any] = next((self._entry[name] for name in GROUPS if self._entry.get(name)), ())
        if not listed:
            raise ConfigError(f"{self._where} ({self.name}): has no {' or '.join(GROUPS)}; say num_gpus in one of them")
        given = {"num_gpus_per_engine": self._entry.get("num_gpus_per_engine")} if sized else {}
        return tuple(self._group(number, given | dict(group)) for number, group in enumerate(listed))

    def beside(self) -> EngineModel:
        """As a model beside the policy."""
        if self._path is None:
            raise ConfigError(f"{self._where} ({self.name}): has no model_path, and the run names no --hf-checkpoint")
        size = self._entry.get("num_gpus_per_engine")
        return EngineModel(
            name=self.name, model_path=self._path, num_gpus_per_engine=size, engine_groups=self.groups(sized=False)
        )

    def _group(self, number: int, entry: Mapping[str, Any]) -> EngineGroup:
        where = f"{self._where} ({self.name}), group {number}"
        kind = str(entry.get("worker_type", "regular"))
        if kind in NOT_BUILT:
            raise ConfigError(f"{where}: worker_type = {kind}: {NOT_BUILT[kind]}")
        try:
            return EngineGroup.model_validate(dict(entry))
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            raise ConfigError(f"{where}: {name} = {first['input']!r}: {first['msg']}") from None


def _refuse_unknown(where: str, entry: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(set(map(str, entry)) - known)
    if unknown:
        raise ConfigError(f"{where}: knows no {', '.join(unknown)}; accepted: {', '.join(sorted(known))}")
