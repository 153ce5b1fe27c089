"""The page: runs, samples, data and precision in the browser, over the files the trainer writes and nothing else."""
