"""What tools/generate.py makes besides pictures."""
