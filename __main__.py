"""`python -m fp8q`."""

from .cli.commands import main

main()
