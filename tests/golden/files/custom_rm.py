"""A reward function by path: one function in the file."""


async def reward_func(args, sample, **kwargs):
    return float(sample.response.strip() == sample.label)
