"""What makes the documentation; no part of any wheel."""
