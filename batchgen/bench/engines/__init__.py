"""Scripts that run inside the benchmark's engine processes. They import nothing from the rest of the benchmark."""
