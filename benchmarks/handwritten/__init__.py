"""The plain model as one would write it by hand, without minillm: what ours is compared with."""
