"""Training backends: AdamW in one process, FSDP2, DeepSpeed ZeRO."""
