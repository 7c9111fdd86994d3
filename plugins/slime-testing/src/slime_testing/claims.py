"""Compares the entry points of a distribution, which claim components, with the components that its plugin declares."""

from __future__ import annotations

from importlib import metadata

from slime_core import Flag, Kind, ModelSpecTraits
from slime_core.harness import ActivePlugin, PluginIdentity

__all__ = ["broken_claims", "unclaimed"]

MODELS, FLAGS = "slime.models", "slime.flags"

GROUPS = {
    Kind.ADVANTAGE_ESTIMATOR: "slime.advantage_estimators",
    Kind.POLICY_LOSS: "slime.policy_losses",
    Kind.CORRECTION: "slime.corrections",
    Kind.REWARD_MODEL: "slime.reward_models",
    Kind.SAMPLE_TRANSFORM: "slime.sample_transforms",
    Kind.GENERATE_FUNCTION: "slime.generate_functions",
    Kind.DATA_SOURCE: "slime.data_sources",
    Kind.ROLLOUT_SOURCE: "slime.rollout_sources",
}
"""Kind of component -> entry point group in which distributions claim the names of such components."""


def broken_claims(active: ActivePlugin) -> list[str]:
    """Return one message for each name that the plugin's distribution claims but the plugin does not declare."""
    claims = _claimed(active.identity)
    return [
        f'[project.entry-points."{group}"] claims {name}, which the plugin does not declare'
        for group, declared in _declared(active).items()
        for name in sorted(claims.get(group, set()) - declared)
    ]


def unclaimed(active: ActivePlugin) -> list[str]:
    """Return one message for each declared name without a claim: using such a name does not activate the plugin."""
    claims = _claimed(active.identity)
    return [
        f'{name} is not claimed: [project.entry-points."{group}"] {name} = "{active.identity.name}"'
        for group, declared in _declared(active).items()
        for name in sorted(declared - claims.get(group, set()))
    ]


def _claimed(plugin: PluginIdentity) -> dict[str, set[str]]:
    """Return entry point group -> names that the plugin's own distribution claims for it."""
    found: dict[str, set[str]] = {}
    for point in metadata.distribution(plugin.distribution).entry_points:
        if point.value.partition(":")[0] == plugin.name:
            found.setdefault(point.group, set()).add(point.name)
    return found


def _declared(active: ActivePlugin) -> dict[str, set[str]]:
    """Return entry point group -> names that the plugin declares; prompt formats need no claim."""
    found: dict[str, set[str]] = {group: set() for group in (*GROUPS.values(), MODELS, FLAGS)}
    for kind, name in active.offers:
        traits = active.component(kind, name).traits
        if kind in GROUPS:
            found[GROUPS[kind]].add(name)
        elif isinstance(traits, ModelSpecTraits):
            found[MODELS] |= traits.architectures
    options = active.default_options()
    for info in type(options).model_fields.values() if options is not None else ():
        found[FLAGS] |= {entry.name.removeprefix("--") for entry in info.metadata if isinstance(entry, Flag)}
    return found
