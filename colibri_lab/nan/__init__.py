"""Numbers that are not numbers: where NaN and Inf are born, why, how they travel, and what would cure them.

`weights(model_or_session)` lists the weights that hold NaN or Inf. What the analyses return is described in `result`.
"""

from colibri_lab.nan.result import Cure, Found, Operand, Origin, Propagation, Step, WeightPlace
from colibri_lab.nan.weights_census import NonFiniteWeight, weights

__all__ = [
    "Cure", "Found", "NonFiniteWeight", "Operand", "Origin", "Propagation", "Step", "WeightPlace", "weights",
]  # fmt: skip
