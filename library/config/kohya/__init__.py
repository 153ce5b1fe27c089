"""kohya's and musubi-tuner's configurations and command lines, translated key by key."""
