"""The hooks of plugin ``offpolicy``; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from slime_core import Component, CorrectionTraits, DerivedSetting, hookimpl
from slime_core.types import JsonValue
from slime_offpolicy.options import OffPolicyOptions

__all__: list[str] = []


@hookimpl
def slime_register_corrections() -> Iterator[Component]:
    yield Component(
        "tis",
        target="slime_offpolicy.tokens:TruncatedImportanceSampling",
        traits=CorrectionTraits(),
        summary="Importance weights of trainer to engine, truncated at --tis-clip (after IMPALA, 1802.01561)",
    )
    yield Component(
        "icepop",
        target="slime_offpolicy.tokens:IcePop",
        traits=CorrectionTraits(),
        summary="As tis, but a token out of bounds leaves the policy loss (IcePop, 2510.18855)",
    )
    yield Component(
        "mis",
        target="slime_offpolicy.sequences:MaskedImportanceSampling",
        traits=CorrectionTraits(),
        summary="Importance weights of tokens or responses, truncated, clipped or masked (--mis-level, --mis-mode)",
    )
    yield Component(
        "veto",
        target="slime_offpolicy.sequences:Veto",
        traits=CorrectionTraits(),
        summary="Leaves out responses with a token that the trainer finds all but impossible (--veto-threshold)",
    )
    yield Component(
        "opsm",
        target="slime_offpolicy.sequences:OffPolicySequenceMasking",
        traits=CorrectionTraits(compares_engine=False),
        summary="Takes responses of negative advantage out that the actor has left (DeepSeek-V3.2, 2512.02556)",
    )


@hookimpl
def slime_options() -> type[OffPolicyOptions]:
    return OffPolicyOptions


@hookimpl
def slime_settings(options: OffPolicyOptions, settings: Mapping[str, JsonValue]) -> Iterator[DerivedSetting]:
    given = settings.get("corrections")
    names = list(given) if isinstance(given, list) else []
    if options.use_tis and "tis" not in names:
        yield DerivedSetting("corrections", ["tis", *names], option="use_tis", given="replace")


@hookimpl
def slime_check(options: OffPolicyOptions) -> Iterator[str]:
    if options.tis_clip_low > options.largest_ratio:
        yield (
            f"tis_clip_low = {options.tis_clip_low:g} is above tis_clip = {options.largest_ratio:g}; the ratio is held "
            "between the two"
        )
    if options.mis_mode != "truncate" and options.mis_clip_low > options.mis_clip:
        yield (
            f"mis_clip_low = {options.mis_clip_low:g} is above mis_clip = {options.mis_clip:g}; mis_mode = "
            f"{options.mis_mode} needs a ratio that lies between the two"
        )
