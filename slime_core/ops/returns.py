"""Sums of discounted rewards over responses that lie one after the other in a flat tensor."""

from __future__ import annotations

import torch

__all__ = ["discounted_returns"]


def discounted_returns(rewards_T: torch.Tensor, *, samples_T: torch.Tensor, gamma: float) -> torch.Tensor:
    """G_t = r_t + gamma * G_(t+1) at every token of every sample, where G is 0 behind its last one; [T], new.

    Source: Sutton and Barto, Reinforcement Learning (2nd edition), equation 3.9. Computed by doubling: a sum over w
    tokens and the sum over the next w make one over 2w, so that the longest of n tokens takes log2(n) rounds. A token's
    sum is that of its own sample alone, bit for bit, wherever the sample lies.

    Arguments:
        rewards_T: float [T].
        samples_T: int64 [T], which sample a token belongs to; tokens of a sample lie together and in order.
        gamma: discount of one token, 0 to 1.

    Raises:
        ValueError: the shapes differ, or ``gamma`` is out of range.
    """
    if rewards_T.shape != samples_T.shape:
        shapes = f"{tuple(rewards_T.shape)} and {tuple(samples_T.shape)}"
        raise ValueError(f"rewards_T and samples_T must have one shape; found {shapes}")
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma is {gamma}; a discount lies between 0 and 1")
    returns_T, width = rewards_T.clone(), 1
    while width < len(returns_T):
        together_T = samples_T[width:] == samples_T[:-width]
        if not bool(together_T.any()):
            break
        later_T = returns_T[width:].where(together_T, 0.0)
        returns_T[:-width] += gamma**width * later_T
        width *= 2
    return returns_T
