"""``python -m slime_core`` is ``slime``."""

from slime_core.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
