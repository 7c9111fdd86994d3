"""Discounted returns and advantages over values, in torch.

Responses lie one after another in a flat tensor. Left out of generalised advantage estimation: a value after the last
token of a truncated response. Its return ends there, as if the response had ended by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Estimates", "discounted_returns", "generalized_advantages"]


def discounted_returns(rewards_T: torch.Tensor, *, samples_T: torch.Tensor, gamma: float) -> torch.Tensor:
    """G_t = r_t + gamma * G_(t+1) at every token of every sample, where G is 0 after its last one; [T], new.

    Source: Sutton and Barto, Reinforcement Learning (2nd edition), equation 3.9. Computed by doubling: a sum over w
    tokens and the sum over the next w make one over 2w, so that the longest of n tokens takes log2(n) rounds. A token's
    sum is that of its sample alone, bit for bit, at any position of the sample.

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


@dataclass(frozen=True, slots=True)
class Estimates:
    """The outputs of generalised advantage estimation for T tokens, each [T].

    Arguments:
        advantages_T: how much better a token was than the critic expected.
        returns_T: the advantages plus the values, the targets of the critic.
    """

    advantages_T: torch.Tensor
    returns_T: torch.Tensor


def generalized_advantages(
    rewards_T: torch.Tensor, *, values_T: torch.Tensor, samples_T: torch.Tensor, gamma: float, lambd: float
) -> Estimates:
    """A_t = delta_t + gamma * lambd * A_(t+1), with delta_t = r_t + gamma * V_(t+1) - V_t, over every sample alone.

    After the last token of a sample A and V are 0. The returns are A + V. With ``lambd`` 1 that is the discounted
    reward to go, whatever the values; with 0 the advantage is delta.

    Source: Schulman et al. 2015 (1506.02438), equations 11 and 16.

    Arguments:
        rewards_T, values_T: float [T].
        samples_T: int64 [T], which sample a token belongs to; tokens of a sample lie together and in order.
        gamma: discount of one token, 0 to 1.
        lambd: decay of the deltas, 0 to 1.

    Raises:
        ValueError: the shapes differ, or ``gamma`` or ``lambd`` is out of range.
    """
    if not rewards_T.shape == values_T.shape == samples_T.shape:
        shapes = f"{tuple(rewards_T.shape)}, {tuple(values_T.shape)} and {tuple(samples_T.shape)}"
        raise ValueError(f"rewards_T, values_T and samples_T must have one shape; found {shapes}")
    for name, factor in {"gamma": gamma, "lambd": lambd}.items():
        if not 0.0 <= factor <= 1.0:
            raise ValueError(f"{name} is {factor}; it lies between 0 and 1")
    next_T = torch.zeros_like(values_T)
    next_T[:-1] = values_T[1:].where(samples_T[1:] == samples_T[:-1], 0.0)
    deltas_T = rewards_T + gamma * next_T - values_T
    advantages_T = discounted_returns(deltas_T, samples_T=samples_T, gamma=gamma * lambd)
    return Estimates(advantages_T, advantages_T + values_T)
