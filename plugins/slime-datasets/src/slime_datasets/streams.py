"""The data source ``streams``: prompts that are read as they are needed, or a mix of several files in fixed shares."""

from __future__ import annotations

from dataclasses import replace

from slime_core import RunView
from slime_core.prompts.numbered import Held, NumberedPrompts, Stream, requested
from slime_core.provisional import PromptRequest, PromptScreen
from slime_datasets.mixed import Mixed
from slime_datasets.options import DatasetsOptions
from slime_datasets.streamed import Streamed

__all__ = ["PromptStreams", "screen_prompts"]

SHARE = 0.125
"""Fraction of the rows checked before a run: for a stream less than for a file in memory, so that it starts at once."""


class PromptStreams(NumberedPrompts):
    """Prompts of one path or a mix (--prompt-mix), loaded into memory or read as needed (--streaming-data).

    Arguments:
        options: the sources of prompts and how to read them.
        run: the run, with its ``prompts``; see :class:`~slime_core.provisional.PromptRequest`.

    Raises:
        DataError: a file is missing, empty or malformed, or all its prompts are left out.
    """

    def __init__(self, options: DatasetsOptions, run: RunView) -> None:
        request = requested(run)
        super().__init__(_opened(options, request), request)

    @classmethod
    def screen(cls, options: DatasetsOptions, run: RunView, prompts: PromptScreen) -> list[str]:
        """See :class:`~slime_core.provisional.ScreenedDataSource`."""
        return screen_prompts(options, requested(run), prompts)


def screen_prompts(options: DatasetsOptions, request: PromptRequest, prompts: PromptScreen) -> list[str]:
    """Return messages about rows, of all paths, that the run will leave out.

    Raises:
        DataError: see :class:`~slime_core.provisional.PromptScreen`.
    """
    named = [("prompt_mix", path) for path, _ in options.prompt_mix] or [("prompt_data", request.path)]
    share = SHARE if options.streaming_data else 1.0
    return [bad for setting, path in named for bad in prompts(path, setting=setting, share=share)]


def _opened(options: DatasetsOptions, request: PromptRequest) -> Stream:
    if options.prompt_mix:
        return Mixed([(_of_path(options, replace(request, path=path)), weight) for path, weight in options.prompt_mix])
    return _of_path(options, request)


def _of_path(options: DatasetsOptions, request: PromptRequest) -> Stream:
    return Streamed(request, window=options.shuffle_window) if options.streaming_data else Held(request)
