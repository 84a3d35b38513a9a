"""The model, written once for every framework; imports none. A plan is built from its declarations."""
