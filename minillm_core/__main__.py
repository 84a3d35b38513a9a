"""``python -m minillm_core`` is the command ``minillm``."""

from minillm_core.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
