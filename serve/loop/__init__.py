"""The generation loop and the sessions that it drives, on ONNX Runtime and on a GPU.

These files are copied as they are into Triton repositories (`triton.repository.LOOP`), side by side, where there is no
fp8q: so they lie side by side here, and import their neighbours alone. `triton_model` is the model that drives them.
"""
