"""From a prompt to token ids with the checkpoint's own tokenizer; the only place where prompt text becomes ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime_core.errors import DataError

__all__ = ["PromptEncoder"]


class PromptEncoder:
    """Encodes prompts, and decodes responses for people and rewards to read.

    Arguments:
        folder: Hugging Face folder that holds the tokenizer.
        apply_chat_template: render prompts with the tokenizer's template; a text prompt becomes one user message.
        trust_remote_code: let transformers run Python code that the folder carries.
    """

    def __init__(self, folder: Path, *, apply_chat_template: bool, trust_remote_code: bool = False) -> None:
        from transformers import AutoConfig, AutoTokenizer

        config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        self._vocab_size = int(config.get_text_config().vocab_size)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        self._folder, self._uses_template = folder, apply_chat_template
        if apply_chat_template and not self.tokenizer.chat_template:
            raise DataError(f"--apply-chat-template was asked for, but the tokenizer in {folder} has no chat template")

    @property
    def vocab_size(self) -> int:
        """Ids the model has an embedding for; more than the tokenizer has where the embedding is padded."""
        return self._vocab_size

    @property
    def end_of_sequence(self) -> int | None:
        """Id of the token that ends a response; None: the tokenizer has none."""
        end: int | None = self.tokenizer.eos_token_id
        return end

    def encode(self, prompt: str | list[dict[str, Any]]) -> list[int]:
        """Token ids of the prompt, ready to be continued by the model.

        Raises:
            DataError: chat messages without ``--apply-chat-template``, or a prompt of no tokens.
        """
        ids = self._ids(prompt)
        if not ids:
            raise DataError(f"the prompt {prompt!r} has no tokens; the model needs at least one to continue from")
        return ids

    def encode_response(self, text: str) -> list[int]:
        """Token ids of a response that the model is to give: ``text`` and the token that ends it, if there is one."""
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return ids if self.end_of_sequence is None else [*ids, self.end_of_sequence]

    def _ids(self, prompt: str | list[dict[str, Any]]) -> list[int]:
        if self._uses_template:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            return list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
        if not isinstance(prompt, str):
            raise DataError("the prompt is a list of chat messages; add --apply-chat-template to render them")
        return list(self.tokenizer(prompt)["input_ids"])

    def decode(self, ids: list[int]) -> str:
        """Text of response ids, special tokens left out."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text
