"""Group-relative objectives as pure functions: no config, model, logger or mesh in sight."""
