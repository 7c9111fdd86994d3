"""The settings ``--tis-...``, ``--mis-...``, ``--veto-threshold`` and ``--opsm-delta``, in TOML ``[offpolicy]``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from slime_core import Conflicts, Flag, Needs, PluginOptions, UsedBy

__all__ = ["OffPolicyOptions"]

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
PositiveOrZero = Annotated[float, Field(ge=0, allow_inf_nan=False)]
SECTION = "algorithm"
"""The section of files in which the settings stood when they were the core's."""


class OffPolicyOptions(PluginOptions):
    """The bounds of the corrections."""

    tis_clip: Annotated[Positive, Flag("--tis-clip", section=SECTION), UsedBy("tis", "icepop")] = 2.0
    """Largest importance ratio of learner to engine that correction tis or icepop lets count."""
    tis_clip_low: Annotated[PositiveOrZero, Flag("--tis-clip-low", section=SECTION), UsedBy("tis", "icepop")] = 0.0
    """Smallest importance ratio of learner to engine that correction tis or icepop lets count."""
    use_tis: Annotated[bool, Flag("--use-tis")] = False
    """The same as --corrections tis: truncated importance sampling between engine and learner."""
    tis_threshold: Annotated[
        Positive | None,
        Flag("--tis-threshold"),
        UsedBy("tis", "icepop"),
        Conflicts("tis_clip", because="both are the largest ratio that counts"),
    ] = None
    """Another name of tis_clip. None: tis_clip says it."""
    mis_level: Annotated[
        Literal["token", "sequence", "geometric"], Flag("--mis-level", section=SECTION), UsedBy("mis")
    ] = "token"
    """What correction mis takes the ratio over: a token, the product of a response, or its geometric mean."""
    mis_mode: Annotated[Literal["truncate", "clip", "mask"], Flag("--mis-mode", section=SECTION), UsedBy("mis")] = (
        "truncate"
    )
    """What mis does with ratios out of bounds: hold the high ones, hold both, or count those tokens 0."""
    mis_clip: Annotated[Positive, Flag("--mis-clip", section=SECTION), UsedBy("mis")] = 2.0
    """Largest ratio that mis lets count."""
    mis_clip_low: Annotated[
        PositiveOrZero,
        Flag("--mis-clip-low", section=SECTION),
        UsedBy("mis"),
        Needs("mis_mode", because="truncate bounds high ratios only"),
    ] = 0.5
    """Smallest ratio that mis lets count; not used by mode truncate."""
    veto_threshold: Annotated[Positive, Flag("--veto-threshold", section=SECTION), UsedBy("veto")] = 1e-4
    """Correction veto leaves out a response with a token whose ratio of learner to engine is below this."""
    opsm_delta: Annotated[PositiveOrZero, Flag("--opsm-delta", section=SECTION), UsedBy("opsm")] = 1e-4
    """Correction opsm counts tokens of negative advantage 0 where their response was left by more nats a token."""

    @property
    def largest_ratio(self) -> float:
        """What tis and icepop let count at most, under either of its names."""
        return self.tis_clip if self.tis_threshold is None else self.tis_threshold
