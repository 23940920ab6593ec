"""The gradient noise scale: from sums of single steps to a batch size that would be enough."""

from typing import NamedTuple

from jax import Array


class NoiseSums(NamedTuple):
    """Estimates from the gradients of the parts of one batch, each by itself without bias.

    Source: McCandlish, Kaplan, Amodei and the OpenAI Dota team, 2018, arXiv 1812.06162, appendix A.

    Attributes:
      signal: float[], of the squared norm of the true gradient. One step's may be negative.
      variance: float[], of the trace of the covariance of the gradients of single examples (or of
        whatever else is counted), so that a batch of `n` has `variance / n`.
    """

    signal: Array
    variance: Array
