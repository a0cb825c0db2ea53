"""What only an FP8 GPU can answer, a file a part: `run.py` joins them and says how they are run."""
