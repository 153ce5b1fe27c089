"""Optimizers by name, learning rate schedules, averages of weights."""
