"""Where a number begins to be doubtful or unreliable; `docs/diagnostics.md` says why there."""

from __future__ import annotations

from jostle.presets import RISE

ENOUGH_DRAWS, FEWEST_EFFECTIVE = 100, 25
"""The Monte Carlo error of a correlation is about 1/√(effective draws): 0.1, and 0.2."""

R_HAT_DOUBTFUL, R_HAT_UNRELIABLE = 1.1, 1.3
"""Perfect chains with 100 effective draws among them reach 1.08 by chance; 1.01 asks for some thousand."""

AGREEMENT_DOUBTFUL, AGREEMENT_UNRELIABLE = 1 / 2, 1 / 3
"""Of scores from halves of the draws. By Spearman and Brown's formula 2r/(1 + r), two thirds and one half of the
differences between the scores from all draws are then signal."""

AGREEMENT_AIM = 0.6
"""What advice aims at: agreement is itself a guess, and whoever is brought just to the threshold may stay below it."""

MOST_TIMES_THE_DRAWS = 20
"""Who would need more draws than this many times those there are is told something else."""

DRIFT_ERRORS = 5.0
"""Of the mean loss between the first quarter and the last half of the chains, in standard errors."""

RISE_DOUBTFUL, RISE_UNRELIABLE = 2.0, 5.0
"""Of the mean loss above w*, in nats; what knows nothing of 10 classes has a loss of 2.3. A hint, and no verdict, where
the loss at w* is large itself."""

HARDLY_RISEN = RISE / 100
"""Of the mean loss from its value at w*, in nats: a hint, no verdict. At a tenth of RISE most scores were worse."""

RUNAWAY_SPREADS = 8.0
"""How far above the draws before it, in their robust standard deviations, a chain that runs away has come."""

SPREAD_GROWTH = 6.0
"""By how much the spread of the mean loss may grow from the middle to the last third of the chains."""

HOT, TOO_HOT, HOT_ERRORS = 1.2, 1.5, 3.0
"""Of the temperature, which is 1 at the target; and how far above 1 it has to lie, in its own standard errors."""

HOT_AT_ONCE = 2.0
"""The same of every single chain, where draws are so few that the error is not known."""

FAR_TOO_HOT = 100.0
"""From here on an eighth of the step is not enough of a change."""
