"""GGUF files as model folders: header, configuration, tensors and tokenizer, without torch."""
