"""The data source ``prompts``: prompt files, loaded into memory."""

from __future__ import annotations

from slime_core import RunView
from slime_core.prompts.numbered import Held, NumberedPrompts, requested

__all__ = ["PromptFiles"]


class PromptFiles(NumberedPrompts):
    """Returns every prompt once an epoch, shuffled again in each epoch.

    Arguments:
        options: the built-in plugin has none.
        run: the run, with its ``prompts``; see :class:`~slime_core.PromptRequest`.

    Raises:
        DataError: a file is missing, empty or malformed, or all its prompts are left out.
    """

    def __init__(self, options: object, run: RunView) -> None:
        del options
        request = requested(run)
        super().__init__(Held(request), request)
