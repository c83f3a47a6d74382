"""The `mgpu` command. One module for each subcommand that reads a cluster; helpers that they share."""
