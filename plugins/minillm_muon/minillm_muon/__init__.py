"""Muon and its extensions."""
