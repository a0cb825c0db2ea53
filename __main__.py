"""`python -m fp8q`."""

from .cli import main

main()
