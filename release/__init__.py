"""What `make release` does beyond the other targets: it compares the versions of all parts, and collects the files."""
