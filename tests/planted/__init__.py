"""Pairs of runs whose difference is known, because it was planted in the computation of the second."""
