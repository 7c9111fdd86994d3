"""Stands in for torchvision on a server without a GPU; text models only.

The wheel on PyPI is built against the CUDA build of torch and does not import beside the CPU build. SGLang 0.5.23 imports it for its
image processors, whatever the model. Can go when PyPI has a CPU build of torchvision.
"""

from __future__ import annotations

from _slime_stand_in import serve

__version__ = "0.28.0"  # the version for torch 2.13
__getattr__ = serve(__name__)
