"""How hot a branch is: an exponentially decayed rate.

Each amount served counts with weight exp(-age / HEAT_S), so a steady flow of x a second settles at
a rate of x, and a branch that nobody asks for has lost 95 % of its heat after three `HEAT_S`.
"""

from math import exp

HEAT_S = 60.0

Heat = tuple[float, float]
"""(decayed sum, the time it stands at)."""

COLD: Heat = (0.0, 0.0)


def warmed(heat: Heat, amount: float, now: float) -> Heat:
    """The heat after `amount` more was served at `now`; times never go back."""
    total, then = heat
    return total * exp((then - now) / HEAT_S) + amount if total else amount, now


def rate(heat: Heat, now: float) -> float:
    """What is served in a second."""
    total, then = heat
    return total * exp((then - now) / HEAT_S) / HEAT_S if total else 0.0
