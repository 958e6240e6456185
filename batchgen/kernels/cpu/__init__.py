"""CPU kernels in C++, compiled once on the machine that runs them. Sources stand in `src/`."""
