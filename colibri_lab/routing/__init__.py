"""How tokens are spread over experts: functions of a Trace, each with its chance value and its interval.

One row per entry of `trace.moe_layers` (Lm); T tokens, E experts, k chosen per token. Nothing here needs the engine. A
session may stand in for its trace; anything else raises ArgumentError. Slots without an expert (id −1) are never
counted.

Plain arrays: `load`, `entropy`, `gate_entropy`, `margin`, `ties`, `coactivation`, `specialisation`. Every other metric
is a `Measured`: value, low, high, chance. Each has an `Accumulator` of the same name in capitals, which takes many
traces one after another (`add`, `feed`), adds up (`merge`) and has the `result`; the function is the accumulator fed
with one trace. docs/metrics.md lists them all.
"""

from colibri_lab.routing.agreement import Agreement, agreement
from colibri_lab.routing.alignment import assignment
from colibri_lab.routing.balance import BalanceLoss, ZLoss, load_balance_loss, z_loss
from colibri_lab.routing.choice import (
    MeanEntropy,
    Ties,
    entropy,
    gate_entropy,
    margin,
    mean_entropy,
    row_entropy,
    row_margin,
    tie_share,
    ties,
)
from colibri_lab.routing.measured import Measured
from colibri_lab.routing.nulls import chance_band
from colibri_lab.routing.pairs import Coactivation, CrossLayer, adjacent_coactivation, coactivation, cross_layer
from colibri_lab.routing.repetition import Repetition, repetition
from colibri_lab.routing.similarity import (
    NormGate,
    OutputSimilarity,
    norm_gate_correlation,
    output_similarity,
    weight_similarity,
)
from colibri_lab.routing.specialisation import Contrast, Contrasted, Specialisation, contrast, specialisation
from colibri_lab.routing.streaming import Accumulator, feed
from colibri_lab.routing.usage import (
    BatchViolation,
    Usage,
    balancedness,
    batch_violation,
    load,
    max_violation,
    usage,
    usage_entropy,
)
from colibri_lab.routing.vocabulary import Vocabulary, VocabularyShares, vocabulary

__all__ = [
    "Accumulator",
    "Agreement",
    "BalanceLoss",
    "BatchViolation",
    "Coactivation",
    "Contrast",
    "Contrasted",
    "CrossLayer",
    "MeanEntropy",
    "Measured",
    "NormGate",
    "OutputSimilarity",
    "Repetition",
    "Specialisation",
    "Ties",
    "Usage",
    "Vocabulary",
    "VocabularyShares",
    "ZLoss",
    "adjacent_coactivation",
    "agreement",
    "assignment",
    "balancedness",
    "batch_violation",
    "chance_band",
    "coactivation",
    "contrast",
    "cross_layer",
    "entropy",
    "feed",
    "gate_entropy",
    "load",
    "load_balance_loss",
    "margin",
    "max_violation",
    "mean_entropy",
    "norm_gate_correlation",
    "output_similarity",
    "repetition",
    "row_entropy",
    "row_margin",
    "saturation",
    "specialisation",
    "tie_share",
    "ties",
    "usage",
    "usage_entropy",
    "vocabulary",
    "weight_similarity",
    "z_loss",
]

saturation = agreement
"""Router saturation: the `agreement` of a checkpoint's run with the final model's."""
