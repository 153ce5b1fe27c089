"""Configurations of ai-toolkit, OneTrainer and SimpleTuner, translated key by key."""
