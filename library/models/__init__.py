"""Model families, a folder each with the same file names: find, load, encode, predict, sample."""
