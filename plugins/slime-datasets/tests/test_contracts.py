"""The components of this plugin, held to the contract by the kit that plugin authors use."""

from __future__ import annotations

from slime_testing import DataSourceSuite, GenerateFunctionSuite


class TestFromMessages(GenerateFunctionSuite):
    component = "from_messages"
    apply_chat_template = True
    prompts = tuple(
        [{"role": "user", "content": text}, {"role": "assistant", "content": f"about {text}"}]
        for text in ("12", "ab c")
    )


class TestFromBuffer(GenerateFunctionSuite):
    component = "from_buffer"


class TestBuffered(DataSourceSuite):
    component = "buffered"


class TestPrompts(DataSourceSuite):
    component = "prompts"
