"""The data source ``prompts``: prompt files, loaded into memory or read as they are needed, or a mix of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from slime_core import RunView
from slime_core.provisional import PromptRequest, PromptScreen
from slime_datasets.mixed import Mixed
from slime_datasets.numbered import InMemory, NumberedPrompts, Stream, requested
from slime_datasets.options import DatasetsOptions
from slime_datasets.screen import screen_paths
from slime_datasets.streamed import Streamed

__all__ = ["PromptFiles", "screen_prompts"]

STREAMED_SHARE = 0.125
"""Fraction of the bytes that are checked before a run: less for a stream, so that it starts at once."""


class PromptFiles(NumberedPrompts):
    """Prompts of files, each once an epoch, shuffled again in each epoch.

    Arguments:
        options: several paths (--prompt-mix), and how to read them (--streaming-data).
        run: the run, with its ``prompts``; see :class:`~slime_core.provisional.PromptRequest`.

    Raises:
        DataError: a file is missing, empty or malformed, or all its prompts are left out.
    """

    def __init__(self, options: DatasetsOptions, run: RunView) -> None:
        request = requested(run)
        super().__init__(_stream(options, request), request)

    @classmethod
    def screen(cls, options: DatasetsOptions, run: RunView, screen: PromptScreen) -> list[str]:
        """See :class:`~slime_core.DataSource`."""
        return screen_prompts(options, requested(run), screen)


def screen_prompts(options: DatasetsOptions, request: PromptRequest, screen: PromptScreen) -> list[str]:
    """Check the prompts of a run; see :func:`slime_datasets.screen.screen_paths`."""
    share = STREAMED_SHARE if options.streaming_data else 1.0
    if options.prompt_mix:
        return screen_paths(
            [path for path, _ in options.prompt_mix], request, replace(screen, setting="prompt_mix"), share=share
        )
    return screen_paths([request.path], request, screen, share=share) if screen.setting else []


def _stream(options: DatasetsOptions, request: PromptRequest) -> Stream:
    if options.prompt_mix:
        paths: Sequence[tuple[PromptRequest, float]] = [
            (replace(request, path=path), weight) for path, weight in options.prompt_mix
        ]
        return Mixed([(_stream_of_path(options, of_path), weight) for of_path, weight in paths])
    return _stream_of_path(options, request)


def _stream_of_path(options: DatasetsOptions, request: PromptRequest) -> Stream:
    return Streamed(request, window=options.shuffle_window) if options.streaming_data else InMemory(request)
