"""Adapters merged into a base, refitted, resized, averaged, extracted."""
