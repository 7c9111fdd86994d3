"""Encodes prompts and their images with the checkpoint's tokenizer or processor; the sampler calls it.

The engine gets the images and the prompt as the tokenizer makes it, with one placeholder per image, and expands each
placeholder to one per patch. The learner gets the expanded ids and the images as tensors, both from the processor in
this file. Engine and learner run the same processor; the number of prompt tokens shows that they read the same prompt.

One thread runs the processor, so that requests in flight do not wait for it and the tokenizer has one caller at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from slime_core.errors import DataError
from slime_core.prompts.messages import ChatTemplate, messages_in
from slime_core.types import JsonValue, Prompt
from slime_core.untrusted import read_object
from slime_core.user_code.failures import boundary

if TYPE_CHECKING:
    import torch

__all__ = [
    "CheckpointProcessor",
    "Processed",
    "PromptEncoder",
    "PromptTokenizer",
    "has_processor",
    "tokenizer_without_model",
    "writes_tools",
]


PLACEHOLDER = "0assistant0turn0"
"""Replaces an assistant's turn while the template renders the next messages."""

UNREADABLE = (
    "If the checkpoint has Python code for them, like Kimi K2, read the code and add --trust-remote-code; "
    "otherwise copy the files from the source of the checkpoint."
)


class PromptTokenizer:
    """Encoder of prompts with a tokenizer alone.

    Arguments:
        tokenizer: a tokenizer of transformers.
        folder: Hugging Face folder of the tokenizer.
        apply_chat_template: render prompts with the tokenizer's template; a text prompt becomes one user message.
        template_arguments: further arguments of the template, such as ``{"enable_thinking": False}``.

    Attributes:
        uses_template: prompts are rendered with the chat template.

    Raises:
        DataError: the tokenizer has no template to apply.
    """

    def __init__(
        self,
        tokenizer: object,
        folder: Path,
        *,
        apply_chat_template: bool,
        template_arguments: Mapping[str, JsonValue] | None = None,
    ) -> None:
        self.tokenizer = cast(Any, tokenizer)
        self.folder = folder
        self.uses_template = apply_chat_template
        self._arguments = dict(template_arguments or {})
        self._templates: dict[str, ChatTemplate] = {}
        if apply_chat_template and not self.tokenizer.chat_template:
            raise DataError(f"--apply-chat-template needs a chat template, but the tokenizer in {folder} has none")

    def encode(self, prompt: Prompt, *, tools: Sequence[JsonValue] | None = None) -> list[int]:
        """Return the token ids of the prompt, ready to be continued by the model.

        Arguments:
            tools: descriptions of functions, for the chat template; ignored without one.

        Raises:
            DataError: chat messages without ``--apply-chat-template``, or a prompt of no tokens; or the
                template refuses the prompt.
        """
        text = self.text(prompt, tools=tools)
        ids = list(self.tokenizer(text, add_special_tokens=not self.uses_template)["input_ids"])
        if not ids:
            raise DataError(f"the prompt {prompt!r} has no tokens; the model needs at least one to continue from")
        return ids

    def check(self, prompt: Prompt, *, tools: Sequence[JsonValue] | None = None) -> None:
        """Raise DataError if the chat template refuses the prompt or leaves something out; returns without a template.

        A conversation that ends with the assistant is rendered without the header of another turn, as in training.
        """
        if not self.uses_template:
            return
        messages = _messages(prompt)
        self.render(messages, tools=tools, asks=messages[-1].get("role") != "assistant")

    def text(self, prompt: Prompt, *, tools: Sequence[JsonValue] | None = None) -> str:
        """Return the prompt as the tokenizer reads it: rendered, if there is a template; raises as :meth:`encode`."""
        if self.uses_template:
            return self.render(_messages(prompt), tools=tools, asks=True)
        if not isinstance(prompt, str):
            raise DataError("the prompt is a list of chat messages; add --apply-chat-template to render them")
        return prompt

    def render(
        self,
        messages: Sequence[Mapping[str, JsonValue]],
        *,
        tools: Sequence[JsonValue] | None = None,
        asks: bool,
        first: int = 0,
    ) -> str:
        """Render a conversation with the chat template, in the form that the template reads
        (:meth:`ChatTemplate.normal_form`); the result has the text of each message.

        Arguments:
            tools: descriptions of functions.
            asks: end with the header of the assistant's turn (``add_generation_prompt``).
            first: the first of the caller's messages, for errors; those before it are not checked.

        Raises:
            DataError: the template refuses it, and the message quotes the template's error; or it leaves out a message
                or the tools.
        """
        template = self.template(tools)
        formed = template.normal_form(messages)
        text = self._rendered(formed, tools, asks)
        template.check(messages, formed, text, tools=tools, asks=asks, first=first)
        return text

    def template(self, tools: Sequence[JsonValue] | None = None) -> ChatTemplate:
        """Return the chat template; a tokenizer may have a separate one for conversations with tools."""
        source = self.tokenizer.get_chat_template(None, list(tools) if tools else None)
        if source not in self._templates:
            self._templates[source] = ChatTemplate(source, self._rendered, self.folder)
        return self._templates[source]

    def _rendered(
        self, messages: Sequence[Mapping[str, JsonValue]], tools: Sequence[JsonValue] | None, asks: bool
    ) -> str:
        with boundary(f"the chat template in {self.folder}", "rendering a conversation", error=DataError):
            arguments = {"tools": list(tools) if tools else None, "add_generation_prompt": asks, **self._arguments}
            text: str = self.tokenizer.apply_chat_template(list(messages), tokenize=False, **arguments)
            return text

    def spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the token ids of a rendered ``text``, and the characters [start, end) that each id covers.

        Raises:
            DataError: the tokenizer has no ``tokenizer.json``, and only that maps tokens to characters.
        """
        if not self.tokenizer.is_fast:
            raise DataError(f"the tokenizer in {self.folder} has no tokenizer.json, which maps tokens to characters")
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(encoded["input_ids"]), [tuple(span) for span in encoded["offset_mapping"]]


def tokenizer_without_model(
    folder: Path, *, apply_chat_template: bool, template_arguments: Mapping[str, JsonValue] | None = None
) -> PromptTokenizer | None:
    """Load the tokenizer in ``folder`` from its ``tokenizer.json``, without torch (1 s).

    Return None if it has none, or has Python code: then only :class:`PromptEncoder` can load it.

    Raises:
        DataError: transformers cannot load it.
    """
    if not (folder / "tokenizer.json").is_file() or _has_code(folder):
        return None
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.set_verbosity_error()  # it warns of every prompt that is too long
    next_step = "Copy tokenizer.json and tokenizer_config.json from the source of the checkpoint."
    with boundary(f"the tokenizer in {folder}", "reading it", error=DataError, next_step=next_step):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return PromptTokenizer(
        tokenizer, folder, apply_chat_template=apply_chat_template, template_arguments=template_arguments
    )


def _has_code(folder: Path) -> bool:
    try:
        return "auto_map" in read_object(folder / "tokenizer_config.json")
    except (OSError, ValueError):
        return False


def writes_tools(folder: Path, template_arguments: Mapping[str, JsonValue]) -> bool:
    """Return whether the chat template of a checkpoint writes tools; True also if only the sampler can load it.

    Arguments:
        template_arguments: further arguments of the template.
    """
    tokenizer = tokenizer_without_model(folder, apply_chat_template=True, template_arguments=template_arguments)
    return tokenizer is None or tokenizer.template([{}]).shows_tools


def _messages(prompt: Prompt) -> Sequence[Mapping[str, JsonValue]]:
    messages = messages_in(prompt) if isinstance(prompt, str) else prompt
    return messages or [{"role": "user", "content": prompt}]


class PromptEncoder(PromptTokenizer):
    """Encoder of prompts and decoder of responses.

    Arguments:
        folder: Hugging Face folder that holds config and tokenizer.
        apply_chat_template, template_arguments: see :class:`PromptTokenizer`.
        trust_remote_code: let transformers run Python code that the folder carries.

    Attributes:
        arguments: arguments that make an equal encoder in another process, as JSON.
        vocab_size: number of embeddings of the model; more than the tokenizer has ids if the embedding is padded.
        end_ids: every id at which an engine ends a response by itself: the tokenizer's, and those that ``config.json``
            and ``generation_config.json`` name.
    """

    def __init__(
        self,
        folder: Path,
        *,
        apply_chat_template: bool,
        template_arguments: Mapping[str, JsonValue] | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        from transformers import AutoConfig, AutoTokenizer

        with boundary(f"config and tokenizer in {folder}", "reading them", error=DataError, next_step=UNREADABLE):
            config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        super().__init__(
            tokenizer, folder, apply_chat_template=apply_chat_template, template_arguments=template_arguments
        )
        self.arguments: dict[str, JsonValue] = {
            "folder": str(folder),
            "apply_chat_template": apply_chat_template,
            "template_arguments": self._arguments,
            "trust_remote_code": trust_remote_code,
        }
        self.vocab_size = int(config.get_text_config().vocab_size)
        self.end_ids = _end_ids(folder, config, self.tokenizer)

    @property
    def end_of_sequence(self) -> int | None:
        """The id of the token that ends a response. None if the tokenizer has none."""
        end: int | None = self.tokenizer.eos_token_id
        return end

    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of ``text``, without chat template and added special tokens."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def encode_messages(
        self,
        messages: Sequence[Mapping[str, JsonValue]],
        *,
        after: int | None = None,
        tools: Sequence[JsonValue] | None = None,
    ) -> list[int]:
        """Return the token ids that continue a conversation after a turn of the assistant: those that the chat
        template writes after the content of that turn.

        Arguments:
            messages: messages of the user or of tools, at least one.
            after: the last id so far; if it ends a turn and the template writes the same token, it is not repeated.
            tools: descriptions of functions, for the chat template.

        Raises:
            DataError: no ``--apply-chat-template``, or the template refuses the messages.
        """
        if not self.uses_template:
            raise DataError("messages continue a conversation by the chat template; add --apply-chat-template")
        turn: list[Mapping[str, JsonValue]] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": PLACEHOLDER},
        ]
        text = self.render([*turn, *messages], tools=tools, asks=True, first=len(turn))
        if text.count(PLACEHOLDER) != 1:
            raise DataError(f"the chat template in {self.folder} changes the text of an assistant's turn")
        continuation = text.partition(PLACEHOLDER)[2]
        if after in self.end_ids:
            continuation = continuation.removeprefix(self.decode_all([after]))
        return self.encode_text(continuation)

    def encode_response(self, text: str) -> list[int]:
        """Return the token ids of a target response: ``text`` and the end token, if the tokenizer has one."""
        ids = self.encode_text(text)
        return ids if self.end_of_sequence is None else [*ids, self.end_of_sequence]

    def is_special(self, token_id: int) -> bool:
        """Return whether the id is that of a special token, such as the end of a turn."""
        added: dict[int, Any] = self.tokenizer.added_tokens_decoder
        return token_id in added and bool(added[token_id].special)

    def decode_all(self, ids: Sequence[int]) -> str:
        """Decode ids, with special tokens and spaces unchanged."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def decode(self, ids: list[int]) -> str:
        """Decode response ids without special tokens."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text


def _end_ids(folder: Path, config: Any, tokenizer: Any) -> tuple[int, ...]:
    from transformers import GenerationConfig

    named = [tokenizer.eos_token_id, getattr(config, "eos_token_id", None)]
    if (folder / "generation_config.json").exists():
        named.append(GenerationConfig.from_pretrained(folder).eos_token_id)
    ids = [token_id for ids in named if ids is not None for token_id in (ids if isinstance(ids, list) else [ids])]
    return tuple(dict.fromkeys(ids))


FILES = ("processor_config.json", "preprocessor_config.json")
"""A Hugging Face folder with one of these has a processor of images."""

OF_TEXT = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})
"""Outputs of a processor for the text; the learner has them from the tokens of the sample."""


@dataclass(frozen=True, slots=True)
class Processed:
    """A prompt as the trained model reads it.

    Arguments:
        ids: ids of the prompt, with all placeholders of each image.
        inputs: name -> tensor, such as ``pixel_values``; ``Sample.multimodal_train_inputs``.
    """

    ids: list[int]
    inputs: dict[str, torch.Tensor]


def has_processor(folder: Path) -> bool:
    """Return whether the checkpoint in ``folder`` has a processor of images."""
    return any((folder / name).is_file() for name in FILES)


class CheckpointProcessor:
    """The processor of a checkpoint.

    Arguments:
        encoder: encoder of the same checkpoint; it renders prompts.
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
        """Process ``prompt`` with its ``inputs`` (:attr:`Sample.multimodal_inputs`): images by path or in base 64.

        Raises:
            DataError: the inputs are not readable images, or the processor refuses them; the message quotes its error.
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
            processed = self._processor(text=[text], images=images, add_special_tokens=special, return_tensors="pt")
        tensors = {name: value for name, value in processed.items() if name not in OF_TEXT}
        return Processed(processed["input_ids"][0].tolist(), tensors)


def _images(inputs: Mapping[str, Any]) -> list[Any]:
    others = sorted(inputs.keys() - {"image"})
    if others:
        raise DataError(
            f"the data holds {', '.join(others)} (--multimodal-keys); the processor of the checkpoint handles "
            "images only. A generate function can fill multimodal_train_inputs of its samples itself"
        )
    images = inputs["image"]
    return [_image(image) for image in (images if isinstance(images, list) else [images])]


def _image(image: Any) -> Any:
    from transformers.image_utils import load_image

    if not isinstance(image, str) or image.startswith(("http://", "https://")):
        raise DataError(
            f"the image {image!r:.80} is not fetched for training; accepted: a path, or the image in base 64, alone or "
            "as data:image/png;base64,..."
        )
    shown = f"the image {image!r:.80}"
    with boundary(shown, "reading it", error=DataError):
        return load_image(image)
