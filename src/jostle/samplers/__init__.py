"""The update rules, each with its equation and the law that it samples.

A rule is a frozen configuration with a few methods (see `Sampler`): `init` makes the statistics it carries from
step to step, `step` moves all chains of a group at once, and `check` says beforehand what cannot work. A rule
never sees the model or the data: it gets the gradient of a minibatch's mean loss, standard normal numbers, and
the potential. Everything it carries is in its statistics, so a checkpoint of weights and statistics resumes it.

Steps are measured alike in all of them: ε of one rule moves the weights about as far as ε of another.
"""

from jostle.samplers.overdamped import SGLD, Gaussian, LeimkuhlerMatthews, OrnsteinUhlenbeck, RMSpropSGLD
from jostle.samplers.protocol import Sampler, Statistics, Weights
from jostle.samplers.underdamped import BAOAB, SGNHT

__all__ = [
    "BAOAB",
    "SGLD",
    "SGNHT",
    "Gaussian",
    "LeimkuhlerMatthews",
    "OrnsteinUhlenbeck",
    "RMSpropSGLD",
    "Sampler",
    "Statistics",
    "Weights",
]
