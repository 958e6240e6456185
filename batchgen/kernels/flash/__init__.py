"""Attention with the vllm-flash-attn library: finding it, checking it, calling it."""
