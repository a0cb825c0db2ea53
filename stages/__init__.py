"""The stages of calibration, joined: corpus, measure, quantize, export. Each reads files and writes files of the run.

All that can be wrong with the input is found before the first file is written. A stage that is current (same inputs,
options and version) is passed over, so the same command goes on where it was killed, and another method chooses again
without measuring again.
"""
