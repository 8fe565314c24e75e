"""``python -m halopose``: the command line."""

from halopose.cli.app import main

main()
