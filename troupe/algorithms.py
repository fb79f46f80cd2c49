"""Parts of a custom algorithm (`algorithm.name: package.module:attribute`)."""

from troupe.workers.algorithms.custom import CustomAlgorithm, GroupRewards, LossTokens, SampledTokens, TokenLoss

__all__ = ["CustomAlgorithm", "GroupRewards", "LossTokens", "SampledTokens", "TokenLoss"]
