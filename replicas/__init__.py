"""What runs beside a GPU: the gRPC service and the engines behind it."""
