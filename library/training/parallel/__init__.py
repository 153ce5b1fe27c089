"""A model on several processes or GPUs: DDP, FSDP2, ZeRO, tensor and pipeline parallelism."""
