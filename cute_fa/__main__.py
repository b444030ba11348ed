"""`python -m cute_fa ...` is the command `cute-fa ...`; it also works from a checkout that is not installed."""

from cute_fa.cli import main

if __name__ == "__main__":
    main()
