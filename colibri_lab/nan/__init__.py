"""Numbers that are not numbers: where NaN and Inf are born, why, how they travel, and what would cure them.

`find(session_or_trace)` names where NaN and Inf were born, why, and what they ruined; `scan` counts by tap;
`cure` and `cures` replay the run with one change and say whether it helped; `headroom` says how far every tap is from
overflow; `weights(model_or_session)` lists the weights that hold NaN or Inf. What `find` returns is described in
`result`.
"""

from colibri_lab.nan.margins import Headroom, headroom
from colibri_lab.nan.result import Cure, Found, Operand, Origin, Propagation, Step, WeightPlace
from colibri_lab.nan.search import find, scan
from colibri_lab.nan.treatment import cure, cures
from colibri_lab.nan.weights_census import NonFiniteWeight, weights

__all__ = [
    "Cure", "Found", "Headroom", "NonFiniteWeight", "Operand", "Origin", "Propagation", "Step", "WeightPlace",
    "cure", "cures", "find", "headroom", "scan", "weights",
]  # fmt: skip
