"""`python -m meshplan.cli`."""

from meshplan.cli._main import main

if __name__ == "__main__":
    raise SystemExit(main())
