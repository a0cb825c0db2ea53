"""Commands that join stages or read what stages wrote, and the checks before the first stage writes."""
