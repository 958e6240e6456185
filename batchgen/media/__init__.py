"""Access to the files that rows name. No models."""
