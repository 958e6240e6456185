"""LoRA adapters: their files, whether they fit, their use in steps."""
