"""Optimizers besides AdamW and Muon, and averages of weights."""
