"""One actor: started at its placement, watched, called through the methods of its class.

    Watched       the base class of everything that runs as an actor: answers even while it is busy
    control       marks further methods that do
    background    marks methods that run at the same time as others
    start_actor   the only place that creates actors
    Launch        its name, placement and environment variables
    Actor         a handle with the actor's class and its name in messages
    ActorGroup    several actors of one class, called as one
    Call          a method that was started, and on which actor
    keep_output   copies what a process prints and logs into a file
    uncollected   switches garbage collection off around large imports

A caller names the method itself, ``actor.start(LearnerActor.publish, 3)``: mypy checks the arguments and the
result, and an editor jumps to the code that runs. The class is imported for that on both sides, so its file imports
torch and the like inside methods only.

An actor answers the watchdog through separate "control" threads, once its constructor has returned. Therefore the
constructor runs in the main thread and all methods in one other thread, always the same. So keep constructors light;
load models, choose the CUDA device and set thread counts in a method, because these belong to the calling thread; and
install signal handlers in the constructor, because Python allows them in the main thread only.

An error of an actor is, on the driver, the SlimeError that the actor raised, or a RemoteError for any other failure.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import inspect
import json
import logging
import os
import re
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import CoroutineType, FrameType
from typing import Any, Concatenate, Generic, Never, ParamSpec, TextIO, TypeVar, overload

import ray
from ray._private import worker
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime_core import errors
from slime_core.config.secrets import EngineAccess, engine_access, set_engine_access
from slime_core.errors import NodeDied, ProcessDied, RemoteError, SlimeError
from slime_core.runtime.placement import ActorPlacement
from slime_core.runtime.progress import Progress
from slime_core.user_code.failures import PROCESS_LOG

TAIL_LINES = 15
"""Lines kept of a remote traceback: the innermost frames and the message."""

LAST_LINES, LAST_BYTES = 15, 64 * 1024
"""Lines and bytes that are reported of the output of a process that died."""

_PID = re.compile(r"^\s*pid: (\d+)$", re.MULTILINE)
_MARK = re.compile(r":\w+:\S*")
"""A line that Ray adds to the output of a process: the task of the next lines."""

_SEAL = re.compile(r"slime-error:([A-Za-z0-9+/=]+)")
_CLASSES: dict[str, type[SlimeError]] = {name: vars(errors)[name] for name in errors.__all__}
_NODE = re.compile(r"[Nn]ode has (crashed|died)|[Nn]ode was (terminated|marked dead)|[Rr]aylet (died|is terminated)")
"""Ray's message about an actor that is dead because a node of the cluster is (ray 2.60)."""

_CONSTRUCTOR = "error raised in its creation task"
"""Ray's message about an actor whose constructor raised an error (ray 2.60)."""

_UNEXPECTED = "unexpectedly"
"""Ray's word about a process that nobody ended on purpose (ray 2.60)."""

_CRASH = re.compile(r"\*\*\* (SIG[A-Z]+) received|Fatal Python error: Segmentation fault")
"""Output of the handlers of Ray and Python when a process crashes."""

_EXIT_CODE = re.compile(r"exit code[:=]? (-?\d+)")
_COMPLAINT = re.compile(r"error|exception|fatal|abort|terminate|traceback|assert|SIG[A-Z]{3}", re.IGNORECASE)

_LOST = (ActorUnavailableError, ObjectLostError, OutOfMemoryError, WorkerCrashedError)
"""Errors of Ray about a process that is gone, in addition to those of an actor that died."""

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class SealedError(RuntimeError):
    """A SlimeError of an actor's constructor as text, because Ray keeps only the text of errors of constructors.

    The text has the name of the class and the message; nothing in it can make this process run code. A class that is
    not in :mod:`slime_core.errors` becomes its nearest ancestor there.
    """

    @classmethod
    def seal(cls, error: SlimeError) -> SealedError:
        """Return ``error`` as text."""
        name = next(base.__name__ for base in type(error).__mro__ if base in _CLASSES.values())
        # Base64, because Ray puts the message into a longer text, sometimes quoted.
        return cls(f"slime-error:{base64.b64encode(json.dumps([name, str(error)]).encode()).decode()}")

    @staticmethod
    def open(text: str) -> SlimeError | None:
        """Return the error sealed somewhere in ``text``, if any."""
        sealed = _SEAL.search(text)
        if sealed is None:
            return None
        try:
            name, message = json.loads(base64.b64decode(sealed[1]))
            return _CLASSES[name](message)
        except (ValueError, TypeError, KeyError):  # not of our making
            return None


def local_error(error: RayError, *, who: str) -> SlimeError:
    """Return the SlimeError that ``who`` raised, with class and message, or a RemoteError with the end of the remote
    traceback: a ProcessDied if the process of ``who`` is gone, a NodeDied if its node or Ray is."""
    if isinstance(error, RayTaskError):
        return _from_task(error, who)
    if isinstance(error, LocalRayletDiedError | NodeDiedError) or _NODE.search(str(error)):
        logs = _logs()
        read = "" if logs is None else f" Ray's logs are in {logs} (raylet.out, raylet.err)."
        return NodeDied(
            f"Ray died: a node of the cluster is gone, its raylet process ended, and {who} with it. Often the kernel's "
            f"out-of-memory killer did it (see dmesg).{read}\n{_tail(str(error))}"
        )
    if isinstance(error, ActorDiedError):
        kind = RemoteError if _CONSTRUCTOR in str(error) else ProcessDied
        output = last_words(str(error), _logs())
        if kind is ProcessDied and _UNEXPECTED in str(error):
            return ProcessDied("\n".join([f"{who} died. {_cause_of_death(str(error), output)}", *_complaints(output)]))
        return SealedError.open(str(error)) or kind("\n".join([f"{who} died.", _tail(str(error)), *output]))
    if isinstance(error, GetTimeoutError):
        return RemoteError(f"{who} did not hand over its result in time.\n{_tail(str(error))}")
    kind = ProcessDied if isinstance(error, _LOST) else RemoteError
    return kind(f"{who} is lost ({type(error).__name__}).\n{_tail(str(error))}")


def _cause_of_death(message: str, output: Sequence[str]) -> str:
    """Return a sentence about the process in Ray's ``message``. Ray does not report the signal that ended a process. A
    process that crashes prints it, so a process that prints nothing got SIGKILL, or its code exited."""
    pid, text = _PID.search(message), "\n".join(output)
    process = "Its process" if pid is None else f"Its process {pid[1]}"
    if (crash := _CRASH.search(text)) is not None:
        return f"{process} crashed with {crash[1] or 'SIGSEGV'}."
    if (code := _EXIT_CODE.search(message)) is not None:
        return f"{process} exited with code {code[1]}."
    return (
        f"{process} was killed by SIGKILL, or exited without a word; often it was the kernel's out-of-memory killer "
        "(see dmesg)."
    )


def _complaints(output: Sequence[str]) -> Sequence[str]:
    """Return ``output`` if it mentions an error; the warnings of an ordinary process explain nothing."""
    return output if any(_COMPLAINT.search(line) for line in output[1:]) else ()


def last_words(message: str, logs: Path | None) -> list[str]:
    """Return the last lines of output of the process in ``message``; empty if there are none or it ran on another node.

    Arguments:
        message: Ray's, about an actor that died; it names the process.
        logs: Ray's folder with the output of its processes on this node; None if unknown.
    """
    pid = _PID.search(message)
    if pid is None or logs is None:
        return []
    for path in sorted(logs.glob(f"worker-*-{pid[1]}.err")):
        text = path.read_bytes()[-LAST_BYTES:].decode(errors="replace")
        lines = [line for line in text.splitlines() if line.strip() and not _MARK.fullmatch(line)]
        if lines:
            return [f"The last lines of {path}:", *(f"  {line}" for line in lines[-LAST_LINES:])]
    return []


def session_folder() -> Path | None:
    """Return the folder of Ray's session on this node, which outlives its processes; None outside Ray's processes."""
    node: Any = worker._global_node
    return None if node is None else Path(node.get_session_dir_path())


def _logs() -> Path | None:
    folder = session_folder()
    return None if folder is None else folder / "logs"


def _from_task(error: RayTaskError, who: str) -> SlimeError:
    cause = error.cause
    if isinstance(cause, SlimeError):
        return cause
    if isinstance(cause, RayError):  # the actor itself waited for another one that failed
        return local_error(cause, who=f"an actor that {who} called")
    return RemoteError(f"{who} failed with {type(cause).__name__}: {cause}\n{_tail(str(error))}")


def _tail(text: str) -> str:
    lines = _COLOURS.sub("", text).strip().splitlines()
    return "\n".join(f"    {line}" for line in lines[-TAIL_LINES:])


DEEPEST = 12
"""Innermost frames kept of one stack: enough to leave a library's event loop and reach its caller."""

SCAFFOLDING = ("/site-packages/ray/", "/threading.py", "/asyncio/runners.py", "/asyncio/base_events.py")
"""Files whose frames are left out, because every stack has them; a thread or task without other frames is idle."""


def process_stacks() -> str:
    """Return the stacks of all threads of this process, then of its asyncio tasks (see :func:`task_stacks`)."""
    return "\n".join(part for part in (thread_stacks(), task_stacks()) if part)


def thread_stacks() -> str:
    """Return the stack of every busy thread except the calling one, innermost frame last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    caller = threading.get_ident()
    frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != caller}
    stacks = {names.get(ident, str(ident)): _frames(frame) for ident, frame in frames.items()}
    return "\n".join(f"thread {name}:\n{stack}" for name, stack in stacks.items() if stack)


def task_stacks() -> str:
    """Return the stack of every unfinished asyncio task of the event loops that called :func:`show_tasks`; list tasks
    with the same stack once, with their number."""
    waiting: dict[str, list[str]] = {}
    for task in (task for loop in _LOOPS for task in asyncio.all_tasks(loop)):
        waiting.setdefault("".join(_suspended(task)).rstrip(), []).append(task.get_name())
    more = {stack: f" and {len(names) - 1} more like it" if len(names) > 1 else "" for stack, names in waiting.items()}
    return "\n".join(f"task {names[0]}{more[stack]}:\n{stack}" for stack, names in waiting.items() if stack)


_LOOPS: set[asyncio.AbstractEventLoop] = set()


def show_tasks() -> None:
    """From now on :func:`task_stacks` lists the tasks of the running event loop."""
    # Looking for tasks among gc.get_objects() would need no such call, but it makes the import of torch in another
    # thread fail: a reference to a tuple that is being filled makes tuple(generator) raise SystemError.
    _LOOPS.add(asyncio.get_running_loop())


def _suspended(task: asyncio.Task[Any]) -> Iterator[str]:
    waiting: object = task.get_coro()
    for _ in range(DEEPEST):
        frame = waiting.cr_frame if isinstance(waiting, CoroutineType) else None
        if frame is not None and _is_shown(frame.f_code.co_filename):
            yield _line(frame)
        waiting = _awaited(waiting)


def _awaited(waiting: object) -> object:
    # Ray runs an actor's coroutine inside a compiled one, which has no frame and awaits a wrapper (or a task) that only
    # the collector can look into.
    awaited: object = getattr(waiting, "cr_await", None)
    if awaited is None or isinstance(awaited, CoroutineType):
        return awaited
    return next((inner for inner in gc.get_referents(awaited) if isinstance(inner, CoroutineType)), awaited)


def _frames(frame: FrameType) -> str:
    shown = [entry for entry in traceback.extract_stack(frame) if _is_shown(entry.filename)]
    return "".join(traceback.format_list(shown[-DEEPEST:])).rstrip()


def _is_shown(filename: str) -> bool:
    return not any(part in filename for part in SCAFFOLDING)


def _line(frame: FrameType) -> str:
    info = inspect.getframeinfo(frame, context=1)
    source = "".join(info.code_context or ()).strip()
    return f'  File "{info.filename}", line {info.lineno}, in {info.function}\n    {source}\n'


A = TypeVar("A")
P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

Ref = ray.ObjectRef
"""``Ref[TrainBatch]``: a reference to an object in Ray's object store."""


def control(method: Callable[P, R]) -> Callable[P, R]:
    """Mark a method of an actor class that answers at once, whatever the actor's main thread does."""
    return _in_group("control", method)


def background(method: Callable[P, R]) -> Callable[P, R]:
    """Mark a method of an actor class that runs in a separate thread, at the same time as other methods."""
    return _in_group("background", method)


def _in_group(group: str, method: Callable[P, R]) -> Callable[P, R]:
    mark: Any = ray.method(concurrency_group=group)  # is annotated for methods without further arguments
    marked: Callable[P, R] = mark(method)
    return marked


class Watched:
    """Base of every actor class: its methods answer at once, whatever the actor's main thread does."""

    @control
    def stacks(self) -> str:
        """Return the stacks of every thread and task of the actor."""
        return f"process {os.getpid()} on {socket.gethostname()}\n{process_stacks()}"

    @control
    def progress(self) -> Progress | None:
        """Return the progress of the actor's current call; None if unknown."""
        return None

    @control
    def ping(self) -> int:
        """Return the process id of the actor."""
        return os.getpid()


W = TypeVar("W", bound=Watched)
W_co = TypeVar("W_co", bound=Watched, covariant=True)


@dataclass(frozen=True, slots=True)
class Actor(Generic[W_co]):
    """A handle that knows its class and its name, for example ``Actor(handle, "learner rank 0")``; survives
    pickling."""

    handle: ray.actor.ActorHandle[Any]
    label: str

    @overload
    def start(
        self,
        method: Callable[Concatenate[W_co, P], Coroutine[object, Never, R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Call[R]: ...

    @overload
    def start(self, method: Callable[Concatenate[W_co, P], R], /, *args: P.args, **kwargs: P.kwargs) -> Call[R]: ...

    def start(
        self, method: Callable[Concatenate[W_co, P], object], /, *args: P.args, **kwargs: P.kwargs
    ) -> Call[object]:
        """Start ``method``, for example ``LearnerActor.publish``, and return at once;
        :func:`~slime_core.runtime.waiting.wait` takes the result."""
        # Only here a remote method is looked up by name: Ray makes methods attributes of its handle.
        name = method.__name__
        return Call(getattr(self.handle, name).remote(*args, **kwargs), self.label, name, self)

    def kill(self) -> None:
        """End the process of the actor at once, whatever it does."""
        ray.kill(self.handle)


@dataclass(frozen=True, slots=True)
class Call(Generic[R_co]):
    """A started call: the reference to its result, its actor and method; without ``actor`` there are no stacks."""

    ref: Ref[R_co]
    who: str
    method: str
    actor: Actor[Watched] | None = None

    def __str__(self) -> str:
        return f"{self.who}: {self.method}()"


@dataclass(frozen=True, slots=True)
class ActorGroup(Generic[W_co]):
    """Actors in rank order; results have that order.

    Their methods are no coroutines.
    """

    actors: tuple[Actor[W_co], ...]

    def __len__(self) -> int:
        return len(self.actors)

    def __iter__(self) -> Iterator[Actor[W_co]]:
        return iter(self.actors)

    def __getitem__(self, rank: int) -> Actor[W_co]:
        return self.actors[rank]

    def start(self, method: Callable[Concatenate[W_co, P], R], /, *args: P.args, **kwargs: P.kwargs) -> list[Call[R]]:
        """Start ``method`` with the same arguments on every actor."""
        return [actor.start(method, *args, **kwargs) for actor in self.actors]

    def start_each(self, method: Callable[[W_co, A], R], arguments: Sequence[A], /) -> list[Call[R]]:
        """Start ``method`` on every actor with one of the ``arguments``.

        Raises:
            ValueError: the number of arguments is not that of actors.
        """
        return [actor.start(method, argument) for actor, argument in zip(self.actors, arguments, strict=True)]


@dataclass(frozen=True, slots=True)
class Launch:
    """The options with which an actor is started.

    Arguments:
        label: its name in messages, ``"engine 1"``.
        placement: its bundle, resources and environment. By default any node, without a core or a device.
        env: further environment variables of the process. Without any it starts in 0.2-0.5 s, otherwise in about 1 s.
        log: file that gets a copy of the output and the log records of its Python code, if any.
    """

    label: str
    placement: ActorPlacement | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    log: Path | None = None


def start_actor(launch: Launch, cls: Callable[P, W], /, *args: P.args, **kwargs: P.kwargs) -> Actor[W]:
    """Start ``cls(*args, **kwargs)``, a class of actors, in a new process and return at once."""
    placement = launch.placement
    variables = {**(placement.env if placement else {}), **launch.env}
    options: dict[str, Any] = {
        "num_cpus": placement.cpus if placement else 0,
        "num_gpus": placement.gpus if placement else 0,
    }
    if placement is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(placement.group, placement.bundle.index)
    if variables:
        options["runtime_env"] = {"env_vars": variables}
    as_actor: Any = ray.remote  # its annotations leave concurrency_groups out
    remote = as_actor(concurrency_groups={"control": 2, "background": 1})(_guarded(cls, launch.log))
    return Actor(remote.options(**options).remote(engine_access(), *args, **kwargs), launch.label)


@contextmanager
def uncollected(*, allocations: int | None = None) -> Iterator[None]:
    """Switch garbage collection off inside the block; objects that exist after it are never collected.

    For imports of torch, Megatron-core and transformers: their half a million objects stay, and collecting among them
    takes about a second of the start of a process.

    Arguments:
        allocations: containers that are allocated between two collections from then on; by default as many as before.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if allocations is not None:
            gc.set_threshold(allocations)
        gc.enable()


def keep_output(log: Path) -> None:
    """Copy to ``log`` what Python code of this process writes to stdout and stderr, and log records from INFO.

    Stdout and stderr still get the output, because Ray reports the last lines of a process that dies; and log records
    from WARNING. If the folder cannot be written, warn and change nothing, because a log must not end a run.
    """
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        file = log.open("a", encoding="utf-8", errors="backslashreplace", buffering=1)
    except OSError as problem:
        print(
            f"warning: {log} cannot be written ({problem}); it does not get what this process prints", file=sys.stderr
        )
        return
    records, warnings = logging.StreamHandler(file), logging.StreamHandler(sys.stderr)
    for handler in (records, warnings):
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    records.set_name(PROCESS_LOG)
    warnings.setLevel(logging.WARNING)
    logging.basicConfig(level=logging.INFO, handlers=[records, warnings], force=True)
    copied: Any = _Copied
    sys.stdout, sys.stderr = copied(sys.stdout, file), copied(sys.stderr, file)


class _Copied:
    """A text stream that also writes to ``file``."""

    def __init__(self, stream: TextIO, file: TextIO) -> None:
        self._stream = stream
        self._file = file

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):  # a full disk
            self._file.write(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _guarded(cls: Any, log: Path | None) -> type[Watched]:
    class Guarded(cls):  # type: ignore[misc]
        def __init__(self, access: EngineAccess, *args: Any, **kwargs: Any) -> None:
            if log is not None:
                keep_output(log)
            # An argument, not an environment variable: Ray logs those of its processes.
            set_engine_access(access)
            try:
                super().__init__(*args, **kwargs)
            except SlimeError as error:
                raise SealedError.seal(error) from error

    Guarded.__name__ = Guarded.__qualname__ = cls.__name__
    return Guarded
