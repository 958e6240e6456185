"""JSON schemas: what they allow, and how they are written for compilers."""
