"""One step: its tensors, its executors, sampling."""
