"""What `fp8q bench` writes and shows: `bench.json`, its tables and picture, and the capacity of memory."""
