"""The symmetric SGLang engine."""
