"""What a run is told: the schema, the presets, and how layers of settings become one."""
