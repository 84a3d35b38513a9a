"""The model, written once for every framework; imports none. A plan is made of its declarations."""
