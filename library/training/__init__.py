"""One trainer, the tasks it runs, and what a step needs: noise levels, optimizers, memory, layouts, checkpoints."""
