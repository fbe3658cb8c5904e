"""YAML to typed, frozen, fully checked configuration."""
