"""Checks functions named by path from their text, on the driver, before any process starts and without running them."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from slime_compat.forms import forms_of
from slime_compat.imports import check_names
from slime_compat.reward_uses import check_reward_uses
from slime_compat.signatures import Definition, Form, choose, definitions, first_fit, mistake
from slime_core.errors import PluginError, nearest
from slime_core.provisional import FunctionSource

__all__ = ["accepted", "ambiguous", "check_functions", "refusal", "text_of", "unbuffered"]


def check_functions(sources: Mapping[str, Sequence[FunctionSource]], *, group_rm: bool, has_model: bool) -> None:
    """Check from the text of the functions that the run can call them.

    Arguments:
        has_model: True: the run gives ``rm_model_path``.

    Raises:
        PluginError: a name is missing, not exactly one definition fits, or a signature is not accepted; see also
            :func:`slime_compat.reward_uses.check_reward_uses`; or a reward class needs a model and there is none.
    """
    forms = forms_of(group_rm=group_rm)
    for setting in sorted(sources):
        for source in sources[setting]:
            _check_text(source, forms[setting])
    for source in sources.get("custom_rm_path", ()):
        text, name = _chosen_text(source, forms["custom_rm_path"])
        check_reward_uses(source, text, name, group_rm=group_rm)
        if not has_model:
            _refuse_missing_model(source, forms["custom_rm_path"])
    for chooser in sources.get("buffer_filter_path", ()):
        for source in sources.get("data_source_path", ()):
            definition = _definition(source, forms["data_source_path"])
            if definition is not None and definition.is_complete:
                raise unbuffered(chooser, source, f"{definition.name} has no buffer to choose from")


def unbuffered(chooser: FunctionSource, source: FunctionSource, why: str) -> PluginError:
    """Return the error for a data source that never calls the function of ``buffer_filter_path``."""
    return PluginError(
        f"{chooser} has no effect with {source}: {why}. Leave one of the two out, or derive the class from "
        "slime.rollout.data_source.RolloutDataSourceWithBuffer, without a buffer_filter."
    )


def _refuse_missing_model(source: FunctionSource, forms: Sequence[Form]) -> None:
    definition = _definition(source, forms)
    if definition is None or definition.methods is None:
        return
    parameter = definition.signature.parameters.get("model_path")
    if parameter is not None and parameter.default is parameter.empty:
        raise PluginError(
            f"{source}: {definition.name} is built with model_path, and the run gives no model. Add --rm-model-path "
            "FOLDER, or give the parameter a default."
        )


def _definition(source: FunctionSource, forms: Sequence[Form]) -> Definition | None:
    """Return the function or class that ``source`` names; None if the text does not show it."""
    text, name = _chosen_text(source, forms)
    return None if text is None or name is None else definitions(text, source.path).get(name)


def _chosen_text(source: FunctionSource, forms: Sequence[Form]) -> tuple[bytes | None, str | None]:
    """Return the text of the function's file and the function's name; None if unreadable, or unclear from the text."""
    text = text_of(source)
    if text is None or source.attribute is not None:
        return text, source.attribute
    candidates = definitions(text, source.code.distribution)
    names = choose({name: definition for name, definition in candidates.items() if definition is not None}, forms)
    return text, names[0] if len(names) == 1 else None


def _check_text(source: FunctionSource, forms: Sequence[Form]) -> None:
    text = text_of(source)
    if text is None:
        return
    try:
        names = definitions(text, source.code.distribution)
    except (SyntaxError, ValueError) as error:
        raise PluginError(f"{source}: this is not Python: {error}. Correct the file.") from error
    if source.content is not None:
        check_names(source, text)
    if source.attribute is None:
        _check_only_one(source, names, forms)
    elif source.attribute not in names:
        # A star import or a __getattr__ may still define it.
        if None not in names.values():
            near = nearest(source.attribute, names) or "."
            listed = ", ".join(sorted(names)) or "nothing"
            raise PluginError(f"{source}: there is no {source.attribute!r} in it{near} It defines {listed}.")
    else:
        definition = names[source.attribute]
        if definition is not None and first_fit(definition, forms) is None:
            raise refusal(source, definition, forms)


def _check_only_one(source: FunctionSource, names: Mapping[str, Definition | None], forms: Sequence[Form]) -> None:
    visible = {name: definition for name, definition in names.items() if definition is not None}
    fitting = choose(visible, forms)
    if len(fitting) == 1 or (not fitting and len(visible) < len(names)):
        return
    raise ambiguous(source, visible, fitting, forms)


def ambiguous(
    source: FunctionSource, candidates: Mapping[str, Definition], fitting: Sequence[str], forms: Sequence[Form]
) -> PluginError:
    """Return the error for a file of which not exactly one function fits."""
    if len(candidates) == 1 and not fitting:
        return refusal(source, next(iter(candidates.values())), forms)
    listed = ", ".join(sorted(fitting or candidates)) or "it"
    which = f"{listed} all fit" if fitting else f"none of {listed} fits"
    return PluginError(
        f"{source}: exactly one function there has to fit, and {which}; {accepted(forms)}. Write {source.path}:NAME."
    )


def refusal(source: FunctionSource, definition: Definition, forms: Sequence[Form]) -> PluginError:
    """Return the error for a function or class whose signature is not accepted."""
    is_class = definition.methods is not None
    alike = [form for form in forms if bool(form.methods) is is_class] or forms[:1]
    why = "; ".join(dict.fromkeys(str(mistake(definition, form)) for form in alike))
    keyword = "async def" if definition.is_async else ("class" if is_class else "def")
    signature = definition.signature.replace(return_annotation=definition.signature.empty)
    return PluginError(f"{source}: {keyword} {definition.name}{signature} cannot be called: {why};\n{accepted(forms)}.")


def accepted(forms: Sequence[Form]) -> str:
    """Return the forms as text for messages."""
    return f"accepted: {', or '.join(dict.fromkeys(form.text for form in forms))}"


def text_of(source: FunctionSource) -> bytes | None:
    """Return the text of the function's file; None if it is not a plain file below its package."""
    if source.content is not None:
        return source.content
    first, *submodules = source.code.module.split(".")
    spec = importlib.util.find_spec(first)
    for name in submodules:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, list(spec.submodule_search_locations))
    origin = None if spec is None else spec.origin
    return Path(origin).read_bytes() if origin is not None and origin.endswith(".py") else None
