"""Stands in for SGLang's compiled kernels on a CPU without AMX, where SGLang falls back to torch.

It must not register ``torch.ops.sgl_kernel.convert_weight_packed``: SGLang 0.5.23 (srt/utils/common.py:358) takes that operator as a sign
of the packed AMX kernels. Goes when the CPU build of sgl_kernel is on PyPI.
"""

from __future__ import annotations

from _slime_stand_in import serve

__version__ = "0.0.0"
__getattr__ = serve(__name__)
