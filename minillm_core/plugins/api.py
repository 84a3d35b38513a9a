"""The number of the hook API. A change that can break a plugin raises it, with a line in the CHANGELOG."""

HOOK_API = 1
