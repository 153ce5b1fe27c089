"""Runs that are killed where it hurts, and go on."""
