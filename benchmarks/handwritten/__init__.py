"""The plain model written by hand, without minillm: the baseline of comparisons."""
