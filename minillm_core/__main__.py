"""The entry point of ``python -m minillm_core``, which runs the command ``minillm``."""

from minillm_core.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
