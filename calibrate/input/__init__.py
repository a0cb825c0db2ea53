"""Files and downloads that nobody here wrote: read within bounds, refused in one line, libraries kept quiet."""
