"""Open untrusted files and downloads: bounded reading, errors in one line, quiet libraries."""
