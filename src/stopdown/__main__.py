"""`python -m stopdown`, and so `torchrun --nproc-per-node 2 -m stopdown generate …`."""

from stopdown.app.cli import main

if __name__ == "__main__":
    main()
