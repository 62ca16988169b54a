"""`python -m weft` is the command line."""

from weft.cli.app import main

main()
