"""Against what ends a run badly: steps that are not finite, signals, requests from outside."""
