"""Which version of the weights sampled each token of a response."""

from __future__ import annotations

from slime_core.rollout.shards import UNKNOWN, version_number
from slime_core.types import Sample


def token_versions(sample: Sample) -> list[int]:
    """-1: no engine sampled the token. A sample of one version needs no spans."""
    versions = [UNKNOWN] * sample.response_length
    spans = sample.weight_spans
    if not spans and len(sample.weight_versions) == 1:
        spans = [(sample.weight_versions[0], 0, sample.response_length)]
    for version, start, end in spans:
        versions[start:end] = [version_number(version)] * (end - start)
    return versions
