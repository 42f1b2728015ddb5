"""`python -m stopdown` is the command line."""

from stopdown.app.cli import main

if __name__ == "__main__":
    main()
