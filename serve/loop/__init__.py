"""The generation loop and the sessions that it drives, on ONNX Runtime and on a GPU.

These files are copied unchanged into Triton repositories (`triton.repository.LOOP`), into one folder, where fp8q is not
installed: so they lie in one folder here, and import only each other. `triton_model` is Triton's entry to them.
"""
