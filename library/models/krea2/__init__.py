"""Krea 2."""
