"""`python -m tilelang`."""

from tilelang.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
