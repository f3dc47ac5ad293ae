"""The models SGLang is told of before it looks for its own (SGLANG_EXTERNAL_MODEL_PACKAGE): the one that is served."""
