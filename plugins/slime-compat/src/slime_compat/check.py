"""Checks signatures of functions named by path: from their text at the start, and from the imported object later.

The driver reads the text and runs none of it: a function with a wrong signature is refused before any process starts.
"""

from __future__ import annotations

import difflib
import importlib.machinery
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_compat.imports import check_names
from slime_compat.keyed import carry_key
from slime_compat.names import provided
from slime_compat.options import PathOptions
from slime_compat.signatures import Definition, Form, choose, defined, definitions, first_fit, mistake
from slime_core import boundary
from slime_core.errors import PluginError
from slime_core.provisional import FunctionSource, load_function, own_definitions

__all__ = ["Loaded", "check_texts", "chosen_text", "load_all_checked", "load_checked"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """An imported function with an accepted signature.

    Arguments:
        function: the function or class.
        form: the first accepted form that it has.
        offered: the optional arguments of the form that it takes by name.
        source: its source; prints as the flag that names it.
    """

    function: Any
    form: Form
    offered: frozenset[str]
    source: FunctionSource

    def named(self, **values: Any) -> dict[str, Any]:
        """Return the entries of ``values`` that are parameters of the function."""
        return {name: value for name, value in values.items() if name in self.offered}


def check_texts(sources: Mapping[str, Sequence[FunctionSource]], forms: Mapping[str, Sequence[Form]]) -> None:
    """Check from the text of the functions, without running it, that they can be called.

    Arguments:
        forms: setting -> accepted forms; other settings are not checked.

    Raises:
        PluginError: a name is missing, not exactly one definition fits, or a signature is not accepted.
    """
    for setting in sorted(sources.keys() & forms.keys()):
        for source in sources[setting]:
            _check_text(source, forms[setting])


def chosen_text(source: FunctionSource, forms: Sequence[Form]) -> tuple[bytes | None, str | None]:
    """Return the text of the function's file and the function's name; None: unreadable, or unclear from the text."""
    text = _text(source)
    if text is None or source.attribute is not None:
        return text, source.attribute
    found = definitions(text, source.code.distribution)
    names = choose({name: one for name, one in found.items() if one is not None}, forms)
    return text, names[0] if len(names) == 1 else None


def load_checked(options: PathOptions, setting: str, forms: Mapping[str, Sequence[Form]]) -> Loaded:
    """Import the function of ``setting`` and check its signature.

    Raises:
        PluginError: it cannot be imported, or its signature is not accepted.
    """
    return _load(options.source(setting), forms[setting])


def load_all_checked(options: PathOptions, setting: str, forms: Mapping[str, Sequence[Form]]) -> list[Loaded]:
    """Import and check every function of a repeatable ``setting``, in order; empty: it was not given."""
    return [_load(source, forms[setting]) for source in options.sources.get(setting, ())]


def _load(source: FunctionSource, forms: Sequence[Form]) -> Loaded:
    with provided(source):
        function = _chosen(source, forms) if source.attribute is None else load_function(source)
    carry_key(_text(source))
    if not callable(function):
        raise PluginError(f"{source}: this is a {type(function).__name__}; {_accepted(forms)}.")
    with boundary(source, "reading its signature"):
        definition = defined(function)
    form = first_fit(definition, forms)
    if form is None:
        raise _refusal(source, definition, forms)
    taken = definition.signature.parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in taken.values())
    return Loaded(function, form, frozenset(name for name in form.offered if takes_all or name in taken), source)


def _chosen(source: FunctionSource, forms: Sequence[Form]) -> Any:
    own = own_definitions(source)
    known = {name: defined(value) for name, value in own.items()}
    names = choose(known, forms)
    if len(names) != 1:
        raise _ambiguous(source, known, names, forms)
    return own[names[0]]


def _check_text(source: FunctionSource, forms: Sequence[Form]) -> None:
    text = _text(source)
    if text is None:
        return
    try:
        found = definitions(text, source.code.distribution)
    except (SyntaxError, ValueError) as error:
        raise PluginError(f"{source}: this is not Python: {error}. Correct the file.") from error
    if source.content is not None:
        check_names(source, text)
    if source.attribute is None:
        _check_only_one(source, found, forms)
    elif source.attribute not in found:
        # A star import or a __getattr__ may still define it.
        if None not in found.values():
            names = ", ".join(sorted(found)) or "nothing"
            near = _nearest(source.attribute, found)
            raise PluginError(f"{source}: there is no {source.attribute!r} in it{near}; it defines {names}.")
    else:
        definition = found[source.attribute]
        if definition is not None and first_fit(definition, forms) is None:
            raise _refusal(source, definition, forms)


def _check_only_one(source: FunctionSource, found: Mapping[str, Definition | None], forms: Sequence[Form]) -> None:
    known = {name: one for name, one in found.items() if one is not None}
    fitting = choose(known, forms)
    if len(fitting) == 1 or (not fitting and len(known) < len(found)):
        return
    raise _ambiguous(source, known, fitting, forms)


def _ambiguous(
    source: FunctionSource, known: Mapping[str, Definition], fitting: Sequence[str], forms: Sequence[Form]
) -> PluginError:
    if len(known) == 1 and not fitting:
        return _refusal(source, next(iter(known.values())), forms)
    which = f"{', '.join(sorted(fitting))} all fit" if fitting else f"none of {', '.join(sorted(known)) or 'it'} fits"
    return PluginError(
        f"{source}: exactly one function there has to fit, and {which}; {_accepted(forms)}. Write {source.path}:NAME."
    )


def _refusal(source: FunctionSource, definition: Definition, forms: Sequence[Form]) -> PluginError:
    alike = [form for form in forms if bool(form.methods) is _is_class(definition)]
    wrong = dict.fromkeys(str(mistake(definition, form)) for form in alike)
    why = "; ".join(wrong) or str(mistake(definition, forms[0]))
    word = "async def " if definition.is_async else ("class " if _is_class(definition) else "def ")
    found = f"{word}{definition.name}{definition.signature.replace(return_annotation=definition.signature.empty)}"
    return PluginError(f"{source}: {found} cannot be called: {why};\n{_accepted(forms)}.")


def _is_class(definition: Definition) -> bool:
    return definition.methods is not None


def _accepted(forms: Sequence[Form]) -> str:
    return f"accepted: {', or '.join(dict.fromkeys(form.text for form in forms))}"


def _nearest(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _text(source: FunctionSource) -> bytes | None:
    return source.content if source.content is not None else _text_of_module(source.code.module)


def _text_of_module(module: str) -> bytes | None:
    """Return the text of the module's file; None: it is not a plain file below its package."""
    first, *rest = module.split(".")
    spec = importlib.util.find_spec(first)
    for name in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, list(spec.submodule_search_locations))
    origin = None if spec is None else spec.origin
    return Path(origin).read_bytes() if origin is not None and origin.endswith(".py") else None
