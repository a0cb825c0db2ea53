"""The tables and pictures in docs, a file a page: `tables.py` joins them and says how one is added."""
