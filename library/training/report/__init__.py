"""Metrics, the progress line and the curves of a run."""
