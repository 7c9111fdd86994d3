"""``slime run``: creates the run folder, prints progress, and trains.

A resume with other plugins than those that wrote the checkpoint is refused, unless a flag allows it
(:func:`check_plugins`). A run that is refused leaves no files (:func:`no_trace_if_refused`).
"""

from __future__ import annotations

import gc
import json
import shlex
import shutil
import signal
import sys
import time
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from slime_core.checkpoint.folder import Checkpoint, RunState, critic_part, find, newest, set_aside
from slime_core.cli.labels import LabelSamples, check_labels
from slime_core.cli.memory import Needs, chosen
from slime_core.cli.preflight import check_files, check_machine, check_resume, precision, print_warning
from slime_core.cli.progress import Progress, summary
from slime_core.components.construction import construct, prepare_options, run_view
from slime_core.components.selection import check_targets, has_critic
from slime_core.config.explain import to_toml
from slime_core.config.model_config import architecture_of
from slime_core.config.schema import RunConfig
from slime_core.config.settings import as_toml
from slime_core.contracts import Tracker
from slime_core.errors import (
    DEATHS,
    ConfigError,
    ManifestMismatch,
    PlacementError,
    PluginError,
    RunError,
    UserError,
    table,
)
from slime_core.plugins.discovery import is_path
from slime_core.plugins.manifest import MISSING, Manifest
from slime_core.plugins.registration import Kind
from slime_core.track.record import PRIVATE, RunRecord, numbered
from slime_core.track.tensorboard import TensorBoard
from slime_core.track.track import Track

if TYPE_CHECKING:
    from slime_core.config.load import Resolved
    from slime_core.plugins.activation import ActivePlugins
    from slime_core.plugins.registry import Registry


OUTPUTS = Path("outputs")
"""Folder of new run folders, in the working directory, if ``output_dir`` is not set."""


def execute(resolved: Resolved, active: ActivePlugins) -> int:
    """Train, and restart after deaths (:class:`RunRestarts`); return the exit code."""
    signal.signal(signal.SIGTERM, _as_interrupt)
    check_targets(resolved.config, active.registry, trains=True, architecture=None)
    started_s = time.monotonic()
    restarts = RunRestarts(resolved.config.run.max_restarts, total=resolved.config.rollout.num_rollout)
    progress = Progress(steps=resolved.config.rollout.num_rollout, shown=resolved.config.run.progress)
    record, death = _train(resolved, active, progress)
    while death is not None:
        # Handles of Ray's actors in the frames of the error must be gone before another cluster starts.
        death = type(death)(str(death))
        gc.collect()
        try:
            resolved = restarts.after(death, resolved, record.directory)
        except KeyboardInterrupt:  # in the pause
            print(how_to_continue(record.directory, resolved.config, total=restarts.total), file=sys.stderr, flush=True)
            raise
        record, death = _train(resolved, active, progress, restarts=True)
    seconds = time.monotonic() - started_s
    summary(start=progress.first, end=progress.last, seconds=seconds, paths=paths(record, _commands(active)))
    return 0


def _train(
    resolved: Resolved, active: ActivePlugins, progress: Progress, *, restarts: bool = False
) -> tuple[RunRecord, RunError | None]:
    """Start the run once. Return its folder, unlocked, and the death that ended it; None if it is complete.

    Arguments:
        restarts: continue in the folder of an earlier start.
    """
    config = resolved.config
    resume = resumed(config, active.registry)
    check_plugins(active.manifest, resume, allowed=config.run.allow_plugin_change, without=active.without)
    step = 0 if resume is None else resume.state.step
    labels = None if restarts else LabelSamples()
    check_files(config, active.registry, trains=True, first=step, options=resolved.plugin_options, labels=labels)
    check_machine(config, Needs.of(config, trains=True, critic=has_critic(config, active.registry)))
    options = options_of(resolved, active)
    check_resume(config, resume)
    if labels is not None:
        check_labels(labels, config, active.registry, active.manifest, options=options, warn=print_warning)
    is_new = config.run.output_dir is None or not config.run.output_dir.exists()
    settings = to_toml(resolved)
    changes = () if restarts else tuple(changed_settings(resume, settings))
    record = open_record(config, resume, restarts=restarts)
    plugins = active.manifest.to_json() + "\n"
    record.when_begun(partial(record.write_text, "config.toml", settings))
    record.when_begun(partial(record.write_text, "plugins.json", plugins))
    # This import takes a second, so the checks of settings come first.
    from slime_core.launch import Job, run

    job = Job(
        config=config,
        registry=active.registry,
        manifest=active.manifest,
        architecture=architecture_of(config.model.hf_checkpoint) or "",
        logs=record.logs,
        samples=record.samples,
        options=options,
        resumed_step=step,
    )
    try:
        _announce(record, active, resolved)
        for change in changes:
            print(change, flush=True)
        with no_trace_if_refused(record, is_new=is_new):
            view = run_view(config, options, model_folder=job.model, folder=job.folder, resumed_step=step)
            names = active.registry.names(Kind.TRACKER)
            trackers: dict[str, Tracker] = {
                name: construct(active.registry, Kind.TRACKER, name, options, view) for name in names
            }
            board = {"tensorboard": TensorBoard(record.tensorboard, resumed_step=record.resumed_step)}
            with progress, Track(record, trackers=board | trackers, run=view, listeners=[progress]) as track:
                run(job, track=track, resume=resume)
    except DEATHS as death:
        record.release()
        return record, death
    except KeyboardInterrupt:
        print(how_to_continue(record.directory, config, total=config.rollout.num_rollout), file=sys.stderr, flush=True)
        raise
    return record, None


def options_of(resolved: Resolved, active: ActivePlugins) -> dict[str, Any]:
    """Return the options that components and hooks of each plugin receive; see :func:`prepare_options`."""
    return prepare_options(resolved.config, active.registry, resolved.plugin_options, active.functions)


def _commands(active: ActivePlugins) -> set[str]:
    """Return the commands that plugins add."""
    return {name for entry in active.loaded.loaded.values() for name in entry.added.commands}


def paths(record: RunRecord, commands: Collection[str]) -> list[tuple[str, Path]]:
    """Return label and path of the run's files that exist.

    Arguments:
        commands: the commands that plugins add.
    """
    files = {
        "metrics": record.metrics,
        "samples": record.samples,
        "checkpoint": record.checkpoints,
        "curves": record.directory / "curves.svg",
        "report": record.directory / "report.html",
    }
    existing = [(label, path) for label, path in files.items() if _holds_something(path)]
    if _holds_something(record.tensorboard):
        existing.append(("TensorBoard", Path(f"tensorboard --logdir {record.tensorboard}")))
    if not _holds_something(files["report"]) and "report" in commands:
        existing.append(("report", Path(f"slime report {record.directory}")))
    return [("run", record.directory), *existing]


def _holds_something(path: Path) -> bool:
    if path.is_dir():
        return next(path.glob("[!.]*"), None) is not None
    return path.is_file() and path.stat().st_size > 0


def how_to_continue(folder: Path, config: RunConfig, *, total: int) -> str:
    """Return the newest checkpoint of an interrupted run, and the command that continues it."""
    checkpoint = newest(folder / "checkpoints")
    if checkpoint is None:
        return f"slime: nothing is saved; {folder} has no checkpoint, so the next start begins at the first step."
    saved = f"slime: saved: {checkpoint.path} (step {checkpoint.state.step} of {total})."
    if checkpoint.state.step >= total:
        return f"{saved} All rollouts are trained; measure them with: slime eval {folder}"
    command = ["slime run --load", shlex.quote(str(folder))]
    if any(map(is_path, config.run.plugins)):
        command.append(f"--plugin {shlex.join(config.run.plugins)}")
    for option, path in (code.split(" = ", 1) for code in config.of_plugins.code):
        command.append(f"--{option.replace('_', '-')} {shlex.quote(path)}")
    if config.model.trust_remote_code:
        command.append("--trust-remote-code")
    return f"{saved} Continue with: {' '.join(command)}"


def open_record(config: RunConfig, resume: Checkpoint | None, *, restarts: bool = False) -> RunRecord:
    """Return the run folder: the requested one, that of the resumed run, or a new one.

    A run that resumes in its folder goes back to the checkpoint when it begins: it deletes later rows, and sets later
    checkpoints aside.

    Arguments:
        restarts: the requested folder is that of an earlier start of this run. Without ``resume``, all rows go.

    Raises:
        ConfigError: the folder has other files, or cannot be written.
    """
    requested, home = config.run.output_dir, resume.home if resume is not None else None
    if restarts and requested is not None:
        with writing(requested) as folder:
            state = RunState() if resume is None else resume.state
            return RunRecord(folder, resumed_step=state.step, row=state.row)
    if resume is None or home is None or (requested is not None and requested.resolve() != home.resolve()):
        with writing(requested or _new_folder(config.run.job_name)) as folder:
            return RunRecord(folder)
    with writing(requested or home) as folder:
        record = RunRecord(folder, resumed_step=resume.state.step, row=resume.state.row)
    record.when_begun(partial(_go_back, record, resume.state.step))
    return record


def _go_back(record: RunRecord, step: int) -> None:
    for path in set_aside(record.checkpoints, after=step):
        print(f"set aside, because the run goes back to step {step}: {path}")


def _new_folder(job_name: str) -> Path:
    """Create and return a new folder; runs that start in the same second get different ones."""
    for folder in numbered(OUTPUTS / f"{job_name}-{datetime.now():%Y%m%d-%H%M%S}"):
        with writing(folder), suppress(FileExistsError):
            folder.mkdir(mode=PRIVATE, parents=True)
            return folder
    raise AssertionError("numbers do not end")


def resumed(config: RunConfig, registry: Registry) -> Checkpoint | None:
    """Return the checkpoint from which the run resumes, or None.

    Raises:
        ConfigError: ``load`` has no checkpoint, or all rollouts are done.
        CheckpointError: the run trains a critic, and the checkpoint has none.
    """
    if config.model.load is None:
        return None
    checkpoint = find(config.model.load)
    total, done = config.rollout.num_rollout, checkpoint.state.step
    if total <= done:
        raise ConfigError(
            f"num_rollout = {total}, and {checkpoint.path} has done {done}. Give --num-rollout more than {done}, or "
            "load an earlier checkpoint."
        )
    if has_critic(config, registry):
        critic_part(checkpoint.path)
    return checkpoint


NOT_OF_THE_RUN = frozenset({"model.load", "run.output_dir"})
"""Settings that every resume changes."""


def changed_settings(resume: Checkpoint | None, settings: str) -> Iterator[str]:
    """Yield a line for each setting that differs from the run that wrote ``resume``.

    Arguments:
        settings: those of this start, from :func:`to_toml`.
    """
    home = None if resume is None else resume.home
    if resume is None or home is None:
        return
    try:
        before = tomllib.loads((home / "config.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # edited or damaged; the settings of this start are checked anyway
    old, new = _by_key(before), _by_key(tomllib.loads(settings))
    for key in sorted((old.keys() | new.keys()) - NOT_OF_THE_RUN):
        if old.get(key) != new.get(key):
            yield f"changed since {resume.path.name}: {key}: {_shown(old.get(key))} -> {_shown(new.get(key))}"


def _by_key(tables: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{section}.{name}": value
        for section, table in tables.items()
        if isinstance(table, dict)
        for name, value in table.items()
    }


def _shown(value: object) -> str:
    return "not set" if value is None else as_toml(value)


def _announce(record: RunRecord, active: ActivePlugins, resolved: Resolved) -> None:
    print(f"plugins: {active.manifest}")
    print(precision(resolved))
    for line in chosen(resolved):
        print(line)
    if (half := half_of(resolved.config)) is not None:
        print(half)
    print(f"run folder: {record.directory}", flush=True)
    if record.lock_warning:
        print(f"warning: {record.lock_warning}", flush=True)


def _as_interrupt(signum: int, frame: FrameType | None) -> None:
    # SIGTERM of a scheduler ends the run like Ctrl-C.
    raise KeyboardInterrupt


def check_plugins(
    manifest: Manifest, resume: Checkpoint | None, *, allowed: bool, without: Collection[str] = ()
) -> None:
    """Raise ManifestMismatch if the plugins differ from those that wrote the checkpoint.

    A change of the core counts like that of a plugin, because it may change a step.

    Arguments:
        manifest: the plugins of this start.
        resume: the checkpoint from which the run starts; None for the beginning.
        allowed: warn instead.
        without: plugins that ``--no-plugin`` leaves out, which may always be missing.

    Raises:
        ManifestMismatch: with a table of the differences.
        ConfigError: ``allowed``, and nothing is resumed.
    """
    if resume is None:
        if allowed:
            raise ConfigError("allow_plugin_change = true without a resume; add --load RUN, or leave it out.")
        return
    try:
        before = Manifest.from_json(json.dumps(resume.state.plugins))
    except PluginError:  # nothing is recorded, or by an earlier version of slime
        before = Manifest(())
    differences = before.differences(manifest)
    if not differences:
        return
    shown = table(differences, head=("plugin", resume.path.name, "now"))
    excused = [entry for entry in differences if entry.actual == MISSING and entry.name in without]
    if not allowed and excused != differences:
        raise ManifestMismatch(
            f"{resume.path} was written with other plugins than would run now:\n{shown}\n"
            "Install those plugins, or continue with the current ones: --allow-plugin-change."
        )
    print_warning(f"{resume.path.name} was written with other plugins:\n{shown}")


@contextmanager
def writing(folder: Path) -> Iterator[Path]:
    """Turn an OSError of the block, which writes into ``folder``, into a ConfigError."""
    try:
        yield folder
    except OSError as problem:
        raise ConfigError(
            f"output_dir: {folder} cannot be written: {problem}. Give a folder on a disk with room that this user may "
            "write, with --output-dir."
        ) from problem


@contextmanager
def no_trace_if_refused(record: RunRecord, *, is_new: bool) -> Iterator[None]:
    """Delete a new run folder without results if the block raises a mistake of the user. After other failures the
    folder stays, for its logs.

    Arguments:
        is_new: the folder was created for this run.
    """
    try:
        yield
    except (UserError, PlacementError):
        has_rows = record.metrics.exists() and record.metrics.stat().st_size > 0
        if is_new and record.resumed_step is None and not has_rows and not any(record.checkpoints.iterdir()):
            shutil.rmtree(record.directory, ignore_errors=True)
            with suppress(OSError):  # it has other runs
                OUTPUTS.rmdir()
        raise


def half_of(config: RunConfig) -> str | None:
    """Return a line if the run only generates or only trains, or None."""
    if not config.debug.trains:
        return "debug_rollout_only: no learner is started; engines serve the start weights"
    if not config.debug.generates:
        path = config.debug.load_debug_rollout_data
        return f"debug_train_only: no engine and no router is started; rollouts are read from {path}"
    return None


# --- Restarts ---------------------------------------------------------------------------------------------------------

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""First and longest pause before a restart, in seconds; it doubles with each restart."""


@dataclass(slots=True)
class RunRestarts:
    """Restarts of a run since its newest checkpoint, after a process, a node or Ray died.

    A restart works like ``slime run --load RUN_FOLDER``, after all processes of the run have ended. Without a
    checkpoint the run starts from its beginning, in the same folder.

    With the default of three restarts, a run survives a temporary cause (a preempted node, another job that took the
    memory), and a permanent cause (a rollout that does not fit) ends it within minutes. A new checkpoint resets the
    count, so that a run of weeks survives any number of temporary causes.

    Arguments:
        limit: restarts without a new checkpoint, after which the next death ends the run.
        total: rollouts of the run.
        sleep: waits for a number of seconds.
    """

    limit: int
    total: int
    sleep: Callable[[float], None] = time.sleep
    _count: int = field(default=0, init=False)
    _step: int = field(default=0, init=False)

    def after(self, death: RunError, resolved: Resolved, folder: Path) -> Resolved:
        """Pause, and return the settings of the next start.

        Arguments:
            death: the error that ended the run.
            resolved: the settings of the run.
            folder: the run folder.

        Raises:
            RunError: ``death`` with the next step, after too many restarts or after the last rollout.
        """
        checkpoint = newest(folder / "checkpoints")
        step = 0 if checkpoint is None else checkpoint.state.step
        self._count = 0 if step > self._step else self._count
        self._step = step
        if step >= self.total or self._count >= self.limit:
            raise type(death)(f"{death}\n{self._ending(checkpoint, folder)}") from death
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**self._count)
        self._count += 1
        start = f"continues from {checkpoint.path.name}" if checkpoint else "has no checkpoint and starts again"
        restart = (
            f"slime: restart {self._count} of {self.limit} in {pause_s:g} s: the run {start}. "
            f"{self.limit - self._count} restarts remain until the next checkpoint (--max-restarts)."
        )
        is_line = "\n" not in f"{death}"
        print(f"{restart} Cause: {death}" if is_line else f"slime: {death}\n{restart}", file=sys.stderr, flush=True)
        self.sleep(pause_s)
        config = resolved.config
        model = config.model if checkpoint is None else config.model.model_copy(update={"load": folder})
        run = config.run.model_copy(update={"output_dir": folder})
        return replace(resolved, config=config.model_copy(update={"model": model, "run": run}))

    def _ending(self, checkpoint: Checkpoint | None, folder: Path) -> str:
        if checkpoint is not None and checkpoint.state.step >= self.total:
            return f"All rollouts are trained and saved in {checkpoint.path}; measure them with: slime eval {folder}"
        next_step = f"Continue from step {self._step} with --load {folder}." if checkpoint else "It has no checkpoint."
        return f"The run ends after {self._count} restarts without a new checkpoint (--max-restarts). {next_step}"
