"""The settings ``--tis-...``, ``--mis-...``, ``--veto-threshold`` and ``--opsm-delta``, in TOML ``[offpolicy]``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from slime_core import Conflicts, Flag, Needs, PluginOptions, UsedBy

__all__ = ["OffPolicyOptions"]

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
PositiveOrZero = Annotated[float, Field(ge=0, allow_inf_nan=False)]
SECTION = "algorithm"
"""The TOML section that older files use for these settings."""


class OffPolicyOptions(PluginOptions):
    """The bounds of the corrections."""

    tis_clip: Annotated[Positive, Flag("--tis-clip", section=SECTION), UsedBy("tis", "icepop")] = 2.0
    """Corrections tis and icepop: upper bound of the importance ratio of learner to engine."""
    tis_clip_low: Annotated[PositiveOrZero, Flag("--tis-clip-low", section=SECTION), UsedBy("tis", "icepop")] = 0.0
    """Corrections tis and icepop: lower bound of the importance ratio of learner to engine."""
    use_tis: Annotated[bool, Flag("--use-tis")] = False
    """The same as --corrections tis: truncated importance sampling between engine and learner."""
    tis_threshold: Annotated[
        Positive | None,
        Flag("--tis-threshold"),
        UsedBy("tis", "icepop"),
        Conflicts("tis_clip", because="both are the upper bound of the ratio"),
    ] = None
    """Another name of tis_clip, the upper bound of the ratio in corrections tis and icepop. None: tis_clip."""
    mis_level: Annotated[
        Literal["token", "sequence", "geometric"], Flag("--mis-level", section=SECTION), UsedBy("mis")
    ] = "token"
    """Correction mis: the importance ratio that weighs a token. token: that of the token. sequence: the product over
    its response. geometric: the geometric mean over its response."""
    mis_mode: Annotated[Literal["truncate", "clip", "mask"], Flag("--mis-mode", section=SECTION), UsedBy("mis")] = (
        "truncate"
    )
    """Correction mis: effect of the bounds. truncate: ratios above mis_clip become mis_clip. clip: ratios below
    mis_clip_low also become mis_clip_low. mask: tokens out of bounds weigh 0 in the policy loss."""
    mis_clip: Annotated[Positive, Flag("--mis-clip", section=SECTION), UsedBy("mis")] = 2.0
    """Correction mis: upper bound of the importance ratio."""
    mis_clip_low: Annotated[
        PositiveOrZero,
        Flag("--mis-clip-low", section=SECTION),
        UsedBy("mis"),
        Needs("mis_mode", because="mode truncate has no lower bound"),
    ] = 0.5
    """Correction mis: lower bound of the importance ratio; not used by mis_mode = truncate."""
    veto_threshold: Annotated[Positive, Flag("--veto-threshold", section=SECTION), UsedBy("veto")] = 1e-4
    """Correction veto: drop a response if one of its tokens has an importance ratio of learner to engine below this."""
    opsm_delta: Annotated[PositiveOrZero, Flag("--opsm-delta", section=SECTION), UsedBy("opsm")] = 1e-4
    """Correction opsm: leave tokens with negative advantage out of the policy loss if the mean log-ratio of old to
    current policy over their response exceeds this, in nats."""

    @property
    def largest_ratio(self) -> float:
        """Upper bound of the ratio in tis and icepop: ``tis_threshold`` if set, else ``tis_clip``."""
        return self.tis_clip if self.tis_threshold is None else self.tis_threshold
