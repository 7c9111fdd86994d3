"""Sends weights from the learner to the engines by name, in buckets, checked before and after.

    publisher       one publication from pause to resume; the engines' checksums against those of the sent weights
    specs           name, dtype and shape of every weight, compared with what an engine expects; buckets
    transports      how buckets reach the engines: a process group (update_group), shared memory, files
    engine_control  control calls to the servers over HTTP
    update_group    the process group of learner rank 0 and all engines
    export          full weights as a Hugging Face folder, for disk and for checkpoints

The rule between the parts: nothing is sent before :func:`~.specs.require_matching_specs` has passed, because a weight
of a wrong shape kills a server, and no engine resumes before all of them have loaded everything. Nothing here imports
torch before it is used.

PUBLIC are the names below, for programs that read and write Hugging Face folders; the files are not.
"""

from slime_core.weights.export import HuggingFaceFolder, WrittenFile, copy_small_files
from slime_core.weights.specs import WeightSpec, expected_specs, require_complete_files, weight_files

__all__ = [
    "HuggingFaceFolder",
    "WeightSpec",
    "WrittenFile",
    "copy_small_files",
    "expected_specs",
    "require_complete_files",
    "weight_files",
]
