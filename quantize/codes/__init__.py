"""The 8-bit formats, and the codes of numbers in them."""
