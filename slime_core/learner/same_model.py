"""Whether the weights of another folder can be loaded into the actor's model."""

from __future__ import annotations

from pathlib import Path

from slime_core.config.described import differences
from slime_core.errors import ConfigError

__all__ = ["require_same_model"]


def require_same_model(
    folder: Path,
    actor: Path,
    *,
    role: str,
    why: str = "takes turns with the actor in one model",
    trust_remote_code: bool = False,
) -> None:
    """Compare both configs as transformers completes them: what one of them leaves out has its default there.

    Weights of the same shapes load even if the configs differ elsewhere, for example in the base of the rotary
    positions, which changes the log-probabilities.

    Arguments:
        why: reason why ``role`` has to be the same model, in words that follow its folder.

    Raises:
        ConfigError: they describe different models.
    """
    from transformers import AutoConfig

    theirs, ours = (
        AutoConfig.from_pretrained(one, trust_remote_code=trust_remote_code).to_dict() for one in (folder, actor)
    )
    found = differences(theirs, ours, missing=True)
    if found:
        raise ConfigError(
            f"the {role} of {folder} {why}, but it is another one than {actor}: {'; '.join(found)}. "
            "Accepted is a folder whose config.json describes the same model."
        )
