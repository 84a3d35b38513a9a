"""Modules, written once; imports no framework. What they declare is what a plan is made of."""
