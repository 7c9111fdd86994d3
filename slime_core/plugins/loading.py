"""Imports the code of a plugin, the target of a component, and a function that an option names by path.

:func:`boundary` is the one place that catches everything: a plugin's failure leaves it as our error, with the plugin's
name on it.

Forms of a path of a function: ``package.module.function`` and ``package.module:function``; ``file.py:function``; and
``file.py`` or ``package.module:`` for a module in which only one thing fits. A file travels as bytes, like a
single-file plugin, and with it the modules of its folder that it imports.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import os
import pkgutil
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial, reduce
from importlib import metadata
from importlib.abc import InspectLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from slime_core.errors import PluginError, SlimeError, nearest
from slime_core.plugins.component import Component
from slime_core.plugins.discovery import (
    LOCAL_MODULE,
    OUR_DISTRIBUTIONS,
    PluginIdentity,
    PluginSource,
    Source,
    local_file,
    module_identity,
    read_code,
)
from slime_core.plugins.neighbours import find_neighbours, scoped_builtins


@contextmanager
def boundary(
    who: object,
    action: str,
    *,
    error: type[SlimeError] = PluginError,
    next_step: str | Callable[[BaseException], str] = "",
    locate: bool = False,
    passes: tuple[type[SlimeError], ...] = (),
) -> Iterator[None]:
    """Whatever the block raises comes out as ``error``, saying who failed at what; cancellation passes through.

    Arguments:
        who: printed first; a ``PluginIdentity`` prints as name, distribution, version and entry point.
        action: what was going on, such as ``"importing it"``.
        error: what is raised, chained to the plugin's own exception.
        next_step: advice to the user; a function of the exception if it depends on the exception.
        locate: also say where in the user's code it was raised, and in which log its traceback is; not of an error of
            ours, which says what is wrong itself.
        passes: what the block may raise as it is, such as ``(SlimeError,)`` where the core's own code runs in it.
    """
    try:
        yield
    except passes:
        raise
    # SystemExit: a plugin that leaves while it is imported would end the run as if it had succeeded.
    except BaseException as failure:
        if _is_cancellation(failure):
            raise
        from slime_core.config.secrets import without_queries  # loads pydantic, which listing plugins does without

        text = f"{who}: {action} failed with {type(failure).__name__}: {without_queries(str(failure))}"
        step = next_step if isinstance(next_step, str) else next_step(failure)
        if locate and not isinstance(failure, SlimeError):
            place = place_of(failure)
            text = " ".join(filter(None, (text, place)))
            step = "\n".join(filter(None, (step, log_traceback(text, failure, place))))
        raise error(f"{text}\n{step}".rstrip()) from failure


def _is_cancellation(failure: BaseException) -> bool:
    from asyncio import CancelledError  # here: it takes longer to import than the rest of this package

    return isinstance(failure, KeyboardInterrupt | CancelledError | GeneratorExit)


def place_of(failure: BaseException) -> str:
    """``(FILE:LINE, in FUNCTION)`` of the innermost frame of the user's code, not of the libraries that it calls.

    Without a file of the user, the innermost frame of the package that slime called. Empty if the import itself failed,
    or if the error names its place.

    Example: ``(mine.py:3, in reward)``; of a line outside of functions ``(./mine.py:3)``.
    """
    if isinstance(failure, SyntaxError):
        return ""
    frames = traceback.extract_tb(failure.__traceback__)
    first = max((number for number, one in enumerate(frames, 1) if one.filename == _LOADING), default=0)
    called = [one for one in frames[first:] if not one.filename.startswith(_IMPORTS)]
    packages = [_package_of(one.filename) for one in called]
    outside = [package for package in packages if package is not None and package not in _our_packages()]
    user = "" if "" in outside else next(iter(outside), packages[-1] if packages else None)
    own = [one for one, package in zip(called, packages, strict=True) if package == user]
    if not own:
        return ""
    function = "" if own[-1].name == "<module>" else f", in {own[-1].name}"
    return f"({own[-1].filename}:{own[-1].lineno}{function})"


def _package_of(file: str) -> str | None:
    """Return the package of a library's file; empty: a file of the user. None: a file of Python itself."""
    path = os.path.abspath(file)
    for folder in _LIBRARIES:
        if path.startswith(folder + os.sep):
            return path[len(folder) + 1 :].split(os.sep)[0].removesuffix(".py")
    if file.startswith("<frozen") or path.startswith(_PYTHON + os.sep):
        return None
    if path.startswith(_CORE + os.sep):
        return "slime_core"
    parts = path.split(os.sep)
    return next((part for part in parts if part in _our_packages()), "")


def describe(failure: Exception) -> str:
    """Return type, message and place of an exception of the user's code, and the log that has its traceback.

    Example: ``KeyError: 'gone' (mine.py:3, in solve). The traceback is in outputs/run-1/logs/sampler.log.``
    """
    text = f"{type(failure).__name__}: {failure}"
    if isinstance(failure, SlimeError) or failure.__traceback__ is None:
        return text
    place = place_of(failure)
    text = " ".join(filter(None, (text, place)))
    log = log_traceback(text, failure, place)
    return f"{text}. {log}" if log else text


def log_traceback(what: str, failure: BaseException, place: str) -> str:
    """Write the traceback of ``failure`` into the log of this process, the first time that ``place`` raises its type.

    Returns:
        A sentence that names the log; empty if the process has none.
    """
    logger = logging.getLogger(__name__)
    if (type(failure), place) not in _LOGGED:
        _LOGGED.add((type(failure), place))
        logger.info("%s", what, exc_info=failure)
    for handler in (*logger.handlers, *logging.getLogger().handlers):
        if handler.name == PROCESS_LOG and isinstance(handler, logging.StreamHandler):
            return f"The traceback is in {handler.stream.name}."
    return ""


def tracebacks_into(log: Path) -> None:
    """From now on ``log`` gets the tracebacks of failures of plugins in this process."""
    handler = logging.FileHandler(log, encoding="utf-8", delay=False)
    handler.set_name(PROCESS_LOG)
    logger = logging.getLogger(__name__)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


_LOGGED: set[tuple[type[BaseException], str]] = set()
PROCESS_LOG = "log of the process"
"""Name of the log handler that writes into a file of the run folder."""

_PYTHON = os.path.dirname(os.__file__)
_LIBRARIES = tuple(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))
_CORE = str(Path(__file__).parents[1])


@cache
def _our_packages() -> frozenset[str]:
    return frozenset({"slime_core", *(name.replace("-", "_") for name in OUR_DISTRIBUTIONS)})


_IMPORTS = ("<frozen importlib", importlib.__file__)
_LOADING = str(Path(__file__))
"""The caller of plugins' imports; the frames after it are those of the plugin."""


def load_plugin(source: PluginSource) -> object:
    """Import the module or object that holds the plugin's hooks.

    Raises:
        PluginError: importing it failed; chained, naming distribution, version, entry point and the next step.
    """
    with boundary(source.plugin, "importing it", next_step=partial(_entry_point_step, source.plugin), locate=True):
        if source.source is Source.FILE:
            return _module_of_bytes(source)
        holder: object = load_attribute(source.plugin.entry_point)
        return holder


def _entry_point_step(plugin: PluginIdentity, failure: BaseException) -> str:
    """Advice about a plugin that cannot be imported. If the entry point names something that is not there, it is the
    entry point that is wrong: the advice names the module or object that looks meant."""
    if plugin.distribution.startswith("module "):  # named by the run, not by an entry point
        return _next_step(plugin)
    module, _, attribute = plugin.entry_point.partition(":")
    missing = failure.name if isinstance(failure, ModuleNotFoundError) else None
    if missing is not None and f"{module}.".startswith(f"{missing}."):
        known = _modules_near(missing)
        similar = nearest(missing, known) or (f"; there are {', '.join(known[:MOST_NAMED])}" if known else "")
        wrong = f"no module {missing}{similar}"
    elif isinstance(failure, AttributeError) and attribute and module in sys.modules:
        names = [name for name in vars(sys.modules[module]) if not name.startswith("_")]
        if attribute.partition(".")[0] in names:
            return _next_step(plugin)
        wrong = f"nothing called {attribute} in {module}{nearest(attribute, names)}"
    else:
        return _next_step(plugin)
    return (
        f"There is {wrong}. Correct the entry point {plugin.name} = {plugin.entry_point!r} under "
        f"[project.entry-points.slime] in the pyproject.toml of {plugin.distribution}, then install that again."
    )


def _modules_near(missing: str) -> list[str]:
    """The modules that can be imported next to ``missing``, by full name; nothing is imported but their package."""
    parent, _, _ = missing.rpartition(".")
    if not parent:
        return sorted(name for name in metadata.packages_distributions() if name.isidentifier())
    try:
        spec = importlib.util.find_spec(parent)
    except (ImportError, ValueError):
        return []
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    return sorted(f"{parent}.{module.name}" for module in pkgutil.iter_modules(folders))


MOST_NAMED = 8
"""Modules that a message lists if none has a similar name."""


def load_target(component: Component, plugin: PluginIdentity) -> Any:
    """Import the object at the component's ``target``.

    Raises:
        PluginError: the module or the attribute cannot be imported; chained, naming the plugin and the component.
    """
    action = f"importing {component.target} of component {component.name!r}"
    with boundary(plugin, action, next_step=_next_step(plugin), locate=True):
        return load_attribute(component.target)


def load_attribute(path: str) -> Any:
    """Import the object at ``package.module:attribute``, or the module ``package.module``; raises as imports do."""
    module, _, attribute = path.partition(":")
    loaded = importlib.import_module(module.strip())
    return reduce(getattr, attribute.strip().split("."), loaded) if attribute.strip() else loaded


def _next_step(plugin: PluginIdentity) -> str:
    """Advice for code of a plugin that cannot be imported."""
    if plugin.entry_point.startswith(LOCAL_MODULE):
        return (
            f"Correct {plugin.distribution}. It travels to other processes alone: move what it needs of files next to "
            "it into it, or make a package: slime plugins new KIND NAME."
        )
    if plugin.distribution.startswith("module "):
        return f"Correct {plugin.entry_point}, or the Python path that should lead to it."
    return (
        f"Reinstall {plugin.distribution} with what it depends on, report it to its author, or run without --plugin "
        f"{plugin.name}."
    )


class _BytesLoader(InspectLoader):
    """Runs the module from bytes that travelled here; tracebacks show the path that they were read from."""

    def __init__(self, content: bytes, path: str) -> None:
        self._content = content
        self._path = path

    def get_source(self, fullname: str) -> str:
        return importlib.util.decode_source(self._content)

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._content, self._path, "exec", dont_inherit=True)

    def is_package(self, fullname: str) -> bool:
        return False


def _module_of_bytes(source: PluginSource) -> ModuleType:
    name = source.plugin.entry_point
    if name in sys.modules:  # the name is made from the bytes: same name, same code
        return sys.modules[name]
    spec = importlib.util.spec_from_loader(name, _BytesLoader(source.content, source.plugin.distribution))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = source.plugin.distribution  # pydantic reads the help under options from the source
    if source.neighbours:
        neighbours = {name: (path, content) for name, path, content in source.neighbours}
        vars(module)["__builtins__"] = scoped_builtins(name, neighbours)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


FORMS = "package.module.function, package.module:function, file.py:function, or file.py with one function that fits"


@dataclass(frozen=True, slots=True)
class FunctionSource:
    """The place of a function; made on the driver, loaded in the process that runs it.

    Example: ``--custom-rm-path mine.py:reward`` is ``FunctionSource("custom_rm_path", "mine.py:reward", <the bytes of
    mine.py>, "reward")``.

    Arguments:
        setting: which setting names it.
        path: as it was written.
        code: the module or the bytes of the file; its ``plugin.name`` is ``setting``.
        attribute: the function's name; None: whatever in the module fits.
    """

    setting: str
    path: str
    code: PluginSource
    attribute: str | None = None

    @property
    def content(self) -> bytes | None:
        """The bytes of the file that the function is in; None: it is in an importable module."""
        return self.code.content if self.code.source is Source.FILE else None

    @property
    def neighbours(self) -> dict[str, PluginSource]:
        """The modules that the file imports from its folder: dotted name -> a file like it."""
        files = {name: local_file(content, path=path) for name, path, content in self.code.neighbours}
        return {name: replace(one, plugin=replace(one.plugin, name=self.setting)) for name, one in files.items()}

    def __str__(self) -> str:
        return f"--{self.setting.replace('_', '-')} {self.path}"


def find_function(path: str, *, setting: str) -> FunctionSource:
    """Find the function at ``path``; imports nothing.

    Raises:
        PluginError: the file or the package does not exist, or ``path`` has no known form.
    """
    flag = f"--{setting.replace('_', '-')} {path}"
    module, colon, attribute = path.partition(":")
    if module.endswith(".py"):
        file = str(Path(module))
        code = local_file(read_code(Path(file), flag=flag), path=file)
        with boundary(flag, "reading the modules next to it", next_step="Make them readable."):
            neighbours = find_neighbours(Path(file), code.content)
        named = tuple((name, *neighbours[name]) for name in sorted(neighbours))
        code = replace(code, plugin=replace(code.plugin, name=setting), neighbours=named)
        return FunctionSource(setting, path, code, attribute or None)
    if not colon:
        module, _, attribute = path.rpartition(".")
    names = [*module.split("."), *([attribute] if attribute else [])]
    if not module or not all(name.isidentifier() for name in names):
        raise PluginError(f"{flag}: this is not a path of a function; accepted: {FORMS}.")
    package = module.partition(".")[0]
    # The program that runs is a package of its own here, found or not as it was started; no other process imports it.
    if package == "__main__" or importlib.util.find_spec(package) is None:
        raise PluginError(f"{flag}: there is no package {package!r} here. Install it, or give the file: {FORMS}.")
    code = PluginSource(module_identity(module, name=setting), Source.MODULE)
    return FunctionSource(setting, path, code, attribute or None)


def load_function(source: FunctionSource, *, fits: Callable[[object], bool] = callable) -> object:
    """Import the module and return what ``source`` names.

    Arguments:
        fits: where the path names no attribute: which of the functions and classes that the module itself defines.

    Raises:
        PluginError: the import failed, the name is not there, or not exactly one thing fits.
    """
    module = load_plugin(source.code)
    if source.attribute is not None:
        with boundary(source, f"looking up {source.attribute!r}", next_step=f"Accepted are {FORMS}."):
            found: object = getattr(module, source.attribute)
            return found
    fitting = {name: value for name, value in own_definitions(source).items() if fits(value)}
    if len(fitting) != 1:
        names = ", ".join(sorted(fitting)) or "none"
        raise PluginError(f"{source}: exactly one function there has to fit; found {names}. Write {source.path}:NAME.")
    return next(iter(fitting.values()))


def own_definitions(source: FunctionSource) -> dict[str, object]:
    """The public functions and classes that the module of ``source`` itself defines, by name; imports it.

    Raises:
        PluginError: the import failed.
    """
    module: Any = load_plugin(source.code)
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return {
        name: value
        for name, value in public.items()
        if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == module.__name__
    }
