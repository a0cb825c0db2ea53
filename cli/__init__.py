"""The command line: its commands, how they show results, how the terminal looks."""
