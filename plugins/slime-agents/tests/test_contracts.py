"""The components of this plugin, held to the contract by the kit that plugin authors use."""

from __future__ import annotations

from slime_testing import GenerateFunctionSuite


class TestToolAgent(GenerateFunctionSuite):
    component = "tool_agent"
