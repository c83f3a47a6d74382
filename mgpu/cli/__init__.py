"""The `mgpu` command: one module for each subcommand that reads a cluster, and the helpers that they share."""
