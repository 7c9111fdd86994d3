"""A reward with partial credit: the share of digits that stand where the label has them, counted from the right."""

from slime_core import Component, hookimpl


@hookimpl
def slime_register_reward_models():
    yield Component("digits", target=f"{__name__}:Digits", summary="Share of digits in place")


class Digits:
    def __init__(self, options, run):
        pass

    async def score(self, samples):
        return [share(sample.response.strip(), sample.label) for sample in samples]


def share(answer, label):
    return sum(a == b for a, b in zip(answer[::-1], label[::-1], strict=False)) / max(len(answer), len(label))
