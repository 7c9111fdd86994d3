"""``slime check``: everything that ``slime run`` looks at before it starts a process, and the plan it would follow.

Nothing is started and no file is written. What is wrong is an error with exit code 2; the plan is printed before the
verdict on this machine, so that a run that is meant for another one can be looked at here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from slime_core.cli.describe import because
from slime_core.cli.needs import Needs
from slime_core.cli.plan import placement_plan
from slime_core.cli.preflight import check_files, check_machine, print_warning
from slime_core.cli.run import continued, options_of, resumed, written
from slime_core.errors import ConfigError, PlacementError
from slime_core.plugins.manifest import listed
from slime_core.plugins.selection import check_targets, has_critic, selected
from slime_core.prompts.left_out import BadRows
from slime_core.runtime.machine import free_resources

if TYPE_CHECKING:
    from slime_core.config.load import Resolved
    from slime_core.plugins.activation import ActivePlugins

__all__ = ["USAGE", "execute"]

USAGE = """\
slime check CONFIG.toml [flags of slime run]
slime check [flags of slime run]

Says everything that slime run would find wrong, or what it would start where. Starts nothing, writes nothing."""


def execute(resolved: Resolved, active: ActivePlugins, *, architecture: str) -> int:
    """Print what was found right, and the plan; returns the exit code, 0.

    Raises:
        PluginError: a target cannot be imported or does not fit its contract, the checkpoint had other plugins, or an
            option cannot be written to config.toml.
        DataError: a prompt file, with file and line.
        ConfigError: the start weights, a checkpoint that cannot be continued, machines that cannot hold the run.
    """
    config = resolved.config
    check_targets(config, active.registry, trains=True, architecture=architecture, heavy=True)
    resume = resumed(config, active.registry)
    first = 0 if resume is None else resume.state.step
    left_out = check_files(
        config, active.registry, trains=True, first=first, options=resolved.plugin_options, warn=print_warning
    )
    continued(active.manifest, resume, allowed=config.run.allow_plugin_change, without=active.withheld.tables)
    options_of(resolved, active)
    written(resolved)
    needs = Needs.of(config, trains=True, critic=has_critic(config, active.registry))
    print(f"settings, {'prompts' if config.debug.generates else 'rollouts'} and weights are right")
    for line in _left_out(left_out):
        print(line)
    if resume is not None:
        print(f"continues from {resume.path}")
    print(f"plugins: {listed(active.manifest.entries)}")
    for line in _components(resolved, active, architecture):
        print(f"  {line}")
    print("\nplacement")
    for line in _plan(resolved, needs):
        print(f"  {line}")
    check_machine(config, needs)
    print("\nnothing was started; slime run with the same words starts it")
    return 0


def _left_out(mistakes: list[str]) -> Iterator[str]:
    if mistakes:
        bad = BadRows()
        for mistake in mistakes:
            bad.add(mistake)
        yield f"{len(mistakes)} rows, of those that were looked at, cannot be read and will be left out"
        yield from (f"  {line}" for line in bad.news())


def _plan(resolved: Resolved, needs: Needs) -> list[str]:
    try:
        return list(placement_plan(resolved.config, needs, free_resources()))
    except PlacementError as refused:  # a mistake in what was requested, since nothing runs yet
        raise ConfigError(f"{refused}") from refused


def _components(resolved: Resolved, active: ActivePlugins, architecture: str) -> Iterator[str]:
    for one in selected(resolved.config, active.registry, trains=True, architecture=architecture):
        yield f"{one.kind.words} {one.component.name} of {one.plugin.name}, {because(one, resolved)}"
