from slime_core import hookimpl


@hookimpl
def slime_register(add):
    add.reward_model("digits", digits)


async def digits(samples):
    """Partial credit: the share of digits in place, counted from the right."""
    return [share(sample.response.strip(), sample.label) for sample in samples]


def share(answer, label):
    return sum(a == b for a, b in zip(answer[::-1], label[::-1], strict=False)) / max(len(answer), len(label))
