"""A reward function by path over the samples of a group, for ``--group-rm``."""


async def batched_custom_rm(args, samples):
    return [float(sample.response.strip() == sample.label) for sample in samples]
