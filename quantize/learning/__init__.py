"""Learn codes of weights from the float model: distillation on the E4M3 grid."""
