"""Generators and checks of the documentation; part of no wheel."""
