"""A reward model over whole groups: the share of the group that a response is at least as good as."""

from slime_core import hookimpl


@hookimpl
def slime_register(add):
    add.reward_model("rank", Rank, scope="group", isolated=False)


class Rank:
    def __init__(self, *given):
        pass

    async def score(self, samples):
        right = [float(sample.response.startswith(str(sample.label))) for sample in samples]
        return [sum(one <= mine for one in right) / len(right) for mine in right]
