"""Muon and what extends it."""
