"""PUBLIC. What generate functions are written with.

    context     GenerateContext, and the Protocols Client, Encoder and InputProcessor that it holds; Parents: which of
                the given samples each returned one was made from
    trajectory  Trajectory: one response, turn by turn; generate_group: one turn for every sample of a group
    sampling    SamplingParams: how tokens are sampled; Generation: what an engine answers; Kept: which tokens top-p and
                top-k left

The rule between them: token ids and log-probabilities stay exactly as the engine returned them. Text is decoded from
ids and never encoded again.
"""

from slime_core.generation.context import Client, Encoder, GenerateContext, InputProcessor, Parents, ProcessedPrompt
from slime_core.generation.sampling import FinishReason, Generation, Kept, SamplingParams, joined
from slime_core.generation.trajectory import BranchError, Interrupted, Trajectory, Turn, generate_group, keep

__all__ = [
    "BranchError",
    "Client",
    "Encoder",
    "FinishReason",
    "GenerateContext",
    "Generation",
    "InputProcessor",
    "Interrupted",
    "Kept",
    "Parents",
    "ProcessedPrompt",
    "SamplingParams",
    "Trajectory",
    "Turn",
    "generate_group",
    "joined",
    "keep",
]
