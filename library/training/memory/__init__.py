"""What a step takes and how to take less: estimates, dry runs, offloading."""
