"""The entry point of ``minillm`` and of ``python -m minillm_core``."""

import signal


def main() -> int:
    """Import the program and run it; Ctrl-C during the import ends the process without a traceback."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from minillm_core.cli.main import main as run

    signal.signal(signal.SIGINT, before)
    return run()


if __name__ == "__main__":
    raise SystemExit(main())
