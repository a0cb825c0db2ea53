"""The results of `fp8q bench`: `bench.json`, its tables and picture, and the capacity of memory."""
