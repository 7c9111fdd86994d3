"""The data source ``prompts``: prompt files, held in memory."""

from __future__ import annotations

from slime_core import RunView
from slime_core.prompts.numbered import Held, NumberedPrompts, requested

__all__ = ["PromptFiles"]


class PromptFiles(NumberedPrompts):
    """Hands out every prompt once an epoch, reshuffled in each.

    Arguments:
        options: the built-in plugin has none.
        run: with its ``prompts``, see :class:`~slime_core.PromptRequest`.

    Raises:
        DataError: a file is missing, empty or malformed, or all its prompts are left out.
    """

    def __init__(self, options: object, run: RunView) -> None:
        del options
        request = requested(run)
        super().__init__(Held(request), request)
