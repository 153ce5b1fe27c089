"""What tools/evaluate_llm.py asks of other packages."""
