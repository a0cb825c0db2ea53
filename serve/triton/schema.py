"""Triton's own schema of `config.pbtxt`, by which fp8q writes and `fp8q lint` reads."""

from typing import Any

from ...core.errors import BackendError


def import_schema() -> tuple[Any, Any]:
    """Triton's `model_config_pb2` and protobuf's `text_format`; raises BackendError, naming the extra, where they are
    not installed.
    """
    try:
        from google.protobuf import text_format
        from tritonclient.grpc import model_config_pb2
    except (ImportError, RuntimeError) as error:  # tritonclient turns a missing grpcio into a RuntimeError
        raise BackendError(
            "",
            f"Triton's protobuf schema cannot be imported ({error})",
            "install it with `pip install 'tritonclient[grpc]'`",
        ) from error
    return model_config_pb2, text_format
