"""Speed and memory beside peers or a limit, measured in the same run; each script prints a table."""
