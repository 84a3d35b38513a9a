"""A script on minillm's Python API."""
