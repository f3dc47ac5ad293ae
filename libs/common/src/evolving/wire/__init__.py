"""Between core types and protobuf messages."""
