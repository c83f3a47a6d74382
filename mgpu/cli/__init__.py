"""The `mgpu` command, and what people look at: tables, JSON, the card map."""
