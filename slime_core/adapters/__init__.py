"""Functions of slime's users, as components: what ``[custom]`` names by path runs through the contracts of plugins.

Plugin ``paths`` is active where a run gives a path. Each path setting has a component of its own name, which stands in
for the one that the run would use otherwise; ``options`` carries the settings and the code, ``arguments`` makes the
``args`` that such functions expect.
"""

from slime_core.adapters.inside import Answer, GenerateState, generate_single, get_model_url, post

__all__ = ["Answer", "GenerateState", "generate_single", "get_model_url", "post"]
