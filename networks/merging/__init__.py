"""Adapters merged into a base, refitted, resized, averaged, extracted."""

RANK_RULES = ("sv_fro", "sv_cumulative", "sv_ratio")  # of sd-scripts: how a layer's rank is chosen
