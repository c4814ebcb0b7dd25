"""Whether an address can be had, asked before anything slow is started."""

import socket


def free_address(host: str, port: int) -> tuple[str, int]:
    """The IP address of `host` and a port of it that nobody listens on; port 0 picks one.

    Servers that share ports would split connections with whoever else listens. Raises OSError, one
    line that names the address.
    """
    name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = error.strerror or str(error)
            raise OSError(f"cannot listen on {name}: {reason}") from error
        address, chosen = probe.getsockname()[:2]
        return address, chosen
