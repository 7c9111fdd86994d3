"""From a prompt and its images to token ids and to what the trained model takes beside them, by the checkpoint's own
processor.

The engine is sent the prompt as the tokenizer makes it, with one placeholder an image, and the images; it puts as many
placeholders in as an image has patches. The learner gets the ids with all of these, which the processor makes here, and
the images as numbers. Both run the same processor; that they read the same prompt is held by its number of tokens.

One thread does the work, so that requests in flight do not wait for it, and no two of them meet in the tokenizer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.errors import DataError
from slime_core.plugins.boundary import boundary
from slime_core.prompts.chat import PromptEncoder
from slime_core.prompts.rows import Prompt
from slime_core.types import JsonValue

if TYPE_CHECKING:
    import torch

__all__ = ["InputProcessor", "Processed", "has_processor"]

FILES = ("processor_config.json", "preprocessor_config.json")
"""A Hugging Face folder with one of these has a processor of images."""

OF_TEXT = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})
"""What a processor returns of the text; the learner's model has it from the tokens of the sample."""


@dataclass(frozen=True, slots=True)
class Processed:
    """A prompt as the model that is trained reads it.

    Arguments:
        ids: of the prompt, each image with all its placeholders.
        inputs: name -> tensor, such as ``pixel_values``; ``Sample.multimodal_train_inputs``.
    """

    ids: list[int]
    inputs: dict[str, torch.Tensor]


def has_processor(folder: Path) -> bool:
    """Whether the checkpoint in ``folder`` says how images become numbers."""
    return any((folder / name).is_file() for name in FILES)


class InputProcessor:
    """The processor of a checkpoint.

    Arguments:
        encoder: of the same checkpoint; it renders prompts.
        trust_remote_code: let transformers run Python code that the folder carries.

    Raises:
        DataError: transformers cannot load it.
    """

    def __init__(self, encoder: PromptEncoder, *, trust_remote_code: bool = False) -> None:
        from transformers import AutoProcessor

        self._encoder = encoder
        with boundary(f"the processor in {encoder.folder}", "loading it with transformers", error=DataError):
            self._processor: Any = AutoProcessor.from_pretrained(encoder.folder, trust_remote_code=trust_remote_code)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="processor")

    async def __call__(
        self, prompt: Prompt, inputs: Mapping[str, JsonValue], *, tools: Sequence[JsonValue] | None = None
    ) -> Processed:
        """``prompt`` with its ``inputs``, as :attr:`Sample.multimodal_inputs` holds them: images by path or in base 64.

        Raises:
            DataError: they are not images that can be read, or the processor refuses them, with its words.
        """
        text = self._encoder.text(prompt, tools=tools)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._processed, text, inputs)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _processed(self, text: str, inputs: Mapping[str, Any]) -> Processed:
        images = _images(inputs)
        with boundary(f"the processor in {self._encoder.folder}", "processing a prompt's images", error=DataError):
            special = not self._encoder.uses_template  # the template has written them already
            found = self._processor(text=[text], images=images, add_special_tokens=special, return_tensors="pt")
        kept = {name: value for name, value in found.items() if name not in OF_TEXT}
        return Processed(found["input_ids"][0].tolist(), kept)


def _images(inputs: Mapping[str, Any]) -> list[Any]:
    others = sorted(inputs.keys() - {"image"})
    if others:
        raise DataError(
            f"the data holds {', '.join(others)} (--multimodal-keys); the processor of the checkpoint is asked about "
            "images only. A generate function can fill multimodal_train_inputs of its samples itself"
        )
    found = inputs["image"]
    return [_image(one) for one in (found if isinstance(found, list) else [found])]


def _image(found: Any) -> Any:
    from transformers.image_utils import load_image

    if not isinstance(found, str) or found.startswith(("http://", "https://")):
        raise DataError(
            f"the image {found!r:.80} is not fetched for training; accepted: a path, or the image in base 64, alone or "
            "as data:image/png;base64,..."
        )
    shown = f"the image {found!r:.80}"
    with boundary(shown, "reading it", error=DataError):
        return load_image(found)
