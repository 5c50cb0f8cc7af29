"""Shards parameters, gradients and optimizer state over ranks (ZeRO stages 1 to 3, FSDP), or replicates them (DDP)."""
