"""`python -m gsanet` is the command `gsanet`."""

from gsanet.cli import main

if __name__ == "__main__":
    main()
