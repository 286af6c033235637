"""Lets ``python -m jostle`` be ``jostle``."""

from jostle.cli import main

if __name__ == "__main__":
    main()
