"""`python -m fp8q`."""

from .cli.main import main

main()
