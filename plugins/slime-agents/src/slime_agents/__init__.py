"""Generate functions that hold conversations: ``tool_agent`` and ``openai_agent``.

plugin         declares them and their options
tools          functions that the model may call: descriptions, arguments, limits
tool_agent     the conversation of a model with tools
conversations  the messages between an external agent and the model, as branches of recorded ids
endpoint       OpenAI's chat completions over HTTP, in front of the engines
openai_agent   runs an agent against the endpoint, one key for each rollout
"""

import typing as _typing

if _typing.TYPE_CHECKING:
    from slime_agents.tools import ToolError

__all__ = ["ToolError"]


def __getattr__(name: str) -> object:
    # Every ``slime`` command imports this package; the tools take pydantic.
    if name == "ToolError":
        from slime_agents.tools import ToolError

        return ToolError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
