"""The settings of a run: schema, presets, and layers of settings merged into one config."""
