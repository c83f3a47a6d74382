"""MIG on a node: cards are put into MIG mode (`manager`) and cut into instances as planned (`apply`), through NVML."""
