"""What a cache of experts would do: requests of a trace, policies, curves, prefetch, and what a machine makes of it.

The requests of a trace are its chosen experts, token by token as a decoder makes them: the k experts of one token and
layer form a *set*, requested in slot order. A set is served as a whole: none of its members is evicted for another, so
no cache below k experts can work. scope="layer": each MoE layer has a cache of its own. scope="global": one cache for
the experts of all layers; its keys are (layer, expert), its sets follow one another token by token, layer by layer.
Slots without an expert (id −1) request nothing. Ids alone are needed, so any trace will do.
"""

from colibri_lab.cache.addresses import stage_addresses
from colibri_lab.cache.budget import BUDGET_POLICIES
from colibri_lab.cache.costs import Machine, Speed, lateness, predict
from colibri_lab.cache.curves import miss_ratio_curve, stack_distances
from colibri_lab.cache.hierarchy import Level, Tlb, Traffic, simulate_addresses
from colibri_lab.cache.key_values import KeyValueCache, keys
from colibri_lab.cache.live_run import LiveRun, live
from colibri_lab.cache.lookahead import look_ahead
from colibri_lab.cache.measuring import measure_machine
from colibri_lab.cache.pages import Change, Residency, residency
from colibri_lab.cache.plans import Plan, plan
from colibri_lab.cache.policies import POLICIES
from colibri_lab.cache.prefetching import Prefetch, prefetch_quality
from colibri_lab.cache.simulation import Counts, Simulation, simulate
from colibri_lab.cache.sizes import expert_bytes
from colibri_lab.cache.substitution import Substitution, substitute

__all__ = [
    "BUDGET_POLICIES", "POLICIES", "Change", "Counts", "KeyValueCache", "Level", "LiveRun", "Machine", "Plan",
    "Prefetch", "Residency", "Simulation", "Speed", "Substitution", "Tlb", "Traffic", "expert_bytes", "keys",
    "lateness", "live", "look_ahead", "measure_machine", "miss_ratio_curve", "plan", "predict", "prefetch_quality",
    "residency", "simulate", "simulate_addresses", "stack_distances", "stage_addresses", "substitute",
]  # fmt: skip
