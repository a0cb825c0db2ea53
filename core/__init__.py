"""The parts that every folder needs: the run directory and its record, files, errors, findings, the reporter,
columns, and the memory that was freed.
"""
