"""The models that a server on a CPU mostly serves, named by SGLang's setting for models from elsewhere.

With that setting SGLang imports its 250 files of models only if it serves a model that is missing in this package
(sglang 0.5.23, srt/models/registry.py:71 and :142). Can go when it imports no more than it serves.
"""
