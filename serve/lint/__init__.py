"""Holds a Triton repository against rules: what would keep a server from starting, or have it wait for minutes."""
