"""Pipeline parallelism: the blocks of a model shared out among processes that pass a batch on in pieces."""
