"""Update rules as stages, and schedules as values: pure functions, written once."""
