"""CPU kernels in C++ (sources in `src/`), compiled once on each machine."""
